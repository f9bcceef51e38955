"""Both wheels in fresh virtual environments, by pip and with the package index (deep tier).

torch and what it requires are linked from this environment, where pip finds them installed: 5 GB
would be the same files once more. Everything else is installed.
"""

import os
import re
import subprocess
import sys
from importlib.metadata import Distribution, distribution
from pathlib import Path

import pytest
from lib.server import ROOT, binary, start
from lib.zoo import Zoo
from packaging.requirements import Requirement

pytestmark = [pytest.mark.deep, pytest.mark.timeout(1500)]

OLDEST = ["protobuf==4.25.0", "grpcio==1.60.0", "grpcio-health-checking==1.60.0", "numpy==1.26.0"]
RUNTIMES = {
    "oldest": [*OLDEST, "googleapis-common-protos==1.63.0"],
    "tritonclient": ["tritonclient[grpc]==2.73.0"],
    "newest": ["protobuf==7.36.2", "grpcio==1.85.1"],
}

USE = """
import sys
import google.protobuf, grpc
if "tritonclient" in sys.argv[3]:  # in one process, as in an application
    import tritonclient.grpc
import dorad
with dorad.Client(sys.argv[1]) as client:
    version = client.publish("policy", path=sys.argv[2], activate=True)
    (base,) = client.generate([1, 2, 3], max_tokens=8, temperature=0)
    (sample,) = client.generate([1, 2, 3], adapter="policy", max_tokens=8, temperature=0)
    assert len(base.token_ids) == 8 and sample.spans[0].digest == version.digest
    with client.stream([1, 2, 3], max_tokens=8, temperature=0) as stream:
        assert [t for delta in stream for t in delta.token_ids] == list(base.token_ids)
    client.score([[1, 2, 3]], adapters=[None, "policy"])
    try:
        client.generate([10**6])
    except dorad.InvalidArgument as error:
        assert error.violations
    client.retire(version.ref)
print("used", google.protobuf.__version__, grpc.__version__, dorad.__file__)
"""


def run(*command: object, **env: str) -> str:
    done = subprocess.run(
        list(map(str, command)),
        capture_output=True,
        text=True,
        timeout=600,
        env={"PATH": "/usr/bin:/bin", "HOME": os.environ.get("HOME", "/")}
        | {name: value for name, value in os.environ.items() if name.startswith("PIP_")}
        | env,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def required(requirement: Requirement, found: dict[str, Distribution]) -> None:
    """Adds a distribution of this environment, and all that it requires on this platform."""
    here = distribution(requirement.name)
    found[here.name] = here
    for text in here.requires or []:
        further = Requirement(text)
        wanted = [{"extra": extra} for extra in ("", *requirement.extras)]
        if further.name not in found and (
            further.marker is None or any(further.marker.evaluate(extra) for extra in wanted)
        ):
            required(further, found)


def link_torch(site: Path) -> list[str]:
    """Links torch and all that it requires. Returns a pin of each."""
    found: dict[str, Distribution] = {}
    required(Requirement("torch"), found)
    for here in found.values():
        tops = {file.parts[0] for file in here.files or [] if file.parts[0] != ".."}
        for top in tops - {"__pycache__"}:
            if not (site / top).exists():
                (site / top).symlink_to(here.locate_file(top))
    return [f"{name}=={here.version}" for name, here in found.items() if name != "setuptools"]


class Environment:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        run(sys.executable, "-m", "venv", folder)
        (self.site,) = folder.glob("lib/python3.*/site-packages")

    def pip(self, *arguments: object) -> str:
        options = ["--disable-pip-version-check", "--no-input"]
        return run(self.folder / "bin" / "python", "-m", "pip", *arguments, *options)

    def run(self, program: str, *arguments: object, **env: str) -> str:
        return run(self.folder / "bin" / program, *arguments, **env)


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    if not (binary().parent / "CMakeCache.txt").is_file():
        pytest.skip("the binary under test lies outside a build folder")
    out = tmp_path_factory.mktemp("dist")
    run(ROOT / "tools" / "wheel.sh", binary().parent, out)
    return {path.name.partition("-")[0]: path for path in out.iterdir()}


@pytest.fixture(scope="module")
def installed(wheels: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """Server and client in one environment, with the extras of the quickstart."""
    folder = tmp_path_factory.mktemp("env")
    environment = Environment(folder / "env")
    # Pinned, so that pip replaces nothing of what is linked.
    (folder / "pins.txt").write_text("\n".join(link_torch(environment.site)))
    packages = [wheels["dorad_server"], f"{wheels['dorad']}[cli,text]"]
    environment.pip("install", *packages, "--constraint", folder / "pins.txt")
    environment.pip("check")
    assert (environment.site / "torch").is_symlink()
    return environment


@pytest.fixture(scope="module")
def server(installed: Environment, zoo: Zoo, tmp_path_factory: pytest.TempPathFactory):
    """`dorad serve MODEL`, the installed program."""
    line = [
        str(installed.folder / "bin" / "dorad"),
        "serve",
        str(zoo.model_with_tokenizer("llama2")),
    ]
    for setting in ("server.grpc_listen=127.0.0.1:0", "server.metrics_listen=127.0.0.1:0"):
        line += ["--set", setting]
    line += ["--set", "engine.kv_bytes=1GiB", "--set", "model.device=cpu"]
    running = start(line, tmp_path_factory.mktemp("log") / "server.log", timeout=120)
    try:
        yield running
    finally:
        assert running.stop() == 0


def test_the_installed_server_answers_the_installed_tools(installed, server, zoo: Zoo) -> None:
    assert Path(f"/proc/{server.pid}/exe").resolve().is_relative_to(installed.site.resolve())
    doractl = ["doractl", "--target", server.grpc]
    assert installed.run(*doractl, "health").strip() == "serving"
    model = zoo.model_with_tokenizer("llama2")
    line = ["generate", "hello", "--base", "--max-tokens", "4"]
    assert installed.run(*doractl, *line, DORAD_MODEL=str(model)).strip()


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_the_client_works_with_both_ends_of_its_range_and_beside_its_neighbours(
    runtime: str, wheels, server, zoo: Zoo, tmp_path: Path
) -> None:
    if runtime == "oldest" and sys.version_info >= (3, 13):
        pytest.skip("these old versions have no wheels for this Python")
    environment = Environment(tmp_path / "env")
    environment.pip("install", wheels["dorad"], *RUNTIMES[runtime])
    environment.pip("check")
    adapter = zoo.adapter("llama2", "dora")
    used = environment.run("python", "-c", USE, server.grpc, adapter, runtime)
    pinned = re.search(r"protobuf==([\d.]+)", " ".join(RUNTIMES[runtime]))
    assert used.startswith(f"used {pinned[1] if pinned else '6.'}"), used
    assert str(environment.site) in used


def test_the_hint_of_doractl_is_a_command_that_helps(wheels, tmp_path: Path) -> None:
    environment = Environment(tmp_path / "env")
    environment.pip("install", wheels["dorad"])
    done = subprocess.run(
        [environment.folder / "bin" / "doractl"], capture_output=True, text=True, timeout=60
    )
    hint = re.fullmatch(r"doractl needs its extra: pip install '(\S+)'\n", done.stderr)
    assert done.returncode == 1 and hint, done.stderr
    environment.pip("install", hint[1])
    version = (ROOT / "VERSION").read_text().strip()
    assert environment.run("doractl", "--version").strip() == f"doractl {version}"
