"""`make wheel`: the package dorad-server holds what it needs, says where it runs, and starts with
the torch of its environment. tests/client/test_package.py is about the client's package."""

import os
import re
import subprocess
import sys
import zipfile
from email import message_from_string
from email.message import Message
from importlib.metadata import distribution
from pathlib import Path

import pytest
from lib.server import ROOT, binary

VERSION = (ROOT / "VERSION").read_text().strip()
# Not in the wheel: glibc and the C++ runtime are the host's, the rest is torch's.
OF_HOST = re.compile(r"ld-linux.*|lib(c|m|dl|rt|pthread|util|stdc\+\+|gcc_s)\.so\.\d+")
OF_TORCH = re.compile(r"lib(torch\w*|c10\w*|gomp|cublas\w*|cudart|cupti)\.so[\d.]*")


def run(*command: object, **options) -> subprocess.CompletedProcess:
    return subprocess.run(
        list(map(str, command)), capture_output=True, text=True, timeout=280, **options
    )


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Both wheels of this tree, by the name of their package."""
    build = binary().parent
    if not (build / "CMakeCache.txt").is_file():
        pytest.skip("the binary under test lies outside a build folder")
    out = tmp_path_factory.mktemp("dist")
    environment = os.environ | {"DORAD_URL": "https://example.com/dorad"}
    made = run(ROOT / "tools" / "wheel.sh", build, out, env=environment)
    assert made.returncode == 0, made.stdout + made.stderr
    found = {path.name.partition("-")[0]: path for path in out.iterdir()}
    assert set(found) == {"dorad", "dorad_server"}
    return found


@pytest.fixture(scope="module")
def unpacked(wheels: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("unpacked")
    with zipfile.ZipFile(wheels["dorad_server"]) as archive:
        for entry in archive.infolist():
            Path(archive.extract(entry, folder)).chmod(entry.external_attr >> 16 & 0o777)
    return folder


def metadata(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [n for n in archive.namelist() if n.endswith(".dist-info/METADATA")]
        return message_from_string(archive.read(name).decode())


def elf_files(unpacked: Path) -> list[Path]:
    package = unpacked / "dorad_server"
    return [package / "bin" / "dorad", *sorted((package / "lib").iterdir())]


@pytest.mark.parametrize("package", ["dorad", "dorad_server"])
def test_metadata_names_version_licence_and_the_given_address(wheels, package) -> None:
    data = metadata(wheels[package])
    assert data["Version"] == VERSION and data["License-Expression"] == "Apache-2.0"
    assert data["License-File"] == "LICENSE"
    assert data.get_all("Project-URL") == ["Repository, https://example.com/dorad"]
    assert data["Requires-Python"] == ">=3.11" and data.get_payload().startswith("# dorad")
    with zipfile.ZipFile(wheels[package]) as archive:
        (name,) = [n for n in archive.namelist() if n.endswith("licenses/LICENSE")]
        assert archive.read(name) == (ROOT / "LICENSE").read_bytes()


def test_the_server_needs_exactly_the_torch_that_it_was_built_with(wheels) -> None:
    (pinned,) = re.findall(r"^torch==\S+", (ROOT / "requirements.txt").read_text(), re.M)
    assert metadata(wheels["dorad_server"]).get_all("Requires-Dist") == [pinned]


def test_it_carries_every_library_but_those_of_host_and_torch(unpacked) -> None:
    files = elf_files(unpacked)
    carried = {path.name for path in files}
    for path in files:
        dynamic = run("readelf", "--dynamic", "--wide", path).stdout
        needed = set(re.findall(r"\(NEEDED\).*\[(.+)\]", dynamic))
        for name in needed - carried:
            assert OF_HOST.fullmatch(name) or OF_TORCH.fullmatch(name), (path.name, name)
        # A path of the machine that built it would be taken on a machine that has it, too.
        assert not re.search(r"\((RPATH|RUNPATH)\)", dynamic), path
    assert {"libgrpc++.so.1.51", "libprotobuf.so.32"} & carried
    assert not [n for n in carried if OF_HOST.fullmatch(n) or OF_TORCH.fullmatch(n)]


def test_the_platform_is_no_older_than_its_symbols(wheels, unpacked) -> None:
    tag = re.fullmatch(
        rf"dorad_server-{VERSION}-py3-none-manylinux_2_(\d+)_x86_64\.whl",
        wheels["dorad_server"].name,
    )
    assert tag
    symbols = run("objdump", "-T", *elf_files(unpacked)).stdout
    needed = {int(minor) for minor in re.findall(r"\(?GLIBC_2\.(\d+)", symbols)}
    assert needed and max(needed) <= int(tag[1]) <= int(os.confstr("CS_GNU_LIBC_VERSION")[8:])


def test_the_client_is_pure_python(wheels) -> None:
    with zipfile.ZipFile(wheels["dorad"]) as archive:
        assert not [n for n in archive.namelist() if n.endswith(".so")]
    assert wheels["dorad"].name == f"dorad-{VERSION}-py3-none-any.whl"


def test_the_library_of_trainers_comes_with_a_server_for_cuda(unpacked) -> None:
    cuda = "DORAD_CUDA:BOOL=ON" in (binary().parent / "CMakeCache.txt").read_text()
    assert (unpacked / "dorad_server" / "lib" / "libdorad_train.so").is_file() == cuda


def test_it_starts_without_a_library_of_nvidias(unpacked) -> None:
    dynamic = "".join(run("readelf", "--dynamic", path).stdout for path in elf_files(unpacked))
    assert not re.findall(r"\(NEEDED\).*\[(lib(?:cuda|cublas|cupti|nv)\w*\.so.*)\]", dynamic)


# --- An environment of its own, without pip: what the launcher finds is what a test put there.


@pytest.fixture
def environment(unpacked: Path, tmp_path: Path) -> Path:
    """site-packages of a virtual environment with dorad-server and nothing else."""
    assert run(sys.executable, "-m", "venv", "--without-pip", tmp_path / "env").returncode == 0
    (site,) = (tmp_path / "env").glob("lib/python3.*/site-packages")
    for path in unpacked.iterdir():
        (site / path.name).symlink_to(path)
    return site


def dorad(site: Path, *arguments: str) -> subprocess.CompletedProcess:
    python = site.parents[2] / "bin" / "python"
    return run(python, "-m", "dorad_server", *arguments, env={"PATH": "/usr/bin:/bin"})


def pretend_torch(site: Path, version: str) -> None:
    info = site / f"torch-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: torch\nVersion: {version}\n")


def link_torch(site: Path) -> None:
    """This environment's torch, with the libraries of NVIDIA's packages."""
    info = distribution("torch")
    for path in (info.locate_file("torch"), info._path, info.locate_file("nvidia")):
        if Path(path).exists():
            (site / Path(path).name).symlink_to(path)


def test_without_torch_one_sentence_says_what_to_install(environment) -> None:
    done = dorad(environment, "--version")
    assert done.returncode == 78 and done.stdout == ""
    assert re.fullmatch(
        r"dorad: torch ([\d.]+) is needed, \S+ has none: run `\S+ -m pip install torch==\1`\n",
        done.stderr,
    )


def test_another_torch_is_refused_by_its_version(environment) -> None:
    pretend_torch(environment, "2.10.0+cu128")
    done = dorad(environment, "--version")
    assert done.returncode == 78 and done.stderr.count("\n") == 1
    assert "has 2.10.0+cu128: run" in done.stderr


def test_a_torch_without_the_needed_libraries_is_refused_with_their_names(environment) -> None:
    pretend_torch(environment, f"{distribution('torch').version.partition('+')[0]}+cpu")
    done = dorad(environment, "--version")
    assert done.returncode == 78 and done.stderr.count("\n") == 1
    assert "libtorch_cpu.so" in done.stderr and "+cpu" in done.stderr


def test_it_starts_with_the_torch_of_its_environment(environment) -> None:
    link_torch(environment)
    done = dorad(environment, "--version")
    assert done.returncode == 0 and done.stdout.startswith(f"dorad {VERSION}\n"), done.stderr
    wrong = dorad(environment, "serv")
    assert wrong.returncode == 64 and "serve" in wrong.stderr
