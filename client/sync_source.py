"""Writes the synchronous client, src/dorad/_sync, from the asyncio one, src/dorad/_aio.

The two differ by `async` and `await`, by the names in _NAMES, and by the passages in _TEXTS. Larger
differences are in two modules with the same names: dorad._asyncio and dorad._threads.

generate.py runs it with the rest. By itself it needs Python alone.

    python client/sync_source.py
"""

from __future__ import annotations

import io
import pathlib
import re
import tokenize

HERE = pathlib.Path(__file__).resolve().parent

_HEADER = "# Generated from {source} by client/sync_source.py: edit that file, not this one.\n"

_NAMES = {
    "_aio": "_sync",
    "_asyncio": "_threads",
    "__aenter__": "__enter__",
    "__aexit__": "__exit__",
    "__aiter__": "__iter__",
    "__anext__": "__next__",
    "StopAsyncIteration": "StopIteration",
    "AsyncIterator": "Iterator",
    "AbstractAsyncContextManager": "AbstractContextManager",
    "asynccontextmanager": "contextmanager",
}

# (file, asyncio's passage, the passage for threads). Each must be there once.
_TEXTS = [
    (
        "client.py",
        "A connection to a dorad server, for one event loop: make it inside a coroutine.\n",
        "A connection to a dorad server. Thread-safe; make one and share it.\n\n"
        "    Not usable across fork(): make the client in the child, or send it there pickled.\n",
    ),
    (
        "pool.py",
        "Several servers of one model as one, for one event loop: make it inside a coroutine.\n",
        "Several servers of one model as one. Thread-safe; make one and share it.\n",
    ),
    (
        "fleet.py",
        "Servers that keep the same versions, for one event loop: make it inside a coroutine.\n",
        "Servers that keep the same versions. Thread-safe; make one and share it.\n",
    ),
    (
        "fleet.py",
        "connect: makes the client of a target, for clients with other arguments.\n",
        "connect: makes the `dorad.aio.Client` of a target, for clients with other arguments.\n"
        "        Called on the fleet's own event loop, which runs in a thread of its own.\n",
    ),
    (
        "pool.py",
        "connect: makes the client of a target, for clients with other arguments.\n",
        "connect: makes the `dorad.aio.Client` of a target, for clients with other arguments.\n"
        "        Called on the pool's own event loop, which runs in a thread of its own.\n",
    ),
    (
        "rollouts.py",
        "`concurrency` counts prompts in all.\n",
        "`concurrency` counts prompts in all.\n\n"
        "        `progress` is called from the pool's own thread: it must not call the pool.\n",
    ),
    ("inference.py", "concurrency: int = 512,", "concurrency: int = 128,"),
    ("inference.py", ", on the event loop.", ", from worker threads."),
    ("inference.py", "in an `async with`", "in a `with`"),
    (
        "control.py",
        "await asyncio.to_thread(train_step)\n",
        "loss.backward()\n                optimizer.step()\n",
    ),
    ("stream.py", "an async iterator", "an iterator"),
    ("stream.py", "from one task;", "from one thread;"),
    ("stream.py", "Another task", "Another thread"),
]


def synchronous(name: str, text: str) -> str:
    """The synchronous form of the file `name`. Raises ValueError when a passage is not there."""
    for file, ours, theirs in _TEXTS:
        if file == name:
            if text.count(ours) != 1:
                raise ValueError(f"{name}: not there once: {ours!r}")
            text = text.replace(ours, theirs)
    return _HEADER.format(source=f"_aio/{name}") + _without_async(text)


def _without_async(text: str) -> str:
    lines = text.splitlines(keepends=True)
    starts = [0]
    for line in lines:
        starts.append(starts[-1] + len(line))

    def place(position: tuple[int, int]) -> int:
        return starts[position[0] - 1] + position[1]

    changes: list[tuple[int, int, str]] = []  # (begin, end, replacement)
    awaitable: list[int] = []  # Depths of brackets inside of the open Awaitable[...].
    depth = 0
    tokens = list(tokenize.generate_tokens(io.StringIO(text).readline))
    for token, after in zip(tokens, [*tokens[1:], tokens[-1]], strict=True):
        begin, end = place(token.start), place(token.end)
        if token.string in ("async", "await"):
            changes.append((begin, place(after.start), ""))
        elif token.string == "Awaitable" and after.string == "[":
            changes.append((begin, place(after.end), ""))
            awaitable.append(depth + 1)
        elif token.type == tokenize.NAME and token.string in _NAMES:
            changes.append((begin, end, _NAMES[token.string]))
        elif token.type in (tokenize.STRING, tokenize.COMMENT):
            changes.append((begin, end, re.sub(r"\b(async|await) ", "", token.string)))
        if token.string == "[":
            depth += 1
        elif token.string == "]":
            if awaitable and awaitable[-1] == depth:
                changes.append((begin, end, ""))
                awaitable.pop()
            depth -= 1
    for begin, end, new in reversed(changes):
        text = text[:begin] + new + text[end:]
    return text


def generate(source: pathlib.Path, out: pathlib.Path) -> None:
    """Makes the folder `out` the synchronous form of the folder `source`; writes changed files."""
    out.mkdir(parents=True, exist_ok=True)
    wanted = {path.name: synchronous(path.name, path.read_text()) for path in source.glob("*.py")}
    for path in out.glob("*.py"):
        if path.name not in wanted:
            path.unlink()
    for name, text in wanted.items():
        path = out / name
        if not path.exists() or path.read_text() != text:
            path.write_text(text)


if __name__ == "__main__":
    generate(HERE / "src/dorad/_aio", HERE / "src/dorad/_sync")
