"""Completes names of adapters in a shell, by asking the server.

Errors complete nothing: a shell has no place for them.
"""

from __future__ import annotations

import os
from typing import Any

import dorad
from dorad.cli.server import of_context

SECONDS = 3.0
"""Limit of the question to the server."""
LIVE_STATES = ("loading", "ready", "retiring")
"""States of the versions that a server still has."""


def complete_name(ctx: Any, incomplete: str) -> list[str]:
    """Names of adapters."""
    return sorted({v.name for v in _versions(ctx) if v.name.startswith(incomplete)})


def complete_version(ctx: Any, incomplete: str) -> list[str]:
    """NAME@VERSION."""
    return [v.label for v in _versions(ctx) if v.label.startswith(incomplete)]


def complete_reference(ctx: Any, incomplete: str) -> list[str]:
    """NAME and NAME@VERSION."""
    return [*complete_name(ctx, incomplete), *complete_version(ctx, incomplete)]


def _versions(ctx: Any) -> list[dorad.AdapterVersion]:
    """Those of the server that the command line names so far."""
    try:
        # Commands that need no admin listener have no such option.
        values = {"admin_target": os.environ.get("DORAD_ADMIN_TARGET", "")} | ctx.params
        values |= of_context(ctx, values)
        with dorad.Client(
            values["target"],
            admin_target=values["admin_target"] or None,
            timeout=SECONDS,
            retry_for=0,
        ) as client:
            return [version for version in client.adapters() if version.state in LIVE_STATES]
    except Exception:
        return []
