"""Fixtures of the Python tests. They run against the real binary: build/dorad, or DORAD_BINARY."""

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

ROOT = Path(__file__).resolve().parents[1]


def pytest_configure(config: pytest.Config) -> None:
    generator = ROOT / "client" / "generate_stubs.py"
    subprocess.run([sys.executable, generator, "--if-stale"], check=True)


_FIGURES = pytest.StashKey[list[str]]()


@pytest.fixture(scope="session")
def figures(pytestconfig: pytest.Config) -> list[str]:
    """Measured figures, one a line; printed at the end of the run, passed or not."""
    return pytestconfig.stash.setdefault(_FIGURES, [])


def pytest_terminal_summary(terminalreporter, config: pytest.Config) -> None:
    lines = config.stash.get(_FIGURES, [])
    if lines:
        terminalreporter.section("measured")
        for line in lines:
            terminalreporter.write_line(line)


class Zoo:
    """Tiny models and adapters on disk, made when first asked for and kept for the session."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._oracles = {}

    def model(self, family: str) -> Path:
        from lib import tiny_models

        return tiny_models.make(tiny_models.BY_NAME[family], self.directory / family)

    def oracle(self, family: str):
        from lib.oracle import Oracle

        if family not in self._oracles:
            self._oracles[family] = Oracle(self.model(family))
        return self._oracles[family]

    def adapter(self, family: str, kind: str, seed: int = 0) -> Path:
        from lib import adapters

        directory = self.directory / f"{family}-{kind}-{seed}"
        return adapters.make(self.oracle(family).base, adapters.BY_NAME[kind], directory, seed)

    def sequences(self, family: str, seed: int = 7) -> list[list[int]]:
        from lib import tiny_models

        return tiny_models.sequences(tiny_models.BY_NAME[family], seed)


@pytest.fixture(scope="session")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> Zoo:
    import torch
    import transformers

    torch.set_num_threads(1)
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    return Zoo(tmp_path_factory.mktemp("zoo"))


class SmolLM2:
    """The demo's model and its two adapters."""

    def __init__(self, model: Path, adapters: dict[str, Path]) -> None:
        self.model, self.adapters = model, adapters


@pytest.fixture(scope="session")
def smollm2() -> SmolLM2:
    # Cached, as the demo has it; what is missing trains with every core, since nothing else runs.
    threads = os.environ | {"OMP_NUM_THREADS": str(len(os.sched_getaffinity(0)))}
    demo = ROOT / "demo"
    names = {"pirate": "pirate-v1", "telegram": "telegram-v1"}
    for script, *arguments in ("convert_smollm2.py",), ("train_adapters.py", *names.values()):
        subprocess.run([sys.executable, demo / script, *arguments], check=True, env=threads)
    cache = ROOT / ".cache"
    return SmolLM2(
        cache / "models" / "SmolLM2-135M-Instruct",
        {name: cache / "adapters" / folder for name, folder in names.items()},
    )
