"""Converts text to token ids and back, with a model folder's tokenizer and chat template.

The server knows tokens only; `doractl` and small scripts use this module. Needs `dorad[text]`.
"""

from __future__ import annotations

import codecs
import datetime
import functools
import json
import os
import pathlib
import re
from collections.abc import Sequence
from typing import Any, NoReturn

from dorad.types import TokenIds

try:
    import jinja2
    import jinja2.ext
    import jinja2.nodes
    import jinja2.parser
    import jinja2.sandbox
    import tokenizers
except ImportError as error:
    raise ImportError("dorad.text needs its extra: pip install 'dorad[text]'") from error

Message = dict[str, Any]
"""{"role": "user", "content": "…"}"""

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_UNFINISHED = 3  # Bytes, at most, of a character in UTF-8 that is not complete.
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")  # Byte fallback, as in Llama 2's vocabulary.


def _byte_alphabet() -> dict[str, int]:
    """The characters for bytes in byte-level vocabularies."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(b): b for b in plain} | {chr(256 + i): b for i, b in enumerate(others)}


_BYTES = _byte_alphabet()


class ModelText:
    """The tokenizer of one Hugging Face model folder. Thread-safe after construction.

    Args:
      folder: has tokenizer.json; optionally tokenizer_config.json and chat_template.jinja.

    Raises FileNotFoundError without tokenizer.json, ValueError when a file cannot be understood.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = root = pathlib.Path(folder)
        file = root / "tokenizer.json"
        if not file.is_file():
            raise FileNotFoundError(f"{root} has no tokenizer.json")
        try:
            self._tokenizer = tokenizers.Tokenizer.from_file(str(file))
        except Exception as error:  # The library raises bare Exception.
            raise ValueError(f"{file}: {error}") from error
        # Trainers leave their batches' limits in the file.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        added = self._tokenizer.get_added_tokens_decoder()
        self._added = set(added)
        self._special = {token_id for token_id, token in added.items() if token.special}
        self._byte_level = "ByteLevel" in str(self._tokenizer.decoder)
        self._config: dict[str, Any] = {}
        if (root / "tokenizer_config.json").is_file():
            self._config = json.loads((root / "tokenizer_config.json").read_text(encoding="utf-8"))
        self._source = _template_source(root, self._config)

    @property
    def has_chat_template(self) -> bool:
        return self._source is not None

    @functools.cached_property
    def _template(self) -> jinja2.Template:
        """Compiled at the first chat, so that a broken template fails chats only. Raises
        ValueError."""
        if self._source is None:
            raise ValueError("the model folder has no chat template")
        return _compile(self._source)

    def check_chat_template(self) -> None:
        """Raises ValueError for a template that does not parse."""
        if self.has_chat_template:
            _ = self._template

    def encode(self, text: str, *, special_tokens: bool = True) -> list[int]:
        """Token ids of plain text, with the tokenizer's own begin token if it adds one."""
        return list(self._tokenizer.encode(text, add_special_tokens=special_tokens).ids)

    def render_chat(self, messages: Sequence[Message], **variables: Any) -> str:
        """The conversation in the model's chat template, ready for the answer.

        Raises ValueError when the folder has no template or the template refuses the messages.
        """
        template = self._template
        special = {
            name: _token_text(self._config.get(name))
            for name in ("bos_token", "eos_token", "unk_token", "pad_token")
        }
        # The variables of transformers; `variables` adds others.
        known = {"add_generation_prompt": True, "tools": None, "documents": None, **special}
        try:
            return template.render({**known, **variables, "messages": list(messages)})
        except jinja2.TemplateError as error:
            raise ValueError(f"the chat template refuses these messages: {error}") from error

    def encode_chat(self, messages: Sequence[Message], **variables: Any) -> list[int]:
        """Token ids of `render_chat`; the template writes all special tokens itself."""
        return self.encode(self.render_chat(messages, **variables), special_tokens=False)

    def decode(self, token_ids: TokenIds, *, skip_special_tokens: bool = True) -> str:
        return str(
            self._tokenizer.decode(
                [int(i) for i in token_ids], skip_special_tokens=skip_special_tokens
            )
        )

    def token(self, token_id: int) -> str:
        """One token's text, for tables; may be part of a character."""
        return self.decode([token_id], skip_special_tokens=False)

    def vocabulary_token(self, token_id: int) -> str:
        """One token as it stands in the vocabulary, such as "Ġthe"; "" if it has no such id."""
        return self._tokenizer.id_to_token(token_id) or ""

    def token_bytes(self, token_id: int, *, skip_special_tokens: bool = False) -> bytes:
        """One token's part of the text, as UTF-8; may be part of a character."""
        if skip_special_tokens and token_id in self._special:
            return b""
        token = self._tokenizer.id_to_token(token_id)
        if token is None:  # Models may have more rows than their tokenizer has tokens.
            return b""
        if token_id in self._added:
            return token.encode()
        if self._byte_level:
            return bytes(_BYTES[c] for c in token if c in _BYTES)
        if match := _BYTE_TOKEN.fullmatch(token):
            return bytes([int(match[1], 16)])
        return token.replace("\N{LOWER ONE EIGHTH BLOCK}", " ").encode()

    def stream(
        self,
        *,
        skip_special_tokens: bool = True,
        stop: Sequence[str] = (),
        include_stop: bool = False,
        min_tokens: int = 0,
    ) -> TextStream:
        """A decoder for tokens that arrive one after another.

        Args:
          stop: strings that end the text.
          include_stop: keep the stop string.
          min_tokens: none of the first tokens, so many, completes a stop string.
        """
        return TextStream(
            self, skip_special_tokens, StopText(stop, include=include_stop), min_tokens
        )


