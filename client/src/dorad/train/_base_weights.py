"""A trainer's use of the base weights of a server on the same host, without a second copy."""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Generator, Iterator, Mapping, Sequence
from typing import Any

import torch

from dorad import Client
from dorad._shared_memory_socket import Connection
from dorad._stubs import adapters_pb2, control_pb2
from dorad.errors import Conflict, Unavailable
from dorad.train._shared_memory import DeviceMemory, HostMemory, Memory

_AFTER_ALL_PIECES = 2**64 - 1
_DTYPES: dict[int, tuple[torch.dtype, str]] = {
    adapters_pb2.TENSOR_DTYPE_F32: (torch.float32, "F32"),
    adapters_pb2.TENSOR_DTYPE_F16: (torch.float16, "F16"),
    adapters_pb2.TENSOR_DTYPE_BF16: (torch.bfloat16, "BF16"),
}


class BaseWeightsError(ValueError):
    """The base weights have another digest or do not fit: `problems` lists everything."""

    def __init__(self, problems: Sequence[str]) -> None:
        super().__init__(
            "".join(["the base weights do not match:", *(f"\n  {p}" for p in problems)])
        )
        self.problems = list(problems)


class BaseWeights(Mapping[str, torch.Tensor]):
    """A server's base weights by their Hugging Face names, on its device. See `base_weights`."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], digest: str, copied_bytes: int) -> None:
        self._tensors = dict(tensors)
        self.digest = digest
        """Of the checkpoint, as `ModelInfo.digest`."""
        self.copied_bytes = copied_bytes
        """Bytes of these tensors that are this process's own: see `base_weights`."""
        sizes = [tensor.nbytes for tensor in self._tensors.values()]
        self.shared_bytes = sum(sizes) - copied_bytes
        """The rest: the server's memory."""

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    @property
    def device(self) -> torch.device:
        return next(iter(self._tensors.values())).device


def base_weights(
    client: Client,
    *,
    shared_memory: str | os.PathLike[str] | None = None,
    verify: bool = False,
    expected_digest: str | None = None,
    timeout: float | None = None,
) -> BaseWeights:
    """Leases the base weights of a server on this host: its memory, mapped for reading.

    The lease lasts while one of the tensors lives: until then the server's `sleep` does not release
    them. They are mapped for reading only: on the CPU an attempt to write ends this process
    (SIGSEGV), on a GPU it breaks the process's CUDA context; torch does not prevent it. Tensors
    that the server holds in a wider dtype than the checkpoint's (norms and biases in fp32) are
    copied, in the checkpoint's dtype: `copied_bytes`. Matrices are the served ones, without any
    copy.

    Args:
      shared_memory: path of the server's server.shared_memory_socket in this process's view, if
        it differs from the server's.
      verify: compute the checkpoint's digest from the leased weights, and compare. Reads all of
        them, from a GPU through the host.
      expected_digest: of the trainer's checkpoint, as `ModelInfo.digest`.
      timeout: seconds for each call.

    Raises:
      BaseWeightsError: a digest differs, or (verify) the server has rounded weights to a narrower
        dtype, so that they cannot be compared.
      Conflict: the server has no server.shared_memory_socket.
      PermissionDenied: it runs as another user.
      Unavailable: the socket does not exist, or the weights sleep.
    """
    path = os.fspath(shared_memory or client.info(timeout=timeout).shared_memory_socket)
    if not path:
        raise Conflict(
            "the server has no server.shared_memory_socket",
            code="FAILED_PRECONDITION",
            reason="SHARED_MEMORY_NOT_CONFIGURED",
        )
    connection = Connection(path)
    try:
        memory, message = _lease(client, connection, timeout)
        if expected_digest is not None and expected_digest != message.digest:
            raise BaseWeightsError(
                [f"the server's have the digest {message.digest}, not {expected_digest}"]
            )
    except BaseException:
        connection.close()
        raise
    tensors, copied = {}, 0
    for entry in message.tensors:
        if not entry.HasField("offset"):
            continue
        tensor = memory.tensor(_dtype(entry.dtype), entry.shape, entry.offset)
        if entry.dtype != entry.checkpoint_dtype and len(entry.shape) == 1:
            tensor = tensor.to(_dtype(entry.checkpoint_dtype))
            copied += tensor.nbytes
        tensors[entry.name] = tensor
    if verify:
        _verify(tensors, message)
    return BaseWeights(tensors, message.digest, copied)


def _lease(
    client: Client, connection: Connection, timeout: float | None
) -> tuple[Memory, control_pb2.ShareBaseWeightsResponse]:
    connection.lease_weights(_AFTER_ALL_PIECES)  # Begins the lease and returns the session_token.
    request = control_pb2.ShareBaseWeightsRequest(session_token=connection.session_token)
    message = client._call(client._control.ShareBaseWeights, request, timeout)
    sizes = list(message.piece_bytes)
    pieces = _pieces(connection, len(sizes))
    with contextlib.closing(pieces):
        if message.device_uuid:
            return DeviceMemory(connection, pieces, sizes, message.device_uuid), message
        (size,) = sizes
        return HostMemory(connection, next(pieces), size), message


