"""Load through OpenAI's HTTP API: POST /v1/completions with token ids, as a stream.

HTTP/1.1 on asyncio's streams: one connection for each request in flight, kept for the next one.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import ssl
import urllib.parse
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass
from typing import Any

import dorad
from dorad._access import is_loopback
from dorad.errors import DoradError
from dorad.load.target import Connection, Piece, Vocabulary
from dorad.types import GenerateRequest

_FAILURES = {"abort": "ABORTED", "aborted": "ABORTED", "error": "INTERNAL"}


@dataclass(frozen=True)
class OpenAI:
    """A server with OpenAI's API, such as `doractl gateway`.

    DORAD_TOKEN is the bearer token, DORAD_CA_FILE has the certificates for https.
    """

    url: str
    """As http://host:port, without a path."""
    words: Vocabulary
    """For random prompts: the API does not tell it."""
    timeout: float = 600.0

    def __post_init__(self) -> None:
        parts = urllib.parse.urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query:
            raise ValueError(f"{self.url!r} is not a URL such as http://127.0.0.1:8000")
        if parts.path.rstrip("/") not in ("", "/v1"):
            raise ValueError(f"{self.url!r} has a path: give the address alone")
        local = is_loopback(parts.hostname)
        if parts.scheme == "http" and not local and os.environ.get("DORAD_TOKEN"):
            raise ValueError(f"the token would be sent to {self.url} in plain text: use https")

    @contextlib.asynccontextmanager
    async def connect(self) -> AsyncIterator[Connection]:
        made = _Http(self)
        try:
            yield made
        finally:
            made.close()


class _Answer:
    """The head of a response, and its body as it comes."""

    def __init__(self, reader: asyncio.StreamReader, status: int, headers: dict[str, str]) -> None:
        self._reader = reader
        self.status = status
        self.headers = headers

    @classmethod
    async def read(cls, reader: asyncio.StreamReader) -> _Answer:
        """Raises EOFError if the connection was closed before."""
        status = await reader.readline()
        if not status:
            raise EOFError("the connection was closed")
        headers = {}
        while (line := (await reader.readline()).strip()) != b"":
            name, _, value = line.decode("latin-1").partition(":")
            headers[name.strip().lower()] = value.strip()
        return cls(reader, int(status.split()[1]), headers)

    async def chunks(self) -> AsyncIterator[bytes]:
        if self.headers.get("transfer-encoding", "").lower() == "chunked":
            while size := int((await self._reader.readline()).split(b";")[0], 16):
                yield await self._reader.readexactly(size)
                await self._reader.readline()
            await self._reader.readline()
        elif (length := int(self.headers.get("content-length", 0))) > 0:
            yield await self._reader.readexactly(length)

    async def body(self) -> bytes:
        return b"".join([chunk async for chunk in self.chunks()])

    @property
    def reusable(self) -> bool:
        return self.headers.get("connection", "").lower() != "close"


