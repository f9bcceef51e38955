"""HTTP for all endpoints: bodies, answers, event streams and disconnects."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any, TypeVar

import pydantic
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from dorad.errors import DoradError
from dorad.gateway.callers import Caller, caller_of
from dorad.gateway.core import Gateway, Limits
from dorad.gateway.errors import Refusal, as_refusal
from dorad.gateway.writing import to_json, write

T = TypeVar("T")
Handler = Callable[[Gateway, Request, Caller], Awaitable[Response]]
ErrorBody = Callable[[Refusal], dict[str, Any]]

_log = logging.getLogger("dorad.gateway")


class ClientGone(Exception):
    """The client has disconnected."""


def answer(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(to_json(value), status, headers, "application/json")


async def long_answer(value: Any) -> Response:
    """An answer from a value with `Rows`."""
    return Response(await write(value), media_type="application/json")


async def read_body(request: Request, limits: Limits) -> bytes:
    """Raises Refusal (too large, too slow) or ClientGone."""
    body = bytearray()
    try:
        async with asyncio.timeout(limits.body_seconds):
            while True:
                message = await request.receive()
                if message["type"] == "http.disconnect":
                    raise ClientGone
                body += message.get("body", b"")
                if len(body) > limits.body_bytes:
                    text = f"the body has more than {limits.body_bytes} bytes (--max-body-bytes)"
                    raise Refusal(413, "BODY_TOO_LARGE", text)
                if not message.get("more_body", False):
                    return bytes(body)
    except TimeoutError:
        text = f"the body did not arrive within {limits.body_seconds:g} s"
        raise Refusal(408, "BODY_TOO_SLOW", text) from None


async def read_json(request: Request, limits: Limits) -> bytes:
    """The body of a JSON request. A request without content-type must not come from a browser.

    Browsers ask before they send JSON to another origin, and the gateway never permits it. So web
    pages cannot use a gateway on the loopback. Some clients of the Open Inference Protocol send no
    content-type; a browser would add an Origin header. aiohttp types an empty body as a stream of
    octets, which browsers ask about, too.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    untyped = not kind and "origin" not in request.headers
    if kind == "application/octet-stream" and not await read_body(request, limits):
        return b""
    if kind != "application/json" and not untyped:
        text = f"content-type must be application/json, not {kind!r}"
        raise Refusal(415, "CONTENT_TYPE_NOT_JSON", text)
    return await read_body(request, limits)


async def while_connected(receive: Receive, work: Awaitable[T]) -> T:
    """Awaits `work`. Cancels it and raises ClientGone when the client disconnects."""

    async def gone() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    task, watcher = asyncio.ensure_future(work), asyncio.create_task(gone())
    try:
        await asyncio.wait({task, watcher}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        return task.result()
    finally:
        task.cancel()
        watcher.cancel()
        await asyncio.gather(task, watcher, return_exceptions=True)


class EventStream(Response):
    """Server-sent events of JSON values, also with `Rows`. An error becomes the last event."""

    def __init__(
        self,
        events: AsyncGenerator[Any],
        caller: Caller,
        error_body: ErrorBody,
        *,
        last: bytes = b"",
        on_first: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(status_code=200, media_type="text/event-stream")
        del self.headers["content-length"]
        # Tell proxies not to buffer the answer.
        self.headers["cache-control"] = "no-cache"
        self.headers["x-accel-buffering"] = "no"
        self._events = events
        self._caller = caller
        self._error_body = error_body
        self._last = last
        self._on_first = on_first
        self._first: Any = None

    async def begin(self) -> EventStream:
        """Waits for the first event, so that an early error still gets its HTTP status."""
        try:
            self._first = await anext(self._events)
        except BaseException:
            await self._events.aclose()
            raise
        self._on_first()
        return self

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await while_connected(receive, self._send(send))

    async def _send(self, send: Send) -> None:
        async def event(data: bytes) -> None:
            body = b"data: " + data + b"\n\n"
            await send({"type": "http.response.body", "body": body, "more_body": True})

        await send(
            {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
        )
        async with contextlib.aclosing(self._events) as events:
            await event(await write(self._first))
            try:
                async for value in events:
                    await event(await write(value))
            except (Refusal, DoradError) as error:
                refusal = as_refusal(error)
                self._caller.record.reason = refusal.reason
                await event(to_json(self._error_body(refusal)))
            if self._last:
                await event(self._last)
        await send({"type": "http.response.body", "body": b"", "more_body": False})


class Endpoint:
    """One endpoint as an ASGI application, with error answers, limits and metrics."""

    def __init__(
        self,
        gateway: Gateway,
        name: str,
        handler: Handler,
        error_body: ErrorBody,
        *,
        body: type[pydantic.BaseModel] | None = None,
        body_required: bool = True,
        answers: type[pydantic.BaseModel] | None = None,
        events: type[pydantic.BaseModel] | None = None,
        public: bool = False,
    ) -> None:
        """`handler`'s docstring and the models are for the OpenAPI document: `body` of the request,
        `answers` of a whole answer, `events` of an event of a stream.

        `public`: needs no token, and does not count as a request in flight.
        """
        self.summary = (handler.__doc__ or "").partition("\n")[0]
        self.body = body
        self.body_required = body_required
        self.answers = answers
        self.events = events
        self._gateway = gateway
        self._name = name
        self._handler = handler
        self._error_body = error_body
        self._public = public

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        began, status = time.monotonic(), 499

        async def receiving() -> Any:
            message = await receive()
            record.received_bytes += len(message.get("body", b""))
            return message

        request = Request(scope, receiving)
        caller = caller_of(request.headers.items())
        record = caller.record
        record.model = request.path_params.get("model", "")
        if request.client is not None:
            record.peer = f"{request.client.host}:{request.client.port}"

        async def sending(message: Any) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [
                    *message["headers"],
                    (b"x-request-id", caller.request_id.encode()),
                ]
            record.sent_bytes += len(message.get("body", b""))
            await send(message)

        try:
            with contextlib.nullcontext() if self._public else self._gateway.places.place():
                response = await self._response(request, caller)
                await self._send(response, scope, receiving, sending)
        except (ClientGone, asyncio.CancelledError):  # CancelledError: the gateway ends.
            status = 499
        except (Refusal, DoradError) as error:
            # At the limit of requests in flight: no handler was called.
            await self._refuse(as_refusal(error), caller)(scope, receive, sending)
        finally:
            self._gateway.ended(self._name, caller, str(status), began, public=self._public)

    async def _send(self, response: Response, scope: Scope, receive: Receive, send: Send) -> None:
        """Raises ClientGone for a client that does not read. Server calls have ended by then."""
        try:
            async with asyncio.timeout(self._gateway.limits.answer_seconds):
                await response(scope, receive, send)
        except TimeoutError:
            raise ClientGone from None

    async def _response(self, request: Request, caller: Caller) -> Response:
        try:
            if not self._public:
                await self._gateway.admission.admit(caller)
            return await self._handler(self._gateway, request, caller)
        except (Refusal, DoradError) as error:
            return self._refuse(as_refusal(error), caller)
        except (ClientGone, asyncio.CancelledError):
            raise
        except Exception:
            _log.exception("%s failed, request %s", self._name, caller.request_id)
            refusal = Refusal(500, "GATEWAY_ERROR", "the gateway failed; see its log")
            return self._refuse(refusal, caller)

    def _refuse(self, refusal: Refusal, caller: Caller) -> Response:
        caller.record.reason = refusal.reason
        return answer(self._error_body(refusal), refusal.status, refusal.headers())
