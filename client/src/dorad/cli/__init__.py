"""The command lines `doractl` and `dorad-load`. They need `dorad[cli]`. Text prompts also need
`dorad[text]`."""

from __future__ import annotations

import sys


def _require_extra(program: str) -> None:
    try:
        import rich  # noqa: F401
        import typer  # noqa: F401
        import yaml  # noqa: F401
    except ImportError:
        print(f"{program} needs its extra: pip install 'dorad[cli]'", file=sys.stderr)
        sys.exit(1)


def main() -> None:
    """Entry point of `doractl`."""
    _require_extra("doractl")
    from dorad.cli.app import app

    app(prog_name="doractl")


def load_main() -> None:
    """Entry point of `dorad-load`."""
    _require_extra("dorad-load")
    from dorad.cli.load import app

    app(prog_name="dorad-load")
