"""All routes of `--rl`."""

from __future__ import annotations

from starlette.routing import Route

from dorad.gateway.core import Gateway
from dorad.gateway.rl import adapters, control, generate


def routes(gateway: Gateway) -> list[Route]:
    return [*adapters.routes(gateway), *control.routes(gateway), *generate.routes(gateway)]
