"""The Open Inference Protocol v2 without its transports: models, tensors and inference."""

from __future__ import annotations

import contextlib
import struct
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

import dorad
from dorad import types as t
from dorad._references import ref_parts
from dorad.gateway.callers import Caller
from dorad.gateway.core import Gateway
from dorad.gateway.errors import Refusal
from dorad.gateway.requests import Sampling, StopString, checked
from dorad.gateway.samples import Choice, Work, choices, updates
from dorad.gateway.statistics import Counts, Run
from dorad.gateway.validation import UInt32
from dorad.types import GenerateOptions

PLATFORM = "dorad"
EXTENSIONS = [
    "binary_tensor_data",
    "generate",
    "model_configuration",
    "model_repository",
    "parameters",
    "statistics",
]

_NUMPY: dict[str, np.dtype[Any]] = {
    "INT32": np.dtype("<i4"),
    "INT64": np.dtype("<i8"),
    "UINT32": np.dtype("<u4"),
    "FP32": np.dtype("<f4"),
}
_OUTPUTS = {
    "output_ids": ("INT64", [1, -1]),
    "logprobs": ("FP32", [1, -1]),
    "text_output": ("BYTES", [1]),
    "finish_reason": ("BYTES", [1]),
}


class Parameters(Sampling):
    """A request's `parameters`."""

    stop: StopString | None = None
    """A string that ends the text."""
    max_tokens: UInt32 | None = None
    """Default: all that fits into the context."""
    add_special_tokens: bool = True
    """Add the tokenizer's special tokens to text_input."""


# For the transport, or hints of Triton's clients without effect here.
_IGNORED = ("binary_data_output", "triton_enable_empty_final_response")


# --- Tensors --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor of numbers (an array) or of BYTES (a list)."""

    name: str
    datatype: str
    shape: list[int]
    data: npt.NDArray[Any] | list[bytes]

    def raw(self) -> bytes:
        """Little-endian bytes. Each BYTES element follows its length as uint32."""
        if isinstance(self.data, list):
            return b"".join(struct.pack("<I", len(item)) + item for item in self.data)
        return self.data.astype(_NUMPY[self.datatype]).tobytes()


def tensor(name: str, datatype: str, shape: Sequence[int], data: bytes | Sequence[Any]) -> Tensor:
    """An input from raw bytes or from a flat list. Raises Refusal if the data does not fit."""

    def refuse(what: str) -> Refusal:
        return Refusal(400, "TENSOR_INVALID", f"input {name!r} {what}", param=name)

    shape = [int(side) for side in shape]
    if any(side < 0 for side in shape) or len(shape) > 8:
        raise refuse(f"has shape {shape}")
    count = 1
    for side in shape:
        count *= side
    found: npt.NDArray[Any] | list[bytes]
    if datatype == "BYTES":
        found = _split(data, refuse) if isinstance(data, bytes) else _strings(data, refuse)
    elif datatype in _NUMPY:
        dtype = _NUMPY[datatype]
        if isinstance(data, bytes):
            if len(data) % dtype.itemsize:
                raise refuse(f"has {len(data)} bytes, not a multiple of {dtype.itemsize}")
            found = np.frombuffer(data, dtype)
        elif dtype.kind in "iu" and not all(type(item) is int for item in data):
            raise refuse("has elements that are not integers")
        else:
            try:
                found = np.asarray(data, dtype)
            except (ValueError, TypeError, OverflowError) as error:
                raise refuse(f"is not {datatype}: {error}") from None
    else:
        raise refuse(f"has datatype {datatype!r}, not {', '.join(_NUMPY)} or BYTES")
    if len(found) != count:
        raise refuse(f"has {len(found)} elements, but shape {shape}")
    return Tensor(name, datatype, shape, found)


def _strings(data: Sequence[Any], refuse: Any) -> list[bytes]:
    if not all(isinstance(item, str | bytes) for item in data):
        raise refuse("has elements that are not strings")
    return [item.encode() if isinstance(item, str) else item for item in data]