def _pieces(connection: Connection, count: int) -> Generator[int, None, None]:
    """Descriptors of all pieces in order; each is valid until the next one. There may be more of
    them than a process can have open."""
    done = 0
    while done < count:
        fds = connection.lease_weights(done)
        try:
            if not fds:
                raise Unavailable(
                    "the server leases only a part of the weights", code="UNAVAILABLE"
                )
            yield from fds
        finally:
            for fd in fds:
                os.close(fd)
        done += len(fds)


def _dtype(number: int) -> torch.dtype:
    return _DTYPES[number][0]


def _verify(
    tensors: Mapping[str, torch.Tensor], message: control_pb2.ShareBaseWeightsResponse
) -> None:
    """Checkpoint::Digest over the leased weights, with the server's digests of tensors that it does
    not hold."""
    problems = []
    whole = hashlib.sha256()

    def add_number(value: int) -> None:
        whole.update(value.to_bytes(8, "little"))

    def add_text(text: str) -> None:
        add_number(len(text.encode()))
        whole.update(text.encode())

    add_number(len(message.tensors))
    for entry in sorted(message.tensors, key=lambda entry: entry.name.encode()):
        digest = entry.sha256
        dtype, dtype_name = _DTYPES[entry.checkpoint_dtype]
        tensor = tensors.get(entry.name)
        if tensor is not None and torch.promote_types(tensor.dtype, dtype) != tensor.dtype:
            problems.append(f"{entry.name}: the server has rounded it to {tensor.dtype}")
        elif tensor is not None:
            digest = _sha256(tensor.to(dtype))
            if digest != entry.sha256:
                problems.append(f"{entry.name}: differs from the server's checkpoint")
        add_text(entry.name)
        add_text(dtype_name)
        add_number(len(entry.shape))
        for extent in entry.shape:
            add_number(extent)
        whole.update(digest)
    if not problems and whole.hexdigest() != message.digest:
        problems.append(f"they have the digest {whole.hexdigest()}, not {message.digest}")
    if problems:
        raise BaseWeightsError(problems)


def _sha256(tensor: torch.Tensor) -> bytes:
    return hashlib.sha256(
        tensor.cpu().contiguous().view(-1).view(torch.uint8).numpy().data
    ).digest()


def adopt_base(model: torch.nn.Module, weights: Mapping[str, torch.Tensor]) -> int:
    """Replaces the weights of a transformers model by these, and freezes them.

    The model's parameters may be empty (on torch's device "meta"), its buffers must have data; they
    are moved to the weights' device. Parameters that its configuration ties are tied. Matrices must
    have the model's dtype; norms and biases are copied when they have another. Do it before PEFT
    wraps the model, and do not merge an adapter into it: that would write.

    Returns the copied bytes.

    Raises BaseWeightsError with every tensor that is missing, superfluous or does not fit; the
    model's weights are then unchanged.
    """
    tie = getattr(model, "tie_weights", None)
    if callable(tie):
        tie()  # A model made without weights may have lost its ties.
    problems: list[str] = []
    places = _places(model)
    chosen: list[tuple[torch.Tensor, list[tuple[torch.nn.Module, str]]]] = []
    copied = 0
    for names, parameter, homes in places:
        found = [name for name in names if name in weights]
        if len(found) != 1:
            what = "are tied in the model only" if found else "is missing"
            problems.append(f"{', '.join(found or names[:1])}: {what}")
            continue
        tensor = weights[found[0]]
        if tensor.shape != parameter.shape:
            problems.append(
                f"{found[0]}: has shape {list(tensor.shape)}, not {list(parameter.shape)}"
            )
        elif tensor.dtype != parameter.dtype and tensor.ndim > 1:
            problems.append(f"{found[0]}: is {tensor.dtype}, the model's is {parameter.dtype}")
        elif tensor.dtype != parameter.dtype:
            tensor = tensor.to(parameter.dtype)
            copied += tensor.nbytes
        chosen.append((tensor, homes))
    known = {name for names, _, _ in places for name in names}
    problems += [f"{name}: the model has none" for name in weights if name not in known]
    problems += [
        f"{name}: is a buffer without data; make the model with its buffers"
        for name, buffer in model.named_buffers()
        if buffer.is_meta
    ]
    if problems:
        raise BaseWeightsError(problems)
    for tensor, homes in chosen:
        parameter = torch.nn.Parameter(tensor, requires_grad=False)
        for module, attribute in homes:
            setattr(module, attribute, parameter)
    device = next(iter(weights.values())).device
    for module in model.modules():
        for attribute, buffer in module.named_buffers(recurse=False):
            module._buffers[attribute] = buffer.to(device)
    return copied


def _places(
    model: torch.nn.Module,
) -> list[tuple[list[str], torch.nn.Parameter, list[tuple[torch.nn.Module, str]]]]:
    """Each parameter, with all its names and the modules that have it as an attribute."""
    found: dict[int, Any] = {}
    for prefix, module in model.named_modules():
        for attribute, parameter in module.named_parameters(recurse=False):
            names, _, homes = found.setdefault(id(parameter), ([], parameter, []))
            names.append(f"{prefix}.{attribute}" if prefix else attribute)
            homes.append((module, attribute))
    return list(found.values())
