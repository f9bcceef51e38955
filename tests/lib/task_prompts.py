"""Prompts of several kinds of text, for measurements on a model that was trained."""

from dorad.text import ModelText

PASSAGE = (
    "The harbour lay quiet under a low sky. Two boats had come in with the night tide, and their "
    "crews were mending nets on the quay. A boy counted the baskets of herring, wrote the numbers "
    "on a slate, and carried the slate to the office, where the clerk copied them into a book."
)

KINDS = {
    "chat": [
        "Why is the sky blue?",
        "How do I keep basil alive in a pot?",
        "What should I see in Lisbon in two days?",
        "Explain to a child why we sleep.",
    ],
    "code": [
        "Write a Python class Matrix with addition, subtraction and multiplication.",
        "Write a Python function that parses a CSV line with quoted fields, and its tests.",
        "Write JSON for five books with title, author, year and publisher.",
        "Write C functions min, max, sum and mean of an array of doubles.",
    ],
    "lists": [
        "List the months of the year with their number of days, one per line.",
        "List the planets in order, each with its diameter and its number of moons.",
        "Count from 1 to 60 in words, one per line.",
        "Make a table of the squares and cubes of 1 to 20.",
    ],
    "rewriting": [
        f"Correct the spelling of this text and repeat it: {PASSAGE}",
        f"Repeat this text twice: {PASSAGE}",
        f"Rewrite this text in the present tense: {PASSAGE}",
        f"Number the sentences of this text: {PASSAGE}",
    ],
}


def task_prompts(text: ModelText, kind: str) -> list[list[int]]:
    """Token ids of the kind's prompts, as chats with one turn."""
    return [text.encode_chat([{"role": "user", "content": prompt}]) for prompt in KINDS[kind]]
