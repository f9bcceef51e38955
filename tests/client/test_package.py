"""The client's wheel: built from a copy of the sources, with generated modules and their types."""

import os
import re
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
    environment = {name: value for name, value in os.environ.items() if name != "DORAD_URL"}
    run = subprocess.run(command, capture_output=True, text=True, env=environment)
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
        f"dorad/gateway/{stem}_pb2{end}"
        for stem in ("open_inference", "external_processing")
        for end in (".py", ".pyi", "_grpc.py")
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
    for package in ("torch", "typer", "tokenizers", "transformers", "ray", "trl", "verl"):
        assert all("extra ==" in line for line in needs if f" {package}" in line), package


def test_generated_modules_work_with_every_runtime_of_the_promised_range(wheel):
    """Newer generators write a check of the runtime's version, which narrows the range."""
    sources = {n: wheel.read(n).decode() for n in wheel.namelist() if re.search(r"_pb2\w*\.py$", n)}
    assert len(sources) == 12
    for name, source in sources.items():
        assert "runtime_version" not in source and "GRPC_GENERATED_VERSION" not in source, name
    needs = [line.split()[1] for line in read(wheel, "METADATA").splitlines() if "protobuf" in line]
    assert needs == ["protobuf<8,>=4.25"]


def test_has_a_licence_and_invents_no_address(wheel):
    text = read(wheel, "METADATA")
    assert "\nLicense-Expression: Apache-2.0\n" in text and "Project-URL" not in text
    assert read(wheel, "licenses/LICENSE") == (ROOT / "LICENSE").read_text()


def test_has_the_extras_that_messages_and_guides_name(wheel):
    extras = set(re.findall(r"^Provides-Extra: (\w+)$", read(wheel, "METADATA"), re.MULTILINE))
    assert extras == {"cli", "text", "gateway", "images", "train", "qdora", "ray", "trl", "verl"}
    texts = [
        *(ROOT / "client").rglob("*.py"),
        *ROOT.glob("docs/**/*.md"),
        ROOT / "client/README.md",
    ]
    named = [re.findall(r"(?:dorad|client|whl\)?)\[([\w,]+)\]", path.read_text()) for path in texts]
    assert {extra for found in named for group in found for extra in group.split(",")} <= extras


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


def test_ray_is_imported_for_its_fleet_alone_and_named_when_it_is_missing():
    code = "import sys, dorad, dorad.aio; print('ray' in sys.modules); sys.modules['ray'] = None;"
    run = subprocess.run(
        [sys.executable, "-c", f"{code} import dorad.ray"], capture_output=True, text=True
    )
    assert run.stdout == "False\n"
    assert run.stderr.splitlines()[-1] == (
        "ImportError: dorad.ray needs the package ray, which is not installed:"
        " pip install 'dorad[ray]'"
    )