class StopText:
    """Growing text that ends at the first stop string. Not thread-safe.

    Text that could begin a stop string is held back: what has been taken is final.
    """

    def __init__(self, strings: Sequence[str], *, include: bool = False) -> None:
        if isinstance(strings, str):
            raise TypeError(f"stop must be a list of strings, not {strings!r}")
        if not all(strings):
            raise ValueError("a stop string has at least one character")
        self._strings = tuple(dict.fromkeys(strings))
        self._include = include
        self._longest = max((len(s) for s in strings), default=0)
        self._text = ""
        self._taken = 0
        self._searched = 0  # No valid stop string ends before this point.
        self.stopped: str | None = None
        """The stop string that ended the text. Later text is ignored."""

    @property
    def strings(self) -> tuple[str, ...]:
        return self._strings

    @property
    def length(self) -> int:
        """Characters so far, without those behind the end."""
        return len(self._text)

    def add(self, new: str, *, counts: bool = True) -> None:
        """`counts`: False: no stop string ends within the new text."""
        if self.stopped is not None:
            return
        self._text += new
        if counts:
            self._search()
        self._searched = len(self._text)

    def take(self, *, final: bool = False) -> str:
        """The new final text. `final`: nothing follows."""
        end = len(self._text)
        if self.stopped is None and not final:
            end -= self._held_back()
        new = self._text[self._taken : end]
        self._taken = max(self._taken, end)
        return new

    def _search(self) -> None:
        """Cuts the text at the stop string that begins first, of those that end in its new part."""
        found = [
            (at, s)
            for s in self._strings
            if (at := self._text.find(s, max(0, self._searched - len(s) + 1))) >= 0
        ]
        if not found:
            return
        at, self.stopped = min(found, key=lambda pair: (pair[0], -len(pair[1])))
        self._text = self._text[: at + (len(self.stopped) if self._include else 0)]

    def _held_back(self) -> int:
        """Length of the longest suffix that could begin a stop string."""
        # Text that was taken begins no stop string, and more text does not change that.
        first = max(self._taken, len(self._text) - self._longest + 1)
        for begin in range(first, len(self._text)):
            tail = self._text[begin:]
            if any(s.startswith(tail) for s in self._strings):
                return len(tail)
        return 0


