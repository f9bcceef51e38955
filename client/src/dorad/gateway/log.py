"""The gateway's log on standard error, in the form of the server's."""

from __future__ import annotations

import enum
import json
import logging
import time
from typing import Any

_LONGEST = 256  # Characters of a text that a caller chose.

ACCESS = logging.getLogger("dorad.gateway.access")


class LogLevel(enum.StrEnum):
    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


class LogFormat(enum.StrEnum):
    """json: one object a line, for machines; text: for terminals."""

    JSON = "json"
    TEXT = "text"


class _Formatter(logging.Formatter):
    """A line has the time, the level, the message and the record's `fields`."""

    def __init__(self, form: LogFormat) -> None:
        super().__init__()
        self._json = form is LogFormat.JSON

    def format(self, record: logging.LogRecord) -> str:
        whole = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        at = f"{whole}.{int(record.created % 1 * 1e6):06d}Z"
        level, message = record.levelname.lower(), record.getMessage()
        fields: dict[str, Any] = {**getattr(record, "fields", {})}
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        if self._json:
            return json.dumps({"ts": at, "level": level, "msg": message, **fields})
        trace = fields.pop("exception", None)
        parts = [at, level, json.dumps(message)[1:-1]]
        parts += [f"{name}={json.dumps(value)}" for name, value in fields.items()]
        return " ".join(parts) + (f"\n{trace}" if trace else "")


def start_logging(level: LogLevel, form: LogFormat) -> None:
    """For the whole process."""
    handler = logging.StreamHandler()
    handler.setFormatter(_Formatter(form))
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    logging.captureWarnings(True)
    ours = logging.getLogger("dorad")
    ours.setLevel(level.upper())
    ours.handlers.clear()  # `doractl` has one for its remarks.


def log_access(level: int, **fields: Any) -> None:
    """One line for a request that ended. Fields that are empty are left out."""
    if ACCESS.isEnabledFor(level):
        shown = {
            name: value[:_LONGEST] if isinstance(value, str) else value
            for name, value in fields.items()
            if value not in ("", None)
        }
        ACCESS.log(level, "request ended", extra={"fields": shown})
