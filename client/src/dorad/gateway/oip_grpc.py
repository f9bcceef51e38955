"""The Open Inference Protocol over gRPC: inference.GRPCInferenceService."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any, NoReturn, TypeVar

import grpc
from google.protobuf import any_pb2
from google.protobuf.json_format import ParseDict
from google.rpc import error_details_pb2, status_pb2

from dorad.errors import DoradError
from dorad.gateway import oip
from dorad.gateway import open_inference_pb2 as pb
from dorad.gateway.callers import Caller, Record, caller_of
from dorad.gateway.core import Gateway
from dorad.gateway.errors import Refusal, as_refusal
from dorad.gateway.open_inference_pb2_grpc import GRPCInferenceServiceServicer

T = TypeVar("T")

_CODES = {
    400: grpc.StatusCode.INVALID_ARGUMENT,
    401: grpc.StatusCode.UNAUTHENTICATED,
    403: grpc.StatusCode.PERMISSION_DENIED,
    404: grpc.StatusCode.NOT_FOUND,
    409: grpc.StatusCode.FAILED_PRECONDITION,
    429: grpc.StatusCode.RESOURCE_EXHAUSTED,
    499: grpc.StatusCode.CANCELLED,
    501: grpc.StatusCode.UNIMPLEMENTED,
    503: grpc.StatusCode.UNAVAILABLE,
    504: grpc.StatusCode.DEADLINE_EXCEEDED,
}
_STREAM_REQUESTS = 64  # Maximum number of concurrent requests of one stream.


class OpenInferenceService(GRPCInferenceServiceServicer):
    """The service on grpc.aio. Use it from one event loop, like its gateway."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    async def _unary(
        self, context: Any, endpoint: str, work: Callable[[Caller], Awaitable[T]], model: str = ""
    ) -> T:
        caller = _caller(context, model)
        with self._observed(endpoint, caller) as done:
            try:
                with self._gateway.places.place():
                    await self._gateway.admission.admit(caller)
                    found = await work(caller)
            except (Refusal, DoradError) as error:
                refusal = as_refusal(error)
                done(_code(refusal).name, refusal.reason)
                await _abort(context, refusal)
            done("OK")
            return found

    @contextlib.contextmanager
    def _observed(self, endpoint: str, caller: Caller) -> Iterator[Callable[..., None]]:
        began, code = time.monotonic(), "CANCELLED"

        def done(how: str, reason: str = "") -> None:
            nonlocal code
            code, caller.record.reason = how, reason

        try:
            yield done
        finally:
            self._gateway.ended(endpoint, caller, code, began)

    # --- Health and metadata ----------------------------------------------------------------------

    async def ServerLive(self, request: Any, context: Any) -> Any:
        return pb.ServerLiveResponse(live=True)

    async def ServerReady(self, request: Any, context: Any) -> Any:
        return pb.ServerReadyResponse(ready=await self._gateway.healthy())

    async def ServerMetadata(self, request: Any, context: Any) -> Any:
        return pb.ServerMetadataResponse(**oip.server_metadata())

    async def ModelReady(self, request: Any, context: Any) -> Any:
        async def work(caller: Caller) -> Any:
            up = await oip.ready(self._gateway, caller, request.name, request.version)
            return pb.ModelReadyResponse(ready=up)

        return await self._unary(context, "grpc_model_ready", work, request.name)

    async def ModelMetadata(self, request: Any, context: Any) -> Any:
        async def work(caller: Caller) -> Any:
            found = await oip.metadata(self._gateway, caller, request.name, request.version)
            return pb.ModelMetadataResponse(**found)

        return await self._unary(context, "grpc_model_metadata", work, request.name)

    async def ModelConfig(self, request: Any, context: Any) -> Any:
        async def work(caller: Caller) -> Any:
            found = await oip.configuration(self._gateway, caller, request.name, request.version)
            return pb.ModelConfigResponse(config=ParseDict(found, pb.ModelConfig()))

        return await self._unary(context, "grpc_model_config", work, request.name)

    async def ModelStatistics(self, request: Any, context: Any) -> Any:
        async def work(caller: Caller) -> Any:
            rows = await oip.statistics(self._gateway, caller, request.name, request.version)
            return ParseDict({"model_stats": rows}, pb.ModelStatisticsResponse())

        return await self._unary(context, "grpc_model_statistics", work, request.name)

    async def RepositoryIndex(self, request: Any, context: Any) -> Any:
        async def work(caller: Caller) -> Any:
            rows = await oip.index(self._gateway, caller, ready_only=request.ready)
            return pb.RepositoryIndexResponse(
                models=[pb.RepositoryIndexResponse.ModelIndex(**row) for row in rows]
            )

        return await self._unary(context, "grpc_repository_index", work)

    # --- Inference --------------------------------------------------------------------------------

    async def _understood(self, request: Any, caller: Caller, *, stream: bool) -> oip.Inference:
        return await oip.understand(
            self._gateway,
            caller,
            model=request.model_name,
            version=request.model_version,
            request_id=request.id,
            inputs=_inputs(request),
            outputs=[output.name for output in request.outputs],
            parameters={k: _parameter(v) for k, v in request.parameters.items()},
            stream=stream,
        )

    async def ModelInfer(self, request: Any, context: Any) -> Any:
        async def work(caller: Caller) -> Any:
            inference = await self._understood(request, caller, stream=False)
            return _response(await oip.infer(self._gateway, caller, inference))

        return await self._unary(context, "grpc_model_infer", work, request.model_name)

    async def ModelStreamInfer(self, requests: AsyncIterator[Any], context: Any) -> Any:
        answers: asyncio.Queue[Any] = asyncio.Queue(maxsize=256)
        free = asyncio.Semaphore(_STREAM_REQUESTS)
        caller = await self._admitted(context)

        async def read() -> None:
            async with asyncio.TaskGroup() as group:
                async for request in requests:
                    await free.acquire()
                    task = group.create_task(self._stream_one(request, caller, answers))
                    task.add_done_callback(lambda _: free.release())
            await answers.put(None)

        reader = asyncio.create_task(read())
        # Ends the stream if the reader fails.
        reader.add_done_callback(lambda task: _wake(task, answers))
        try:
            while (answer := await answers.get()) is not None:
                yield answer
            stuck = False
            try:
                await reader  # Raises the reader's error.
            except* _Stuck:
                stuck = True
            if stuck:
                message = "the client did not read the answers in time"
                await _abort(context, Refusal(504, "STREAM_NOT_READ", message))
        finally:
            reader.cancel()
            await asyncio.gather(reader, return_exceptions=True)

    async def _admitted(self, context: Any) -> Caller:
        """The caller of a stream. Aborts the call if the caller is refused."""
        caller = _caller(context)
        try:
            await self._gateway.admission.admit(caller)
        except (Refusal, DoradError) as error:
            refusal = as_refusal(error)
            with self._observed("grpc_model_stream_infer", caller) as done:
                done(_code(refusal).name, refusal.reason)
            await _abort(context, refusal)
        return caller

    async def _stream_one(self, request: Any, caller: Caller, answers: Any) -> None:
        """Serves one request. Its error becomes a message, and the other requests continue.

        Raises _Stuck when the client does not read. Server calls have ended by then.
        """
        record = Record(caller.record.peer, request.model_name)
        caller = dataclasses.replace(caller, record=record)
        with self._observed("grpc_model_stream_infer", caller) as done:
            try:
                with self._gateway.places.place():
                    await self._answer_one(request, caller, answers)
                done("OK")
            except (Refusal, DoradError) as error:
                refusal = as_refusal(error)
                done(_code(refusal).name, refusal.reason)
                failed = pb.ModelStreamInferResponse(
                    error_message=f"{refusal.reason}: {refusal.message}"
                )
                failed.infer_response.id = request.id
                failed.infer_response.parameters["triton_final_response"].bool_param = True
                await answers.put(failed)

    async def _answer_one(self, request: Any, caller: Caller, answers: asyncio.Queue[Any]) -> None:
        await self._gateway.admission.admit(caller)  # A stream may outlive its token.
        inference = await self._understood(request, caller, stream=True)
        patience = _Patience(self._gateway.limits.answer_seconds)
        answers_of_one = oip.infer_stream(self._gateway, caller, inference)
        async with contextlib.aclosing(answers_of_one):
            async for found, final in answers_of_one:
                message = _response(found)
                message.parameters["triton_final_response"].bool_param = final
                async with patience.used():
                    await answers.put(pb.ModelStreamInferResponse(infer_response=message))


