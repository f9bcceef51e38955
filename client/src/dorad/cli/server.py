"""The options of a command that calls a server, as one object."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

import typer

import dorad
from dorad._channel import DEFAULT_TARGET
from dorad.cli.common import DEFAULT_TIMEOUT, AdminTargetOption, TargetOption, TimeoutOption

RetryForOption = Annotated[
    float | None,
    typer.Option(
        "--retry-for",
        envvar="DORAD_RETRY_FOR",
        help="Seconds to go on if the server is away, full or paused. 0: never.",
        min=0,
        show_default="a few attempts",
    ),
]


@dataclass(frozen=True)
class Server:
    """A command's server, and its limits of time."""

    target: str = DEFAULT_TARGET
    admin_target: str = ""
    timeout: float = DEFAULT_TIMEOUT
    retry_for: float | None = None

    def arguments(self) -> dict[str, Any]:
        """Of `dorad.Client` and `dorad.aio.Client`."""
        return {
            "target": self.target,
            "admin_target": self.admin_target or None,
            "timeout": self.timeout,
            "retry_for": self.retry_for,
        }

    def connect(self) -> dorad.Client:
        return dorad.Client(**self.arguments())


def on_server(
    *, admin: bool = True, timeout: float | None = DEFAULT_TIMEOUT, retries: bool = True
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """A command whose parameter `server` is filled from the server's options.

    Args:
      admin: it calls the adapter or control service: --admin-target.
      timeout: default of --timeout; None: no such option.
      retries: --retry-for.
    """
    options: list[tuple[str, Any, Any]] = [("target", TargetOption, DEFAULT_TARGET)]
    if admin:
        options.append(("admin_target", AdminTargetOption, ""))
    if timeout is not None:
        options.append(("timeout", TimeoutOption, timeout))
    if retries:
        options.append(("retry_for", RetryForOption, None))
    names = {name for name, _, _ in options}

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(command, eval_str=True)
        own = [p for p in signature.parameters.values() if p.name != "server"]
        added = [
            inspect.Parameter(
                name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation
            )
            for name, annotation, default in options
        ]

        @functools.wraps(command)
        def run(**values: Any) -> None:
            server = Server(**{name: values.pop(name) for name in names})
            command(server=server, **values)

        shown = signature.replace(parameters=[*own, *added])
        run.__signature__ = shown  # type: ignore[attr-defined]
        run.__annotations__ = {p.name: p.annotation for p in shown.parameters.values()}
        return run

    return decorate
