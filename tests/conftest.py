"""Fixtures and tiers of the Python tests. They run against the real binary: build/dorad, or
DORAD_BINARY. DORAD_DEEP=1 adds the tests marked `deep`; `--smoke ROOM` runs those of one room."""

import gc
import os
import subprocess
import sys
from pathlib import Path

# Before torch is imported: its threads spin and starve the server on a small machine.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest

# Here rather than in a hook, and first: files below import the client. One process does it for all.
if "PYTEST_XDIST_WORKER" not in os.environ:
    generator = Path(__file__).resolve().parents[1] / "client" / "generate.py"
    subprocess.run([sys.executable, generator, "--if-stale"], check=True)

from lib.server import ROOT
from lib.smollm2 import CACHE, SmolLM2, trained
from lib.tiers import LONG, SMOKE, deep
from lib.zoo import Zoo, default_directory


def is_worker(config: pytest.Config) -> bool:
    """Whether this process runs tests for another one (pytest-xdist)."""
    return hasattr(config, "workerinput")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--smoke", metavar="ROOM", help="only the smoke tests of a room")


def pytest_configure(config: pytest.Config) -> None:
    # Libraries are millions of objects, and each full collection would visit them all: a third of
    # the time of their imports.
    gc.disable()
    room = config.getoption("--smoke")
    if room:
        config.args[:] = [str(ROOT / "tests" / test) for test in SMOKE.get(room, [])]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    left_out = [] if deep() else [item for item in items if item.get_closest_marker("deep")]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]
    order = {ROOT / "tests" / file: place for place, file in enumerate(LONG)}
    items.sort(key=lambda item: order.get(item.path, len(order)))


def pytest_collection_finish() -> None:
    gc.freeze()  # Later collections leave those objects out.
    gc.enable()


# --- Figures.

_FIGURES = pytest.StashKey[list[str]]()


@pytest.fixture(scope="session")
def figures(pytestconfig: pytest.Config) -> list[str]:
    """Measured figures, one a line; printed at the end of the run, passed or not."""
    return pytestconfig.stash.setdefault(_FIGURES, [])


def pytest_sessionfinish(session: pytest.Session) -> None:
    if is_worker(session.config):
        session.config.workeroutput["figures"] = session.config.stash.get(_FIGURES, [])


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node, error: object) -> None:
    """A worker has ended: its figures are this process's to print."""
    figures = getattr(node, "workeroutput", {}).get("figures", [])
    node.config.stash.setdefault(_FIGURES, []).extend(figures)


def pytest_terminal_summary(terminalreporter, config: pytest.Config) -> None:
    lines = config.stash.get(_FIGURES, [])
    if lines:
        terminalreporter.section("measured")
        for line in sorted(lines):
            terminalreporter.write_line(line)


# --- Models and adapters.


@pytest.fixture(scope="session")
def zoo() -> Zoo:
    return Zoo(default_directory(CACHE / "tests"))


@pytest.fixture(scope="session")
def smollm2() -> SmolLM2:
    return trained()
