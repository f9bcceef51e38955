"""`doractl adapters check`: runs `dorad check-adapter`, the server's own validation."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml

from dorad.cli.common import EXIT_FAILURE, EXIT_USAGE, Output, OutputOption, console, table

_NOT_FOUND = (
    "the checks are in the server's program, dorad, which is neither on the PATH nor named by "
    "DORAD_BINARY; a publish to a server makes the same checks"
)


def _program() -> str:
    """Raises FileNotFoundError."""
    named = os.environ.get("DORAD_BINARY")
    found = shutil.which(named or "dorad")
    if found is None:
        raise FileNotFoundError(f"DORAD_BINARY: no program {named}" if named else _NOT_FOUND)
    return found


def check(
    path: Annotated[Path, typer.Argument(help="PEFT folder.", show_default=False)],
    model: Annotated[
        Path | None,
        typer.Option(
            "--model",
            "-m",
            envvar="DORAD_MODEL",
            help="Folder of the base model. Only its config.json is read.",
        ),
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(help="The server's configuration, for its model and its limits."),
    ] = None,
    output: OutputOption = Output.TABLE,
) -> None:
    """Validate a PEFT folder as a publish would, without a server.

    It needs the program dorad (DORAD_BINARY, or on the PATH), and no weights of the model.
    """
    if model is None and config is None:
        raise typer.BadParameter("give the base model", param_hint="--model / DORAD_MODEL")
    if not path.is_dir():
        raise FileNotFoundError(f"no adapter folder {path}")
    line = [_program(), "check-adapter", str(path)]
    line += ["--model", str(model)] if model is not None else []
    line += ["--config", str(config)] if config is not None else []
    run = subprocess.run(line, stdout=subprocess.PIPE, text=True, check=False)
    if run.returncode:  # The program has printed every problem.
        raise typer.Exit(EXIT_USAGE if run.returncode == EXIT_USAGE else EXIT_FAILURE)
    found = yaml.safe_load(run.stdout)
    output.show({"path": str(path), **found}, lambda: _print(path, found))


def _print(path: Path, found: dict[str, Any]) -> None:
    low, high = found["min_rank"], found["max_rank"]
    rank = str(high) if low == high else f"{low}-{high}"
    made = table("ADAPTER", str(path))
    made.add_row("kind", f"{found['kind']}, rank {rank}, {found['num_modules']} modules")
    made.add_row("size", f"{found['num_parameters'] / 1e6:.2f} M parameters")
    made.add_row("digest", found["digest"])
    for number, left in enumerate(found["checked_by_the_server_only"]):
        made.add_row("" if number else "left to the server", left)
    console().print(made)
