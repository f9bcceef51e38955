"""Client of dorad, the server of one base model and many DoRA adapters. See docs/guides/client.md.

`Client` is for threads, `dorad.aio.Client` for asyncio; both have the same methods. `RolloutPool`
combines several servers and has both forms, too.
"""

from dorad import errors
from dorad._local_server import local_server
from dorad._shared_memory_socket import SharedTensors
from dorad._sync.client import Client
from dorad._sync.fleet import Fleet
from dorad._sync.pool import RolloutPool
from dorad._sync.stream import Stream
from dorad._version import __version__
from dorad.answers import Answers
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
    PoolError,
    Unavailable,
    UnexpectedVersion,
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
    Image,
    Limits,
    LoadTiming,
    ModelInfo,
    PromptLogprobs,
    PublishOptions,
    Sample,
    ScoreResult,
    ServerInfo,
    Span,
    TargetReport,
    TopLogprobs,
    Usage,
    WatchEvent,
)

__all__ = [
    "Activation",
    "AdapterVersion",
    "Answers",
    "Cancelled",
    "Client",
    "Conflict",
    "DeadlineExceeded",
    "Delta",
    "DoradError",
    "EngineInfo",
    "Finish",
    "FinishReason",
    "Fleet",
    "GenerateOptions",
    "GenerateRequest",
    "Image",
    "Internal",
    "InvalidArgument",
    "Limits",
    "LoadTiming",
    "ModelInfo",
    "NotFound",
    "Overloaded",
    "PermissionDenied",
    "PoolError",
    "PromptLogprobs",
    "PublishOptions",
    "RolloutPool",
    "Sample",
    "ScoreResult",
    "ServerInfo",
    "SharedTensors",
    "Span",
    "Stream",
    "TargetReport",
    "TopLogprobs",
    "Unavailable",
    "UnexpectedVersion",
    "Unimplemented",
    "Usage",
    "Violation",
    "WatchEvent",
    "__version__",
    "errors",
    "local_server",
]
