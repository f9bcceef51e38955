"""The protobuf modules, with a helpful error when a source checkout lacks them."""

from __future__ import annotations

try:
    import dorad._sync  # noqa: F401  (Made by the same program.)
    from dorad.v1 import (
        adapters_pb2,
        adapters_pb2_grpc,
        control_pb2,
        control_pb2_grpc,
        inference_pb2,
        inference_pb2_grpc,
        types_pb2,
    )
except ImportError as error:
    if (error.name or "").startswith(("dorad._sync", "dorad.v1")) or "dorad.v1" in str(error):
        raise ImportError(
            "dorad's generated modules are missing: run `python client/generate.py` in a "
            "source checkout, or install the wheel"
        ) from error
    raise

__all__ = [
    "adapters_pb2",
    "adapters_pb2_grpc",
    "control_pb2",
    "control_pb2_grpc",
    "inference_pb2",
    "inference_pb2_grpc",
    "types_pb2",
]