class _Stuck(Exception):
    """The client does not read the stream."""


class _Patience:
    """Limits the total time that the answers of one request wait for the client."""

    def __init__(self, seconds: float) -> None:
        self._left = seconds

    @contextlib.asynccontextmanager
    async def used(self) -> AsyncIterator[None]:
        """Raises _Stuck."""
        began = time.monotonic()
        try:
            async with asyncio.timeout(self._left):
                yield
        except TimeoutError:
            raise _Stuck from None
        self._left -= time.monotonic() - began


def _wake(task: asyncio.Task[None], answers: asyncio.Queue[Any]) -> None:
    if task.cancelled() or task.exception() is None:
        return
    while answers.full():
        answers.get_nowait()
    answers.put_nowait(None)


def _caller(context: Any, model: str = "") -> Caller:
    pairs = context.invocation_metadata() or ()
    caller = caller_of((k.lower(), v) for k, v in pairs if isinstance(v, str))
    caller.record.peer, caller.record.model = context.peer(), model
    return caller


def _code(refusal: Refusal) -> grpc.StatusCode:
    return _CODES.get(refusal.status, grpc.StatusCode.INTERNAL)


async def _abort(context: Any, refusal: Refusal) -> NoReturn:
    """Ends the call with reason and violations in the status details, like the server."""
    code = _code(refusal)
    status = status_pb2.Status(code=code.value[0], message=refusal.message)
    details: list[Any] = [error_details_pb2.ErrorInfo(reason=refusal.reason, domain="dorad")]
    if refusal.violations:
        bad = error_details_pb2.BadRequest()
        for violation in refusal.violations:
            bad.field_violations.add(field=violation.field, description=violation.description)
        details.append(bad)
    if refusal.retry_after is not None:
        retry = error_details_pb2.RetryInfo()
        retry.retry_delay.FromMilliseconds(round(refusal.retry_after * 1000))
        details.append(retry)
    for detail in details:
        packed = any_pb2.Any()
        packed.Pack(detail)
        status.details.append(packed)
    trailers = (("grpc-status-details-bin", status.SerializeToString()),)
    message = f"{refusal.reason}: {refusal.message}"
    await context.abort(code, message, trailers)
    raise AssertionError("abort returned")


