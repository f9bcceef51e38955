"""Tiny models and adapters on disk. They are made when first asked for and kept for later runs.

The processes of a run share them: a file lock lets one process make an item while the others wait.
Importing torch, transformers and peft takes seconds and happens only when something is missing.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from lib.tiers import deep

if TYPE_CHECKING:
    import torch

    from lib.oracle import Oracle

LIB = Path(__file__).resolve().parent
# A change of any of these makes another zoo.
SOURCES = ["zoo.py", "tiny_models.py", "adapters.py", "texts.py", "pictures.py", "oracle.py"]
PACKAGES = ["torch", "transformers", "peft", "safetensors", "tokenizers"]


def fingerprint() -> str:
    """Names everything that the files of a zoo depend on."""
    parts = [(LIB / name).read_text() for name in SOURCES]
    parts += [f"{name}=={version(name)}" for name in PACKAGES]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def default_directory(cache: Path) -> Path:
    """The folder of today's zoo. Those of earlier fingerprints go."""
    directory = cache / f"zoo-{fingerprint()}"
    for old in cache.glob("zoo-*"):
        if old != directory:
            shutil.rmtree(old, ignore_errors=True)
    directory.mkdir(parents=True, exist_ok=True)
    return directory


def make_once(directory: Path, make: Callable[[Path], object]) -> Path:
    """`directory`, which make(scratch) fills in one process. It is complete or absent."""
    if not directory.exists():
        with (directory.parent / f".{directory.name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not directory.exists():
                with tempfile.TemporaryDirectory(dir=directory.parent, prefix=".make-") as scratch:
                    made = Path(scratch) / directory.name
                    make(made)
                    made.rename(directory)
    return directory


def _prepare() -> None:
    import torch
    import transformers

    torch.set_num_threads(1)
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()


class Zoo:
    """The models and adapters below one folder. Tests read them and never write there."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._oracles: dict[tuple[str, str], Oracle] = {}

    def model(self, family: str) -> Path:
        def make(folder: Path) -> None:
            _prepare()
            from lib import tiny_models

            tiny_models.make(tiny_models.BY_NAME[family], folder)

        return make_once(self.directory / family, make)

    def model_with_tokenizer(self, family: str) -> Path:
        """The same model with the tokenizer and the chat template of lib.texts."""

        def make(folder: Path) -> None:
            from lib.texts import make_tokenizer

            make_tokenizer(shutil.copytree(self.model(family), folder))

        return make_once(self.directory / f"{family}-text", make)

    def model_with_processor(self, family: str) -> Path:
        """The same model with lib.pictures' tokenizer, chat template and image processor."""

        def make(folder: Path) -> None:
            from lib.pictures import make_processor

            make_processor(shutil.copytree(self.model(family), folder), family)

        return make_once(self.directory / f"{family}-processor", make)

    def oracle(self, family: str, dtype: str = "float32") -> Oracle:
        if (family, dtype) not in self._oracles:
            _prepare()
            import torch

            from lib.oracle import Oracle

            self._oracles[family, dtype] = Oracle(self.model(family), getattr(torch, dtype))
        return self._oracles[family, dtype]

    def next_logprobs(
        self, family: str, kind: str, sequences: list[list[int]], dtype: str = "float32"
    ) -> list[np.ndarray]:
        """The oracle's, with the adapter of this kind or "base"; kept for later runs."""
        return self._kept(
            repr((family, kind, dtype, sequences)).encode(),
            lambda: self.oracle(family, dtype).next_logprobs(self._folder(family, kind), sequences),
        )

    def image_logprobs(
        self, family: str, kind: str, inputs: dict[str, torch.Tensor], dtype: str = "float32"
    ) -> np.ndarray:
        """The oracle's, as next_logprobs."""
        question = repr((family, kind, dtype)).encode()
        for name, tensor in inputs.items():
            question += f"{name}{tensor.dtype}{tuple(tensor.shape)}".encode()
            question += tensor.float().numpy().tobytes()
        (rows,) = self._kept(
            question,
            lambda: [self.oracle(family, dtype).image_logprobs(self._folder(family, kind), inputs)],
        )
        return rows

    def _folder(self, family: str, kind: str) -> Path | None:
        return None if kind == "base" else self.adapter(family, kind)

    def _kept(self, question: bytes, ask: Callable[[], list[np.ndarray]]) -> list[np.ndarray]:
        """Kept as models are, because to make PEFT's models takes longer than the server's answers.
        The deep tier asks again."""
        kept = self.directory / f"answer-{hashlib.sha256(question).hexdigest()[:24]}.npz"
        if deep() or not kept.exists():
            scratch = kept.with_suffix(f".{os.getpid()}.npz")
            np.savez(scratch, *ask())
            scratch.replace(kept)
        with np.load(kept) as rows:
            return list(rows.values())

    def adapter(self, family: str, kind: str, seed: int = 0) -> Path:
        def make(folder: Path) -> None:
            from lib import adapters

            adapters.make(self.oracle(family).base, adapters.BY_NAME[kind], folder, seed)

        return make_once(self.directory / f"{family}-{kind}-{seed}", make)

    def copy_adapters(self, family: str, kinds: Iterable[tuple[str, int]], root: Path) -> Path:
        """Folders KIND-SEED below `root`, which tests may change."""
        for kind, seed in kinds:
            shutil.copytree(self.adapter(family, kind, seed), root / f"{kind}-{seed}")
        return root

    def sequences(self, family: str, seed: int = 7) -> list[list[int]]:
        from lib import tiny_models

        return tiny_models.sequences(tiny_models.BY_NAME[family], seed)
