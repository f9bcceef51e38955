"""A server with two teams and a small tenant, and clients that call it with their tokens."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import dorad

from lib.server import Server, serve
from lib.tokens import write_tokens

PROMPT = list(range(10, 60))
TENANTS = {
    "team-a": {"adapters": "team-a."},
    "team-b": {"adapters": "team-b."},
    "small": {
        "adapters": "small.",
        "quota": {"streams": 2, "adapters": 2, "bytes": "1GiB"},
    },
}
TOKENS = {
    "a-worker": ("team-a", ["infer"]),
    "a-trainer": ("team-a", ["infer", "publish"]),
    "b-worker": ("team-b", ["infer"]),
    "b-trainer": ("team-b", ["infer", "publish"]),
    "publisher": ("team-a", ["publish"]),
    "small": ("small", ["infer", "publish"]),
    "boss": ("ops", ["admin"]),
}


@contextmanager
def serve_tenants(zoo, tokens_file: Path) -> Iterator[Server]:
    """The server of TENANTS and TOKENS, which are written to `tokens_file`."""
    write_tokens(tokens_file, TOKENS, TENANTS)
    adapters = {name: zoo.adapter("slow", "dora") for name in ("team-a.x", "team-b.x")}
    settings = {"security.tokens_file": tokens_file, "engine.kv_bytes": 256 << 20}
    with serve(zoo.model("slow"), adapters, settings) as running:
        yield running


@contextmanager
def connections(server: Server) -> Iterator[Callable[[str], dorad.Client]]:
    """A function from a token's name to a client that has it."""
    with ExitStack() as clients:

        def connect(name: str) -> dorad.Client:
            client = dorad.Client(server.grpc, token=f"{name}-token", retry_for=0, timeout=60)
            return clients.enter_context(client)

        yield connect


def reason(call: Callable, *arguments, **options) -> str:
    """Why a call is refused; "" when it is not."""
    try:
        call(*arguments, **options)
    except dorad.DoradError as error:
        return error.reason
    return ""
