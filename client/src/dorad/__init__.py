"""Client of dorad, the server of one base model and many DoRA adapters. See docs/client.md.

`Client` is for threads, `dorad.aio.Client` for asyncio; both have the same methods.
"""

from dorad import errors
from dorad._client import Client, Stream
from dorad.errors import (
    Cancelled,
    Conflict,
    DeadlineExceeded,
    DoradError,
    Internal,
    InvalidArgument,
    NotFound,
    Overloaded,
    PermissionDenied,
    Unavailable,
    Unimplemented,
    Violation,
)
from dorad.types import (
    Activation,
    AdapterVersion,
    Delta,
    EngineInfo,
    Finish,
    FinishReason,
    GenerateOptions,
    GenerateRequest,
    Limits,
    LoadTiming,
    ModelInfo,
    Sample,
    ScoreResult,
    ServerInfo,
    Span,
    TopLogprobs,
    Usage,
    WatchEvent,
)

__version__ = "0.1.0"

__all__ = [
    "Activation",
    "AdapterVersion",
    "Cancelled",
    "Client",
    "Conflict",
    "DeadlineExceeded",
    "Delta",
    "DoradError",
    "EngineInfo",
    "Finish",
    "FinishReason",
    "GenerateOptions",
    "GenerateRequest",
    "Internal",
    "InvalidArgument",
    "Limits",
    "LoadTiming",
    "ModelInfo",
    "NotFound",
    "Overloaded",
    "PermissionDenied",
    "Sample",
    "ScoreResult",
    "ServerInfo",
    "Span",
    "Stream",
    "TopLogprobs",
    "Unavailable",
    "Unimplemented",
    "Usage",
    "Violation",
    "WatchEvent",
    "errors",
]
