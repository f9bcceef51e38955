"""The wheel: built from a copy of the sources, it carries the generated modules and their types."""

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import dorad
import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    tree = tmp_path_factory.mktemp("tree")
    ignore = shutil.ignore_patterns("*_pb2*", "_sync", "build", "dist", "*.egg-info", "__pycache__")
    shutil.copytree(ROOT / "client", tree / "client", ignore=ignore)
    shutil.copytree(ROOT / "proto", tree / "proto")
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation"]
    command += ["--disable-pip-version-check", "--wheel-dir", tree, tree / "client"]
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    (path,) = tree.glob("dorad-*.whl")
    with zipfile.ZipFile(path) as archive:
        yield archive


def read(wheel, suffix):
    (name,) = [name for name in wheel.namelist() if name.endswith(suffix)]
    return wheel.read(name).decode()


def test_carries_generated_modules_with_types(wheel):
    names = set(wheel.namelist())
    for stem in ("types", "inference", "adapters", "control"):
        for end in ("_pb2.py", "_pb2.pyi", "_pb2_grpc.py", "_pb2_grpc.pyi"):
            assert f"dorad/v1/{stem}{end}" in names
    assert {
        f"dorad/gateway/open_inference_pb2{end}" for end in (".py", ".pyi", "_grpc.py")
    } <= names
    assert {"dorad/_sync/client.py", "dorad/_sync/stream.py"} <= names
    assert {"dorad/py.typed", "dorad/v1/__init__.py", "dorad/cli/app.py"} <= names
    assert not [name for name in names if name.startswith(("build/", "src/", "tests/"))]


def test_names_its_programs_and_what_it_needs(wheel):
    assert "doractl = dorad.cli:main" in read(wheel, "entry_points.txt")
    assert "dorad-load = dorad.cli:load_main" in read(wheel, "entry_points.txt")
    needs = [line for line in read(wheel, "METADATA").splitlines() if "Requires-Dist" in line]
    for package in ("grpcio>=", "protobuf", "numpy", "googleapis-common-protos"):
        assert [line for line in needs if line.startswith(f"Requires-Dist: {package}")], package
    # The library alone must not pull in these.
    for package in ("torch", "typer", "tokenizers"):
        assert all("extra ==" in line for line in needs if f" {package}" in line), package


def test_imports_from_the_wheel_alone(wheel, tmp_path):
    wheel.extractall(tmp_path)
    code = "import dorad, dorad.aio, dorad.cli, dorad.load; print(dorad.__file__)"
    run = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={"PYTHONPATH": str(tmp_path)},
    )
    assert run.stdout.startswith(str(tmp_path)), run.stderr
    assert f"\nVersion: {dorad.__version__}\n" in read(wheel, "METADATA")
