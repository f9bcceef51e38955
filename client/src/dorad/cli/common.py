"""Options, output, errors and exit codes of all commands."""

from __future__ import annotations

import contextlib
import enum
import json
import logging
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, Any, NoReturn

import typer
import typer.core
import yaml
from rich.console import Console
from rich.table import Table

import dorad
from dorad._jsonable import to_jsonable

EXIT_USAGE = 64
EXIT_UNAVAILABLE = 69
EXIT_FAILURE = 1
_UNBOUNDED_WIDTH = 1 << 20


class Output(enum.StrEnum):
    """Output format."""

    TABLE = "table"
    JSON = "json"
    YAML = "yaml"

    def show(self, value: Any, table: Callable[[], None]) -> None:
        """Prints a command's result: `table` prints it for people, else as one document."""
        if self is Output.TABLE:
            table()
        elif self is Output.JSON:
            print(json.dumps(to_jsonable(value), indent=2, ensure_ascii=False))
        else:
            print(_yaml(value), end="")

    def show_event(self, value: Any, table: Callable[[], None]) -> None:
        """Prints one of many results as it comes: one line of JSON, or one document of YAML."""
        if self is Output.TABLE:
            table()
        elif self is Output.JSON:
            print(json.dumps(to_jsonable(value), ensure_ascii=False), flush=True)
        else:
            print(f"---\n{_yaml(value)}", end="", flush=True)


def _yaml(value: Any) -> str:
    # Through JSON, whose types are the ones that a safe dump knows.
    plain = json.loads(json.dumps(to_jsonable(value)))
    return str(yaml.safe_dump(plain, sort_keys=False, allow_unicode=True))


def _print_version(ctx: typer.Context, value: bool) -> None:
    if value and not ctx.resilient_parsing:
        print(f"{ctx.find_root().info_name} {dorad.__version__}")
        raise typer.Exit


OutputOption = Annotated[Output, typer.Option("--output", "-o", help="Output format.")]
VersionOption = Annotated[
    bool,
    typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version."),
]
TimeoutOption = Annotated[
    float, typer.Option("--timeout", help="Time limit of a call in seconds.", min=0.001)
]

DEFAULT_TIMEOUT = 600.0


def console() -> Console:
    """Standard output. Created for each use, because it may have been redirected.

    In a terminal long rows wrap. In a pipe each row is one line. Markup is off, because tokens,
    tags and messages may contain brackets.
    """
    piped = not sys.stdout.isatty()
    return Console(
        soft_wrap=piped,
        width=_UNBOUNDED_WIDTH if piped else None,
        markup=False,
        highlight=False,
        emoji=False,
    )


def errors() -> Console:
    """Standard error, for progress and log messages."""
    return Console(stderr=True, markup=False, highlight=False, emoji=False)


def table(*columns: str, title: str | None = None) -> Table:
    """A plain table. Columns whose name starts with ">" are right-aligned."""
    made = Table(title=title, box=None, pad_edge=False, header_style="bold", title_justify="left")
    for column in columns:
        right = column.startswith(">")
        made.add_column(column.lstrip(">"), justify="right" if right else "left", overflow="fold")
    return made


def size(count: int | float) -> str:
    """Bytes in human-readable form: 2.1 GB."""
    value = float(count)
    for unit in ("B", "kB", "MB", "GB"):
        if value < 1000:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1000
    return f"{value:.1f} TB"


class _Remarks(logging.Handler):
    """Prints log messages of the library on standard error, at most one in `SECONDS`."""

    SECONDS = 10.0

    def __init__(self, program: str) -> None:
        super().__init__(logging.INFO)
        self._program = program
        self._next = 0.0

    def emit(self, record: logging.LogRecord) -> None:
        if (now := time.monotonic()) >= self._next:
            self._next = now + self.SECONDS
            print(f"{self._program}: {record.getMessage()}", file=sys.stderr)


@contextlib.contextmanager
def _remarks(program: str) -> Iterator[None]:
    """Prints log messages, such as retries, while the block runs."""
    logger, handler = logging.getLogger("dorad"), _Remarks(program)
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.removeHandler(handler)