def _parameter(value: Any) -> Any:
    name = value.WhichOneof("parameter_choice")
    return None if name is None else getattr(value, name)


_CONTENTS = {
    "INT32": "int_contents",
    "INT64": "int64_contents",
    "UINT32": "uint_contents",
    "FP32": "fp32_contents",
    "BYTES": "bytes_contents",
}


def _inputs(request: Any) -> list[oip.Tensor]:
    raw = request.raw_input_contents
    if raw and len(raw) != len(request.inputs):
        message = f"{len(raw)} raw contents for {len(request.inputs)} inputs"
        raise Refusal(400, "TENSOR_INVALID", message, param="raw_input_contents")
    found = []
    for i, item in enumerate(request.inputs):
        name = _CONTENTS.get(item.datatype, "bytes_contents")
        data = raw[i] if raw else list(getattr(item.contents, name))
        found.append(oip.tensor(item.name, item.datatype, list(item.shape), data))
    return found


def _response(found: oip.Answer) -> Any:
    message = pb.ModelInferResponse(
        model_name=found.model, model_version=found.version, id=found.id
    )
    for tensor in found.outputs:
        message.outputs.add(name=tensor.name, datatype=tensor.datatype, shape=tensor.shape)
        message.raw_output_contents.append(tensor.raw())
    for name, value in found.parameters.items():
        parameter = message.parameters[name]
        if isinstance(value, str):
            parameter.string_param = value
        else:
            parameter.int64_param = int(value)
    return message
