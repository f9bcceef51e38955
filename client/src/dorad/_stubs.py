"""The generated modules, with a helpful word when a source checkout has not generated them."""

from __future__ import annotations

try:
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
    if (error.name or "").startswith("dorad.v1") or "dorad.v1" in str(error):
        raise ImportError(
            "dorad's generated modules are missing: run `python client/generate_stubs.py` in a "
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
