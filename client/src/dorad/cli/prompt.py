"""Converts the prompt options to token ids, and token ids to text."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

import dorad
from dorad.cli.completion import complete_reference

if TYPE_CHECKING:
    from dorad.pictures import ModelPictures
    from dorad.text import ModelText

ModelOption = Annotated[
    Path | None,
    typer.Option(
        "--model",
        "-m",
        envvar="DORAD_MODEL",
        help="Model folder, for its tokenizer and chat template. Not needed with --token-ids.",
    ),
]
TokenIdsOption = Annotated[
    str, typer.Option("--token-ids", help="Token ids instead of text: 1,2,3.", show_default=False)
]
AdapterOption = Annotated[
    list[str] | None,
    typer.Option(
        "--adapter",
        "-a",
        help='"name" or "name@version"; repeatable, run side by side.',
        autocompletion=complete_reference,
    ),
]
BaseOption = Annotated[
    bool, typer.Option("--base", help="Also run the base model. Without --adapter it runs alone.")
]


@dataclass(frozen=True)
class Prompt:
    """Token ids with their images, and the tokenizer if a model folder was given."""

    token_ids: list[int]
    text: ModelText | None
    images: list[dorad.Image] | None = None

    def decode(self, token_ids: list[int]) -> str:
        """Text, or the ids if there is no tokenizer."""
        if self.text is None:
            return " ".join(map(str, token_ids))
        return self.text.decode(token_ids)

    def token(self, token_id: int) -> str:
        return str(token_id) if self.text is None else repr(self.text.token(token_id))[1:-1]


def adapters_of(adapters: list[str] | None, base: bool) -> list[str | None]:
    """References to run. None, the base model, is first with --base or without adapters."""
    chosen: list[str | None] = list(adapters or [])
    return [None, *chosen] if base or not chosen else chosen


def parse_ids(text: str, option: str = "--token-ids") -> list[int]:
    """Ids separated by commas or white space. Raises a usage error that names the option."""
    words = text.replace(",", " ").split()
    try:
        return [int(word) for word in words]
    except ValueError as error:
        raise typer.BadParameter(
            f"{text!r} is not a list of integers", param_hint=option
        ) from error


def _load(model: Path | None) -> ModelText | None:
    if model is None:
        return None
    from dorad.text import ModelText  # Slow to import, and needs an extra.

    return ModelText(model)


def _pictures(text: ModelText, files: Sequence[Path]) -> tuple[ModelPictures, list[Any]]:
    """The model's processor, and the pictures of the files."""
    from dorad.pictures import ModelPictures

    processor, pictures = ModelPictures(text), []
    for file in files:
        try:
            pictures.append(processor.read(file.read_bytes()))
        except OSError as error:
            message = f"cannot read {file}: {error.strerror}"
            raise typer.BadParameter(message, param_hint="--image") from error
        except ValueError as error:
            raise typer.BadParameter(f"{file}: {error}", param_hint="--image") from error
    return processor, pictures


def read(
    prompt: str | None,
    token_ids: str,
    model: Path | None,
    *,
    chat: bool,
    system: str = "",
    pictures: Sequence[Path] = (),
) -> Prompt:
    """The prompt of `generate` (chat) or `score` (plain text). "-" or a pipe: standard input."""
    if pictures and (token_ids or not chat):
        other = "--token-ids" if token_ids else "--raw"
        raise typer.BadParameter(f"needs the chat template: not with {other}", param_hint="--image")
    if token_ids:
        if prompt is not None:
            raise typer.BadParameter("give a text or --token-ids, not both", param_hint="PROMPT")
        return Prompt(parse_ids(token_ids), _load(model))
    if prompt is None and sys.stdin.isatty():
        raise typer.BadParameter("missing; give a text, --token-ids or a pipe", param_hint="PROMPT")
    text = _load(model)
    if text is None:
        raise typer.BadParameter(
            "a text prompt needs the model's tokenizer", param_hint="--model / DORAD_MODEL"
        )
    if prompt is None or prompt == "-":
        prompt = sys.stdin.read()
    if pictures and not text.has_chat_template:
        message = f"needs a chat template, and {model} has none"
        raise typer.BadParameter(message, param_hint="--image")
    if not chat or not text.has_chat_template:
        return Prompt(text.encode(prompt), text)
    messages: list[Any] = [{"role": "system", "content": system}] if system else []
    if not pictures:
        return Prompt(text.encode_chat([*messages, {"role": "user", "content": prompt}]), text)
    processor, found = _pictures(text, pictures)
    content = [*({"type": "image"} for _ in found), {"type": "text", "text": prompt}]
    chat_text = text.render_chat([*messages, {"role": "user", "content": content}])
    try:
        ids, images = processor.place(chat_text, found)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--image") from error
    return Prompt(ids, text, images)
