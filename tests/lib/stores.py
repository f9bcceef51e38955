"""What the tests of durable adapters share: a server over a store, and a look into the folder."""

import subprocess
from contextlib import contextmanager
from pathlib import Path

import grpc
import pytest

from lib.server import Server, command, environment, serve
from lib.wire import Failure, failure

FAMILY = "llama2"
PROMPT = [11, 12, 13, 14, 15]
EXIT_CONFIG = 78


@contextmanager
def serve_store(zoo, path: Path, adapters=None, expect_exit: int | None = 0, **env: str):
    settings = {"adapters.store_path": path, "adapters.allowed_roots": f"[{zoo.directory}]"}
    model = zoo.model(FAMILY)
    with serve(model, adapters, settings, expect_exit=expect_exit, **env) as server:
        yield server


def fails_to_start(zoo, path: Path, family: str = FAMILY, **env: str) -> tuple[int, str]:
    """The exit code and standard error of a server that must end before it is ready."""
    line = command(zoo.model(family), None, {"adapters.store_path": path})
    run = subprocess.run(
        line, capture_output=True, text=True, timeout=60, env=environment(**env), check=False
    )
    assert "dorad ready" not in run.stdout
    return run.returncode, run.stderr


def answer(server: Server, adapter: str) -> list[int]:
    """Greedy tokens."""
    options = dict(temperature=0.0, max_tokens=8, ignore_eos=True)
    return server.wire.generate(PROMPT, adapter=adapter, **options)[0].tokens


def refused(call, *args, **kwargs) -> Failure:
    with pytest.raises(grpc.RpcError) as caught:
        call(*args, **kwargs)
    return failure(caught.value)


def objects(path: Path) -> list[str]:
    return sorted(entry.name for entry in path.glob("objects/*/*"))


def leftovers(path: Path) -> list[str]:
    """Files under tmp, objects that lack a file, and a journal that took no other's place."""
    half = [p for p in path.glob("objects/*/*") if len(list(p.iterdir())) != 2]
    return [str(p) for p in [*path.glob("tmp/*"), *half, *path.glob("journal.*")]]
