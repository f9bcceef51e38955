"""The demo's model and two DoRA adapters that the demo trains.

Random adapters will not do: they drive the model's outlier activations to where two orders of fp32
sums differ by several times the bound of trained ones.
"""

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from lib.server import ROOT

CACHE = ROOT / ".cache"
TRAINED = {"pirate": "pirate-v1", "telegram": "telegram-v1"}


@dataclass
class SmolLM2:
    model: Path
    adapters: dict[str, Path]


def run_demo(script: str, *arguments: str) -> None:
    subprocess.run([sys.executable, ROOT / "demo" / script, *arguments], check=True)


def converted() -> Path:
    """The model's folder, converted on first use."""
    run_demo("convert_smollm2.py")
    return CACHE / "models" / "SmolLM2-135M-Instruct"


def trained() -> SmolLM2:
    """Both adapters are trained on first use and kept in the cache."""
    run_demo("train_adapters.py", *TRAINED.values())
    folders = {name: CACHE / "adapters" / folder for name, folder in TRAINED.items()}
    return SmolLM2(converted(), folders)