class TextStream:
    """Decodes a growing token sequence up to a stop string; the pieces join to the whole text. Not
    thread-safe."""

    def __init__(
        self,
        text: ModelText,
        skip_special_tokens: bool = True,
        stops: StopText | None = None,
        min_tokens: int = 0,
    ) -> None:
        self._text = text
        self._skip = skip_special_tokens
        self._stops = StopText(()) if stops is None else stops
        self._min_tokens = min_tokens
        self.count = 0
        """Tokens of the text, up to the one that completed a stop string."""
        self._ids: list[int] = []
        # Ids before _start are done; those in [_start, _shown) have been shown and give context:
        # a token's text can depend on the one before (spaces).
        self._start = 0
        self._shown = 0
        # 1 when the last of those ends within a character that has not been shown.
        self._open = 0

    @property
    def stopped(self) -> str | None:
        """The stop string that ended the text. Later tokens are ignored."""
        return self._stops.stopped

    @property
    def length(self) -> int:
        """Characters so far, also of held-back text that could begin a stop string."""
        return self._stops.length

    def push(self, token_ids: TokenIds) -> str:
        """Adds tokens; returns the new final text. Holds back an unfinished character, and text
        that could begin a stop string."""
        ids = [int(i) for i in token_ids]
        parts = [[i] for i in ids] if self._stops.strings else [ids]
        for part in parts:
            if self.stopped is not None:
                break
            self.count += len(part)
            self._stops.add(self._add(part), counts=self.count > self._min_tokens)
        return self._stops.take()

    def finish(self) -> str:
        """The held-back text: an incomplete character appears as U+FFFD."""
        if self.stopped is None:
            rest = self._advance(self._decode(self._start, len(self._ids)), len(self._ids))
            self._stops.add(rest, counts=self.count > self._min_tokens)
        return self._stops.take(final=True)

    def _add(self, ids: list[int]) -> str:
        self._ids += ids
        fresh = self._decode(self._start, len(self._ids))
        if not fresh.endswith(_REPLACEMENT):
            return self._advance(fresh, len(self._ids))
        end, is_open = self._whole()
        if end <= self._shown:
            return ""
        return self._advance(self._decode(self._start, end), end, is_open)

    def _whole(self) -> tuple[int, int]:
        """(index of an unfinished character's first token, 1 if the token before has bytes of it).

        It has at most three bytes: bytes that the last three tokens do not complete are not text,
        and are not held back.
        """
        end = len(self._ids)
        tail = [
            self._text.token_bytes(i, skip_special_tokens=self._skip)
            for i in self._ids[-_UNFINISHED:]
        ]
        left = _unfinished(b"".join(tail))
        while left and len(tail[-1]) <= left:
            left -= len(tail.pop())
            end -= 1
        return end, int(left > 0)

    def _decode(self, begin: int, end: int) -> str:
        return self._text.decode(self._ids[begin:end], skip_special_tokens=self._skip)

    def _advance(self, fresh: str, end: int, is_open: int = 0) -> str:
        before = self._decode(self._start, self._shown)
        new = fresh[len(before) - self._open : len(fresh) - is_open]
        self._start, self._shown, self._open = self._shown, end, is_open
        return new


def _unfinished(data: bytes) -> int:
    """The number of bytes at the end that begin an incomplete character."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    decoder.decode(data[-_UNFINISHED:])
    return len(decoder.getstate()[0])


def _template_source(root: pathlib.Path, config: dict[str, Any]) -> str | None:
    """chat_template.jinja; in older folders chat_template.json, of processors of images, or the
    template inside tokenizer_config.json."""
    file = root / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    file = root / "chat_template.json"
    if file.is_file():
        return str(json.loads(file.read_text(encoding="utf-8"))["chat_template"])
    template = config.get("chat_template")
    if isinstance(template, list):  # Several named templates.
        named = {entry["name"]: entry["template"] for entry in template}
        return named.get("default")
    return template


class _Generation(jinja2.ext.Extension):
    """{% generation %}, which marks answers for a trainer's loss: renders its content unchanged."""

    tags = {"generation"}  # noqa: RUF012  (as jinja2 has it)

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node | list[jinja2.nodes.Node]:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body, lineno=line)


def _compile(source: str) -> jinja2.Template:

    def refuse(message: str) -> NoReturn:
        raise jinja2.TemplateError(message)

    # Templates are untrusted: sandboxed, without access to Python.
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _Generation]
    )
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    environment.filters["tojson"] = _tojson
    try:
        return environment.from_string(source)
    except jinja2.TemplateError as error:
        raise ValueError(f"the chat template does not parse: {error}") from error


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as templates expect it: unlike jinja2's own filter, without HTML escapes."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _token_text(token: Any) -> str:
    """A special token is a string, or (older folders) an object with its content."""
    if isinstance(token, dict):
        token = token.get("content")
    return token or ""