class _Http:
    def __init__(self, target: OpenAI) -> None:
        self._target = target
        parts = urllib.parse.urlsplit(target.url)
        secure = parts.scheme == "https"
        self._host = parts.netloc
        self._address = (parts.hostname or "", parts.port or (443 if secure else 80))
        ca_file = os.environ.get("DORAD_CA_FILE") or None
        self._tls = ssl.create_default_context(cafile=ca_file) if secure else None
        token = os.environ.get("DORAD_TOKEN")
        self._headers = f"authorization: Bearer {token}\r\n" if token else ""
        self._idle: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []
        self._base = ""

    def close(self) -> None:
        for _, writer in self._idle:
            writer.close()

    async def vocabulary(self) -> Vocabulary:
        """Also finds the name of the base model."""
        async with self._call("GET", "/v1/models", b"") as answer:
            models = json.loads(await answer.body())["data"]
        # vLLM and the gateway list adapters with their base as `parent`.
        self._base = next((m["id"] for m in models if not m.get("parent")), "")
        if not self._base:
            raise dorad.NotFound(f"{self._target.url} lists no base model", code="NOT_FOUND")
        return self._target.words

    async def stream(self, request: GenerateRequest) -> AsyncGenerator[Piece, None]:
        written = {
            "model": request.adapter or self._base,
            "prompt": list(map(int, request.token_ids)),
            "n": request.n,
            "max_tokens": request.max_tokens,
            "ignore_eos": request.ignore_eos,
            "temperature": request.temperature,
            "seed": request.seed,
            "stream": True,
            "return_token_ids": True,
        }
        async with self._call("POST", "/v1/completions", json.dumps(written).encode()) as answer:
            async for event in _events(answer):
                for choice in event["choices"]:
                    # A server without return_token_ids: each text is taken for a token.
                    ids = choice.get("token_ids")
                    tokens = len(ids) if ids is not None else int(bool(choice.get("text")))
                    failure = _FAILURES.get(choice.get("finish_reason") or "", "")
                    yield Piece(choice["index"], tokens, failure)

    @contextlib.asynccontextmanager
    async def _call(self, method: str, path: str, body: bytes) -> AsyncIterator[_Answer]:
        head = (
            f"{method} {path} HTTP/1.1\r\nhost: {self._host}\r\n{self._headers}"
            f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        )
        writer = None
        try:
            async with asyncio.timeout(self._target.timeout):
                (reader, writer), answer = await self._send(head.encode() + body)
                if answer.status != 200:
                    raise _refusal(answer, await answer.body())
                yield answer
                if answer.reusable:
                    self._idle.append((reader, writer))
                    writer = None
        except TimeoutError:
            raise dorad.DeadlineExceeded(
                "the answer took too long", code="DEADLINE_EXCEEDED"
            ) from None
        except (OSError, EOFError) as error:
            raise dorad.Unavailable(f"{self._target.url}: {error}", code="UNAVAILABLE") from error
        except (ValueError, KeyError, IndexError) as error:
            message = f"{self._target.url} answers against OpenAI's API: {error!r}"
            raise dorad.Internal(message, code="INTERNAL") from error
        finally:
            if writer is not None:
                writer.close()

    async def _send(
        self, message: bytes
    ) -> tuple[tuple[asyncio.StreamReader, asyncio.StreamWriter], _Answer]:
        while self._idle:
            reader, writer = self._idle.pop()
            try:
                writer.write(message)
                await writer.drain()
                return (reader, writer), await _Answer.read(reader)
            except (OSError, EOFError):  # The server had closed the idle connection.
                writer.close()
        reader, writer = await asyncio.open_connection(*self._address, ssl=self._tls)
        writer.write(message)
        await writer.drain()
        return (reader, writer), await _Answer.read(reader)


async def _events(answer: _Answer) -> AsyncIterator[dict[str, Any]]:
    """Server-sent events, until [DONE]. Reads the body to its end."""
    rest = b""
    done = False
    async for chunk in answer.chunks():
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            if done or not line.startswith(b"data:"):
                continue
            data = line.removeprefix(b"data:").strip()
            if data == b"[DONE]":
                done = True
                continue
            event = json.loads(data)
            if "error" in event:
                raise _failure(500, event, None)
            yield event
    if not done:
        raise EOFError("the stream ended before [DONE]")


def _refusal(answer: _Answer, body: bytes) -> DoradError:
    try:
        found = json.loads(body)
    except ValueError:
        found = None
    milliseconds = answer.headers.get("retry-after-ms")
    seconds = answer.headers.get("retry-after")
    retry_after = None
    with contextlib.suppress(ValueError):
        retry_after = float(milliseconds) / 1000 if milliseconds else float(seconds or "nan")
    return _failure(answer.status, found, retry_after)


def _failure(status: int, body: Any, retry_after: float | None) -> DoradError:
    error = body.get("error") if isinstance(body, dict) else None
    error = error if isinstance(error, dict) else {}
    reason = str(error.get("code") or "")
    message = str(error.get("message") or f"HTTP {status}")
    if retry_after is not None and retry_after != retry_after:  # NaN: no hint.
        retry_after = None
    kind: type[DoradError] = dorad.Internal
    if status == 429:
        kind = dorad.Overloaded
    elif status == 503:
        kind = dorad.Unavailable
    elif 400 <= status < 500:
        kind = dorad.InvalidArgument
    return kind(message, code=f"HTTP_{status}", reason=reason, retry_after=retry_after)