def _split(data: bytes, refuse: Any) -> list[bytes]:
    found, at = [], 0
    while at < len(data):
        if at + 4 > len(data):
            raise refuse("ends within a length")
        (length,) = struct.unpack_from("<I", data, at)
        if length > len(data) - at - 4:
            raise refuse("ends within an element")
        found.append(data[at + 4 : at + 4 + length])
        at += 4 + length
    return found


# --- Inference ------------------------------------------------------------------------------------


@dataclass(slots=True)
class Inference:
    """A checked request."""

    model: str
    version: str
    """"": the active one."""
    id: str
    work: Work
    outputs: list[str]


@dataclass(slots=True)
class Answer:
    """New tokens of a stream, or the whole answer."""

    model: str
    version: str
    id: str
    outputs: list[Tensor]
    parameters: dict[str, Any] = field(default_factory=dict)


async def understand(
    gateway: Gateway,
    caller: Caller,
    *,
    model: str,
    version: str,
    request_id: str,
    inputs: Sequence[Tensor],
    outputs: Sequence[str],
    parameters: Mapping[str, Any],
    stream: bool,
) -> Inference:
    """Raises Refusal or DoradError."""
    given = checked({k: v for k, v in parameters.items() if k not in _IGNORED}, Parameters)
    names = list(outputs) or _default_outputs(gateway)
    for name in names:
        if name not in _OUTPUTS:
            message = f"unknown output {name!r}; outputs are {', '.join(_OUTPUTS)}"
            raise Refusal(400, "OUTPUT_UNKNOWN", message, param=name)
    if "text_output" in names or given.stop is not None or given.bad_words:
        gateway.needs_text()
    facts = await gateway.model()
    options: GenerateOptions = {
        **given.options(gateway.text),
        "adapter": await _reference(gateway, model, version),
        "max_tokens": given.max_tokens,
        "request_id": caller.call_id(),
        "logprobs": (given.logprobs_mode or gateway.logprobs_mode) if "logprobs" in names else None,
    }
    prompt = await _prompt(gateway, inputs, given)
    work = given.work([prompt], options, facts, stream=stream)
    return Inference(model, version, request_id, work, names)


def _default_outputs(gateway: Gateway) -> list[str]:
    return ["output_ids", *(["text_output"] if gateway.text else []), "finish_reason"]


async def _reference(gateway: Gateway, model: str, version: str) -> str | None:
    adapter = await gateway.adapter_of(model)
    if not version:
        return adapter
    if adapter is None:
        raise Refusal(404, "VERSION_NOT_FOUND", "the base model has no versions", param="version")
    return f"{adapter}@{version}"


async def _prompt(gateway: Gateway, inputs: Sequence[Tensor], given: Parameters) -> list[int]:
    names = sorted(tensor.name for tensor in inputs)
    if names not in (["input_ids"], ["text_input"]):
        message = f"inputs must be input_ids or text_input, not {names}"
        raise Refusal(400, "INPUTS_INVALID", message, param="inputs")
    (only,) = inputs
    wanted = only.shape[-1:] if only.name == "input_ids" else [1]
    if only.shape not in (wanted, [1, *wanted]):
        message = f"{only.name} has shape {only.shape}; a request has one prompt"
        raise Refusal(400, "TENSOR_INVALID", message, param=only.name)
    if (only.datatype == "BYTES") != (only.name == "text_input") or only.datatype == "FP32":
        message = f"{only.name} cannot be {only.datatype}"
        raise Refusal(400, "TENSOR_INVALID", message, param=only.name)
    if not isinstance(only.data, list):
        if only.data.size and not 0 <= only.data.min() <= only.data.max() < 2**31:
            message = "input_ids are outside int32 or negative"
            raise Refusal(400, "TENSOR_INVALID", message, param=only.name)
        return [int(i) for i in only.data]
    try:
        text = only.data[0].decode()
    except UnicodeDecodeError as error:
        message = f"text_input is not UTF-8: {error}"
        raise Refusal(400, "TENSOR_INVALID", message, param=only.name) from None
    return await gateway.encode(text, special_tokens=given.add_special_tokens)


