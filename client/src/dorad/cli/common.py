"""What every command shares: options, output, errors and exit codes."""

from __future__ import annotations

import enum
import json
import os
import sys
from collections.abc import Sequence
from typing import Annotated, Any

import typer
import typer.core
from rich.console import Console
from rich.table import Table

import dorad
from dorad._channel import DEFAULT_TARGET
from dorad.types import to_jsonable

EXIT_USAGE = 64
EXIT_UNAVAILABLE = 69
EXIT_FAILURE = 1


class Output(enum.StrEnum):
    """How results are printed."""

    TABLE = "table"
    JSON = "json"


TargetOption = Annotated[
    str,
    typer.Option("--target", "-t", envvar="DORAD_TARGET", help="Server: host:port or unix:PATH."),
]
AdminTargetOption = Annotated[
    str,
    typer.Option(
        "--admin-target",
        envvar="DORAD_ADMIN_TARGET",
        help="Where adapters and control are served, when not at the target.",
    ),
]
OutputOption = Annotated[Output, typer.Option("--output", "-o", help="How to print results.")]
TimeoutOption = Annotated[
    float, typer.Option("--timeout", help="Seconds a call may take.", min=0.001)
]

DEFAULT_TIMEOUT = 600.0


def connect(target: str, admin_target: str = "", timeout: float = DEFAULT_TIMEOUT) -> dorad.Client:
    return dorad.Client(
        target or DEFAULT_TARGET, admin_target=admin_target or None, timeout=timeout
    )


def console() -> Console:
    """Standard output. Made anew for each use, so that redirection is seen."""
    return Console(soft_wrap=not sys.stdout.isatty())


def errors() -> Console:
    """Standard error, for progress and remarks."""
    return Console(stderr=True)


def print_json(value: Any) -> None:
    """One JSON document on standard output."""
    print(json.dumps(to_jsonable(value), indent=2, ensure_ascii=False))


def print_json_line(value: Any) -> None:
    """One line of JSON, for streams of events."""
    print(json.dumps(to_jsonable(value), ensure_ascii=False), flush=True)


def table(*columns: str, title: str | None = None) -> Table:
    """A plain table; columns whose name starts with ">" are right-aligned numbers."""
    made = Table(title=title, box=None, pad_edge=False, header_style="bold", title_justify="left")
    for column in columns:
        right = column.startswith(">")
        made.add_column(column.lstrip(">"), justify="right" if right else "left", overflow="fold")
    return made


def size(count: int | float) -> str:
    """Bytes for people: 2.1 GB."""
    value = float(count)
    for unit in ("B", "kB", "MB", "GB"):
        if value < 1000:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1000
    return f"{value:.1f} TB"


def _say(message: str) -> None:
    print(f"doractl: {message}", file=sys.stderr)


def _explain(error: Exception) -> int:
    """Prints one or a few lines on standard error; returns the exit code."""
    if isinstance(error, dorad.DoradError):
        _say(str(error))
        if error.retry_after is not None:
            _say(f"try again in {error.retry_after:g} s")
        return EXIT_UNAVAILABLE if isinstance(error, dorad.Unavailable) else EXIT_FAILURE
    if isinstance(error, (ValueError, TypeError, FileNotFoundError)):
        _say(str(error))
        return EXIT_USAGE
    if isinstance(error, (ImportError, OSError)):
        _say(str(error))
        return EXIT_FAILURE
    if hasattr(error, "format_message") and hasattr(error, "exit_code"):  # A ClickException.
        _say(error.format_message())
        context = getattr(error, "ctx", None)
        if context is not None:
            print(f"Try '{context.command_path} --help'.", file=sys.stderr)
        return EXIT_USAGE
    if isinstance(error, typer.Abort):
        _say("aborted")
        return EXIT_FAILURE
    raise error


class Group(typer.core.TyperGroup):
    """A command group whose failures are clear lines and documented exit codes."""

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        windows_expand_args: bool = True,
        **extra: Any,
    ) -> Any:
        rest = (complete_var, False, windows_expand_args)
        if not standalone_mode:
            return super().main(args, prog_name, *rest, **extra)
        try:
            result = super().main(args, prog_name, *rest, **extra)
            code = result if isinstance(result, int) else 0
        except BrokenPipeError:  # The reader (head, less) has had enough.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            code = EXIT_FAILURE
        except Exception as error:
            code = _explain(error)
        sys.exit(code)


def share_options(command: Any, values: dict[str, Any]) -> dict[str, Any]:
    """Defaults for every command below `command`, from options given before its name."""
    children = getattr(command, "commands", {})
    return {
        name: share_options(child, values) if getattr(child, "commands", None) else dict(values)
        for name, child in children.items()
    }
