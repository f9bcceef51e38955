"""deploy/systemd: the unit is accepted by systemd's own tools, hardened, and fits the server."""

import inspect
import shutil
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
import yaml
from dorad.cli.gateway import gateway as gateway_command
from lib.gateway import READY
from lib.server import ROOT, binary, environment

sys.path.insert(0, str(ROOT / "tests" / "client"))

from fake_server import FakeServer

FOLDER = ROOT / "deploy" / "systemd"
UNIT = FOLDER / "dorad.service"


@pytest.fixture
def fake():
    with FakeServer() as server:
        yield server


def run(*arguments: object) -> subprocess.CompletedProcess:
    return subprocess.run(
        [str(argument) for argument in arguments],
        capture_output=True,
        text=True,
        timeout=60,
        env={"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL": "C", "TERM": "dumb"},
    )


@pytest.fixture(params=["gpu", "cpu-only"])
def unit(request, tmp_path) -> Path:
    """The unit as installed, but with this tree's server."""
    path = tmp_path / "dorad.service"
    text = UNIT.read_text()
    assert text.count("/opt/dorad/build/dorad ") == 1
    path.write_text(text.replace("/opt/dorad/build/dorad ", f"{binary()} "))
    if request.param == "cpu-only":
        drop_ins = tmp_path / "dorad.service.d"
        drop_ins.mkdir()
        shutil.copy(FOLDER / "cpu-only.conf", drop_ins)
    return path


def settings(section: str, unit: Path = UNIT) -> dict[str, list[str]]:
    """All values of each setting of the unit, in order."""
    found: dict[str, list[str]] = {}
    current = ""
    for line in unit.read_text().splitlines():
        if line.startswith("["):
            current = line.strip("[]")
        elif current == section and line and not line.startswith("#"):
            name, _, value = line.partition("=")
            found.setdefault(name, []).append(value)
    return found


def assert_accepted(unit: Path) -> None:
    verified = run("systemd-analyze", "verify", "--man=no", unit)
    assert verified.returncode == 0 and verified.stderr == "", verified.stderr


def exposure(unit: Path, threshold: int) -> subprocess.CompletedProcess:
    """Fails for a unit above the threshold, in tenths."""
    words = ("--offline=yes", "--no-pager", f"--threshold={threshold}")
    return run("systemd-analyze", "security", *words, unit)


def test_systemd_accepts_the_unit(unit: Path) -> None:
    assert_accepted(unit)


def test_the_exposure_is_small(unit: Path) -> None:
    # In tenths: 3.0. A unit without any of the hardening has 9.2.
    checked = exposure(unit, 30)
    assert checked.returncode == 0, checked.stdout[-300:] + checked.stderr
    bare = unit.with_name("bare.service")
    bare.write_text("[Service]\nExecStart=/bin/true\n")
    checked = exposure(bare, 30)
    assert checked.returncode != 0, "the threshold is not looked at"


def test_stopping_may_take_as_long_as_the_server_drains() -> None:
    server = yaml.safe_load((ROOT / "deploy" / "dorad.yaml").read_text())["server"]
    drain = server["drain_timeout_seconds"] + server.get("drain_delay_seconds", 0)
    assert int(settings("Service")["TimeoutStopSec"][0]) >= drain + 20


def test_exit_codes_that_a_restart_does_not_help_are_the_servers() -> None:
    codes = settings("Service")["RestartPreventExitStatus"][0].split()
    usage = run(binary(), "serve", "--no-such-flag")
    config = run(binary(), "serve", "--config", "/no/such/file", "--model", "/no/such/folder")
    assert [str(usage.returncode), str(config.returncode)] == codes


def test_folders_that_it_writes_are_there_before_its_start_and_after_its_end() -> None:
    service = settings("Service")
    made = {
        path: (int(mode, 8), owners)
        for line in (FOLDER / "dorad.tmpfiles").read_text().splitlines()
        if line and not line.startswith("#")
        for _, path, mode, *owners in [line.split()]
    }
    owners = service["User"] + service["Group"]
    for kind, above in (("State", "/var/lib"), ("Runtime", "/run")):
        (name,) = service[f"{kind}Directory"]
        (mode,) = service[f"{kind}DirectoryMode"]
        assert made[f"{above}/{name}"] == (int(mode, 8), owners)
    # Or systemd would remove it when the service stops.
    assert service["RuntimeDirectoryPreserve"] == ["yes"]


def test_its_users_are_those_that_sysusers_makes(tmp_path) -> None:
    line = next(
        line for line in (FOLDER / "dorad.sysusers").read_text().splitlines() if line[:2] == "u "
    )
    user = line.split()[1]
    service = settings("Service")
    assert service["User"] == service["Group"] == [user]
    owners = set()
    for line in (FOLDER / "dorad.tmpfiles").read_text().splitlines():
        if line and not line.startswith("#"):
            kind, path, mode, *names = line.split()
            assert kind == "d" and path.startswith("/") and int(mode, 8) & 0o002 == 0, line
            owners |= set(names)
    assert owners == {"root", user}
    (tmp_path / "etc").mkdir()
    made = run("systemd-sysusers", "--dry-run", f"--root={tmp_path}", FOLDER / "dorad.sysusers")
    assert f"Creating user '{user}'" in made.stdout + made.stderr, made.stderr


# --- The gateway ----------------------------------------------------------------------------------

GATEWAY = FOLDER / "dorad-gateway.service"
PROGRAM = "/opt/dorad/gateway/bin/doractl"


@pytest.fixture
def gateway_unit(tmp_path) -> Path:
    """The unit as installed, but with this environment's program."""
    path = tmp_path / GATEWAY.name
    text = GATEWAY.read_text()
    assert text.count(f"={PROGRAM} gateway ") == 1
    path.write_text(text.replace(f"={PROGRAM} ", f"={Path(sys.executable).with_name('doractl')} "))
    return path


def test_systemd_accepts_the_gateways_unit(gateway_unit: Path) -> None:
    assert_accepted(gateway_unit)


def test_the_gateways_exposure_is_small(gateway_unit: Path) -> None:
    checked = exposure(gateway_unit, 20)
    assert checked.returncode == 0, checked.stdout[-300:] + checked.stderr


def test_stopping_the_gateway_may_take_as_long_as_it_drains() -> None:
    drain = inspect.signature(gateway_command).parameters["drain"].default
    assert int(settings("Service", GATEWAY)["TimeoutStopSec"][0]) >= drain + 20


def test_the_gateway_starts_by_what_its_unit_reads(fake, tmp_path) -> None:
    """The command line of the unit, with its variables as systemd fills them in."""
    (line,) = settings("Service", GATEWAY)["ExecStart"]
    variables = {
        "DORAD_TARGET": f"{fake.target} 127.0.0.1:1",
        "GATEWAY_OPTIONS": "--listen 127.0.0.1:0 --log-level warning",
    }
    documented = (ROOT / "docs" / "guides" / "deployment.md").read_text()
    assert all(f"{name}=" in documented for name in variables)
    program, *arguments = line.replace("$GATEWAY_OPTIONS", variables["GATEWAY_OPTIONS"]).split()
    assert program == PROGRAM
    with (tmp_path / "log").open("w+") as log:
        process = subprocess.Popen(
            [Path(sys.executable).with_name("doractl"), *arguments],
            env=environment(**variables),
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        )
        try:
            ready = READY.match(process.stdout.readline().strip())
            assert ready, (tmp_path / "log").read_text()
            assert httpx.get(f"http://{ready.group(1)}/health", timeout=30).status_code == 200
        finally:
            process.terminate()
            assert process.wait(60) == 0
            process.stdout.close()