def _hints(error: dorad.DoradError) -> Iterator[str]:
    """Hints for the user, one line each."""
    if error.retry_after is not None:
        yield f"try again in {error.retry_after:g} s"
    if error.code == "UNIMPLEMENTED":
        yield (
            "the server may offer this call at its server.admin_listen only: set --admin-target "
            "or DORAD_ADMIN_TARGET"
        )
    if _may_want_tls(error):
        yield "the server may require TLS: set DORAD_CA_FILE"


def _may_want_tls(error: dorad.DoradError) -> bool:
    """Whether a TCP connection in plain text was accepted and closed at once."""
    encrypted = os.environ.get("DORAD_CA_FILE") or os.environ.get("DORAD_CERT_FILE")
    closed = "Socket closed" in error.message or "Connection reset" in error.message
    connecting = "failed to connect" in error.message and "unix:" not in error.message
    return error.code == "UNAVAILABLE" and connecting and closed and not encrypted


def _explain(error: Exception, program: str) -> int:
    """Prints the error on standard error and returns the exit code."""

    def say(message: str) -> None:
        print(f"{program}: {message}", file=sys.stderr)

    if isinstance(error, dorad.DoradError):
        say(str(error))
        for hint in _hints(error):
            say(hint)
        return EXIT_UNAVAILABLE if isinstance(error, dorad.Unavailable) else EXIT_FAILURE
    if isinstance(error, OSError) and error.filename is not None and error.strerror:
        say(f"{error.filename}: {error.strerror}")
        return EXIT_USAGE if isinstance(error, FileNotFoundError) else EXIT_FAILURE
    if isinstance(error, (ValueError, TypeError, FileNotFoundError)):
        say(str(error))
        return EXIT_USAGE
    if isinstance(error, (ImportError, OSError)):
        say(str(error))
        return EXIT_FAILURE
    if hasattr(error, "format_message") and hasattr(error, "exit_code"):  # A ClickException.
        message = error.format_message()
        if not message:  # The help, which has been printed, is the answer to no arguments.
            return EXIT_USAGE
        say(message)
        context = getattr(error, "ctx", None)
        if context is not None:
            print(f"Try '{context.command_path} --help'.", file=sys.stderr)
        return EXIT_USAGE
    if isinstance(error, typer.Abort):
        say("aborted")
        return EXIT_FAILURE
    raise error


def _run(main: Callable[[], Any], program: str) -> NoReturn:
    """Calls a command's main and exits with its exit code."""
    try:
        with _remarks(program):
            result = main()
        code = result if isinstance(result, int) else 0
    except BrokenPipeError:  # The reader (head, less) has closed the pipe.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = EXIT_FAILURE
    except Exception as error:
        code = _explain(error, program)
    sys.exit(code)


class _Main:
    """Mixin for typer's classes that prints errors as one line and sets the exit code."""

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        windows_expand_args: bool = True,
        **extra: Any,
    ) -> Any:
        def call() -> Any:
            base: Any = super(_Main, self)
            return base.main(args, prog_name, complete_var, False, windows_expand_args, **extra)

        return _run(call, prog_name or "doractl") if standalone_mode else call()


class Group(_Main, typer.core.TyperGroup):
    """A command group."""


class Command(_Main, typer.core.TyperCommand):
    """A program with one command."""


class Root(Group):
    """A program's group. Its own options, before the command, are defaults of all commands."""

    SHARED = ("context", "target", "output", "retry_for")

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        rest = super().parse_args(ctx, args)
        given = {name: ctx.params.get(name) for name in self.SHARED}
        values = {name: value for name, value in given.items() if value not in (None, "")}
        for name in values:  # They count more than the environment.
            os.environ.pop(f"DORAD_{name.upper()}", None)
        ctx.default_map = _share_options(self, values)
        return rest


def _share_options(command: Any, values: dict[str, Any]) -> dict[str, Any]:
    children = getattr(command, "commands", {})
    return {
        name: _share_options(child, values) if getattr(child, "commands", None) else dict(values)
        for name, child in children.items()
    }
