"""The version stands in the file VERSION alone; files that cannot read it show the same one."""

import re
import subprocess

import dorad
import pytest
from lib.server import ROOT, binary

VERSION = (ROOT / "VERSION").read_text().strip()

# Each place shows a version: (file, pattern).
SHOWN = [
    ("deploy/docker/Dockerfile", r"dorad(?:-proxy)?:(\d+\.\d+\.\d+)"),
    ("deploy/docker/compose.yaml", r"image: dorad:(\S+)"),
    ("deploy/kubernetes/base/kustomization.yaml", r"newTag: \"?([\d.]+)"),
    ("docs/quickstart.md", r"dorad ([\d.]+) on cpu"),
    ("docs/quickstart.md", r"dorad(?:_server)?-(\d+\.\d+\.\d+)-"),
    ("docs/guides/deployment.md", r"dorad(?:-proxy)?:(\d+\.\d+\.\d+)"),
]


def test_the_file_has_one_semantic_version() -> None:
    assert re.fullmatch(r"\d+\.\d+\.\d+", VERSION)


def test_server_and_client_have_it() -> None:
    run = subprocess.run([binary(), "--version"], capture_output=True, text=True, timeout=60)
    assert run.stdout.split()[1] == VERSION
    assert dorad.__version__ == VERSION


@pytest.mark.parametrize(("path", "pattern"), SHOWN)
def test_files_that_show_a_version_show_it(path: str, pattern: str) -> None:
    found = re.findall(pattern, (ROOT / path).read_text())
    assert found and set(found) == {VERSION}
