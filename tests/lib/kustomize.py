"""What kustomize makes of a folder."""

import subprocess
from pathlib import Path

import pytest
import yaml


def render(folder: Path) -> list[dict]:
    """The items. Skips the test where kubectl is missing."""
    line = ["kubectl", "kustomize", folder]
    try:
        run = subprocess.run(line, capture_output=True, text=True, timeout=60)
    except FileNotFoundError:
        pytest.skip("there is no kubectl")
    assert run.returncode == 0, run.stderr
    return list(yaml.safe_load_all(run.stdout))