def _answer(inference: Inference, choice: Choice, *, final: bool) -> Answer:
    tokens = choice.piece.tokens
    found = {
        "output_ids": np.array([token.id for token in tokens], np.int64),
        "logprobs": np.array([token.logprob or 0.0 for token in tokens], np.float32),
        "text_output": [choice.piece.text.encode()],
        "finish_reason": [choice.finish_reason.encode()],
    }
    outputs = []
    for name in inference.outputs:
        data: Any = found[name]
        shape = [1] if isinstance(data, list) else [1, len(data)]
        outputs.append(Tensor(name, _OUTPUTS[name][0], shape, data))
    span, tally = choice.span, inference.work.tally
    parameters: dict[str, Any] = {}
    if span is not None and span.digest:
        parameters["digest"] = span.digest
    if final:
        parameters |= {
            "prompt_tokens": tally.prompt_tokens,
            "completion_tokens": tally.completion_tokens,
            "cached_tokens": tally.cached_tokens,
        }
    version = str(span.version) if span is not None and span.adapter else ""
    return Answer(inference.model, version, inference.id, outputs, parameters)


async def infer(gateway: Gateway, caller: Caller, inference: Inference) -> Answer:
    """The whole answer."""
    client, work = gateway.client_of(caller), inference.work
    with _counted(gateway, inference) as run:
        (choice,) = await choices(client, gateway.text, work, gateway.limits.timeout)
        _note(run, choice.span, work)
    gateway.count_tokens(caller, work.tally.prompt_tokens, work.tally.completion_tokens)
    return _answer(inference, choice, final=True)


async def infer_stream(
    gateway: Gateway, caller: Caller, inference: Inference
) -> AsyncGenerator[tuple[Answer, bool]]:
    """Yields (new tokens, whether they are the last)."""
    client, work = gateway.client_of(caller), inference.work
    try:
        async with contextlib.aclosing(
            updates(client, gateway.text, work, gateway.limits.timeout)
        ) as incoming:
            with _counted(gateway, inference) as run:
                async for update in incoming:
                    final = update.finish_reason is not None
                    if not (final or update.piece.text or update.piece.tokens):
                        continue
                    choice = Choice(
                        update.piece,
                        update.finish_reason or "",
                        update.stop_reason,
                        update.spans,
                        update.span,
                    )
                    _note(run, update.span, work)
                    yield _answer(inference, choice, final=final), final
    finally:
        gateway.count_tokens(caller, work.tally.prompt_tokens, work.tally.completion_tokens)


def _counted(gateway: Gateway, inference: Inference) -> AbstractContextManager[Run]:
    name, version, _ = ref_parts(inference.model)
    return gateway.statistics.request(name, version or inference.version)


def _note(run: Run, span: t.Span | None, work: Work) -> None:
    run.usage = work.tally.last
    if span is not None and span.adapter:
        run.version = str(span.version)


# --- Models ---------------------------------------------------------------------------------------


async def ready(gateway: Gateway, caller: Caller, model: str, version: str) -> bool:
    """Whether the model accepts requests. False for an unknown model."""
    try:
        reference = await _reference(gateway, model, version)
        if reference is None:
            return await gateway.healthy()
        return (await gateway.client_of(caller).adapter(reference)).state == "ready"
    except (dorad.NotFound, dorad.InvalidArgument):
        return False
    except Refusal as refusal:
        if refusal.status == 404:
            return False
        raise


