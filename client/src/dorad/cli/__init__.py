"""`doractl`, the command line. Needs `dorad[cli]`; text prompts need `dorad[text]` as well."""

from __future__ import annotations

import sys


def main() -> None:
    """Entry point of `doractl`."""
    try:
        import rich  # noqa: F401
        import typer  # noqa: F401
    except ImportError:
        print("doractl needs its extra: pip install 'dorad[cli]'", file=sys.stderr)
        sys.exit(1)
    from dorad.cli.app import app

    app(prog_name="doractl")
