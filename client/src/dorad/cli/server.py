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
from dorad.cli import contexts
from dorad.cli.common import DEFAULT_TIMEOUT, TimeoutOption

TargetOption = Annotated[
    str,
    typer.Option("--target", "-t", envvar="DORAD_TARGET", help="Server: host:port or unix:PATH."),
]
AdminTargetOption = Annotated[
    str,
    typer.Option(
        "--admin-target",
        envvar="DORAD_ADMIN_TARGET",
        help="Address of the adapter and control services, if it differs from the target.",
    ),
]
ContextOption = Annotated[
    str,
    typer.Option(
        "--context",
        envvar="DORAD_CONTEXT",
        help="A server of `doractl context`, instead of --target.",
        autocompletion=contexts.complete,
    ),
]
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
        """Of `dorad.Client` and `dorad.aio.Client`, which take credentials from the environment."""
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
    options: list[tuple[str, Any, Any]] = [
        ("context", ContextOption, ""),
        ("target", TargetOption, DEFAULT_TARGET),
    ]
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
            inspect.Parameter("ctx", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context),
            *(
                inspect.Parameter(
                    name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation
                )
                for name, annotation, default in options
            ),
        ]

        @functools.wraps(command)
        def run(ctx: typer.Context, **values: Any) -> None:
            values |= of_context(ctx, values)
            server = Server(**{name: values.pop(name) for name in names - {"context"}})
            del values["context"]
            command(server=server, **values)

        shown = signature.replace(parameters=[*own, *added])
        run.__signature__ = shown  # type: ignore[attr-defined]
        run.__annotations__ = {p.name: p.annotation for p in shown.parameters.values()}
        return run

    return decorate


def of_context(ctx: Any, values: dict[str, Any]) -> dict[str, Any]:
    """The addresses that come from a context, if one applies. Also exports its credentials.

    The order: options, the environment, the current context. A target and a context do not mix,
    because a token belongs to its server.
    """

    def origin(name: str) -> str:
        """COMMANDLINE, DEFAULT_MAP (an option before the command), ENVIRONMENT or DEFAULT."""
        source = ctx.get_parameter_source(name)
        return "DEFAULT" if source is None else source.name

    flags = ("COMMANDLINE", "DEFAULT_MAP")
    by_flag = origin("context") in flags and bool(values["context"])
    if by_flag and origin("target") in flags:
        raise typer.BadParameter("give --target or --context, not both", param_hint="--context")
    if not by_flag and origin("target") != "DEFAULT":
        return {}
    known = contexts.Contexts.load()
    name = values["context"] or known.current
    if not name:
        return {}
    context = known[name]
    contexts.export(name, context, override=by_flag)
    stronger = flags if by_flag else (*flags, "ENVIRONMENT")
    found = {
        key: getattr(context, key)
        for key in contexts.ADDRESSES
        if key in values and origin(key) not in stronger
    }
    if "target" in found and not found["target"]:
        found["target"] = DEFAULT_TARGET
    return found