async def metadata(gateway: Gateway, caller: Caller, model: str, version: str) -> dict[str, Any]:
    """Raises NotFound."""
    reference = await _reference(gateway, model, version)
    versions: list[str] = []
    if reference is not None:
        client = gateway.client_of(caller)
        await client.adapter(reference)
        name, _, _ = ref_parts(reference)
        versions = [str(v.version) for v in await client.adapters(name) if v.state == "ready"]
    inputs = [("input_ids", "INT64", [1, -1])]
    outputs = dict(_OUTPUTS)
    if gateway.text is None:
        del outputs["text_output"]
    else:
        inputs.append(("text_input", "BYTES", [1]))
    return {
        "name": model,
        "versions": versions,
        "platform": PLATFORM,
        "inputs": [{"name": n, "datatype": d, "shape": s} for n, d, s in inputs],
        "outputs": [{"name": n, "datatype": d, "shape": s} for n, (d, s) in outputs.items()],
    }


async def configuration(
    gateway: Gateway, caller: Caller, model: str, version: str
) -> dict[str, Any]:
    """In the shape of Triton's ModelConfig. Raises NotFound."""
    found = await metadata(gateway, caller, model, version)
    facts = await gateway.model()

    def tensors(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [
            {"name": r["name"], "data_type": _TYPES[r["datatype"]], "dims": r["shape"]}
            for r in rows
        ]

    config: dict[str, Any] = {
        "name": model,
        "platform": PLATFORM,
        "backend": PLATFORM,
        # A request has one prompt.
        "max_batch_size": 0,
        # Exactly one of the inputs.
        "input": [{**row, "optional": True} for row in tensors(found["inputs"])],
        "output": tensors(found["outputs"]),
        # ModelStreamInfer gives several answers to a request.
        "model_transaction_policy": {"decoupled": True},
        "parameters": {
            "base_model": {"string_value": facts.name},
            "context_length": {"string_value": str(facts.context_length)},
        },
    }
    if found["versions"]:
        versions = [int(number) for number in found["versions"]]
        config["version_policy"] = {"specific": {"versions": versions}}
    return config


async def statistics(
    gateway: Gateway, caller: Caller, model: str, version: str
) -> list[dict[str, Any]]:
    """Rows like Triton's ModelStatistics, of all models if `model` is "". Raises NotFound.

    Of requests of the Open Inference Protocol through this gateway since its start. A failed
    request of an adapter, whose version was not known by then, is in a row without version.
    """
    reference = await _reference(gateway, model, version) if model else None
    base, client = (await gateway.model()).name, gateway.client_of(caller)
    if reference is not None:
        name, only, _ = ref_parts(reference)
        await client.adapter(reference)
        known = await client.adapters(name)
    else:
        only = ""
        known = [] if model else await client.adapters()
    rows: dict[tuple[str, str], Counts] = {}
    if reference is None:
        rows[base, ""] = Counts()
    rows |= {(v.name, str(v.version)): Counts() for v in known if v.state == "ready"}
    for name in dict.fromkeys([*(name for name, _ in rows), *(v.name for v in known)]):
        rows |= {(name, v): counts for v, counts in gateway.statistics.of(name).items()}
    return [
        {"name": name, "version": number, **counts.shown()}
        for (name, number), counts in rows.items()
        if not only or number == only
    ]


async def index(gateway: Gateway, caller: Caller, *, ready_only: bool) -> list[dict[str, str]]:
    """The base and every version of every adapter."""
    versions = await gateway.client_of(caller).adapters()
    up = await gateway.healthy()
    base = (await gateway.model()).name
    rows = [{"name": base, "version": "", "state": "READY" if up else "UNAVAILABLE", "reason": ""}]
    rows += [
        {
            "name": v.name,
            "version": str(v.version),
            "state": _STATES.get(v.state, "UNAVAILABLE"),
            "reason": v.failure,
        }
        for v in versions
    ]
    return [row for row in rows if row["state"] == "READY" or not ready_only]


_TYPES = {"INT64": "TYPE_INT64", "FP32": "TYPE_FP32", "BYTES": "TYPE_STRING"}
_STATES = {"ready": "READY", "loading": "LOADING", "retiring": "UNLOADING"}


def server_metadata() -> dict[str, Any]:
    return {"name": "dorad", "version": dorad.__version__, "extensions": EXTENSIONS}
