"""How calls of grpc.aio fail, as the errors that this package promises."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator

import grpc

from dorad.errors import Cancelled, from_rpc_error


def closed() -> Cancelled:
    return Cancelled("the client was closed", code="CANCELLED")


@contextlib.contextmanager
def as_dorad_errors() -> Iterator[None]:
    """A block that waits for a call."""
    try:
        yield
    except grpc.RpcError as error:
        raise from_rpc_error(error) from None
    except asyncio.CancelledError:
        # Closing a channel cancels those who wait for its calls, whom nobody asked to end.
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        raise closed() from None
