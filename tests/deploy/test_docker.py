"""deploy/docker: what the images are made of is there, and fits (tests cannot build images)."""

import json
import re
import shlex
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml
from lib.server import ROOT, check_config

FOLDER = ROOT / "deploy" / "docker"


def instructions() -> list[tuple[str, str]]:
    """(NAME, the rest) of each instruction; continued lines are joined."""
    text = (FOLDER / "Dockerfile").read_text()
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    joined = "\n".join(lines).replace("\\\n", " ")
    return [
        (line.split()[0], line.split(maxsplit=1)[1]) for line in joined.splitlines() if line.strip()
    ]


def stages() -> dict[str, list[tuple[str, str]]]:
    found, current = {}, "head"
    for name, rest in instructions():
        if name == "FROM":
            current = rest.split()[2]
        found.setdefault(current, []).append((name, rest))
    return found


def values(stage: str, name: str) -> list[str]:
    return [rest for kind, rest in stages()[stage] if kind == name]


def ignored() -> list[str]:
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    return [line for line in lines if line and not line.startswith("#")]


def compose() -> dict:
    return yaml.safe_load((FOLDER / "compose.yaml").read_text())


def test_stages_and_instructions_are_known() -> None:
    assert list(stages()) == ["head", "build", "packages", "server", "proxy", "gateway"]
    known = {"ARG", "FROM", "WORKDIR", "COPY", "RUN", "ENV", "USER", "VOLUME", "EXPOSE"}
    known |= {"STOPSIGNAL", "HEALTHCHECK", "ENTRYPOINT", "CMD"}
    assert {name for name, _ in instructions()} <= known


def test_it_builds_by_the_documented_commands() -> None:
    make = values("build", "RUN")
    assert make == ["make setup", "make wheel"]
    targets = re.findall(r"^(\w[\w-]*):.*##", (ROOT / "Makefile").read_text(), re.M)
    assert {command.split()[1] for command in make} <= set(targets)


def test_it_installs_the_packages_of_make_wheel() -> None:
    (folder,) = values("build", "WORKDIR")
    assert f"--from=build {folder}/dist /dist" in values("packages", "COPY")
    install = values("packages", "RUN")[-1]
    wheels = set(re.findall(r"/dist/([\w-]+)-\*\.whl", install))
    assert wheels == {"dorad", "dorad_server"}
    extras = tomllib.loads((ROOT / "client" / "pyproject.toml").read_text())["project"]
    named = re.search(r"\*\.whl\)\[([\w,]+)\]", install)
    assert named and set(named[1].split(",")) <= set(extras["optional-dependencies"])
    # What was installed is copied to the same place, to which its scripts refer.
    assert values("server", "COPY") == ["--from=packages /opt/venv /opt/venv"]
    assert json.loads(values("server", "ENTRYPOINT")[0]) == ["/opt/venv/bin/dorad"]
    assert "/opt/venv" in install and "pip uninstall -y pip" in install


def test_make_image_without_docker_says_so(tmp_path: Path) -> None:
    for name in ("bash", "dirname", "mkdir"):
        (tmp_path / name).symlink_to(f"/bin/{name}")
    script = ROOT / "tools" / "image.sh"
    run = subprocess.run(
        ["/bin/bash", script], env={"PATH": str(tmp_path)}, capture_output=True, text=True
    )
    assert run.returncode == 1 and run.stderr.startswith("dorad: docker is needed"), run.stderr


def test_setup_needs_no_more_than_what_is_copied_before_it() -> None:
    """Or the slow layer would fail, or be made anew by every change."""
    before = []
    for name, rest in stages()["build"]:
        if (name, rest) == ("RUN", "make setup"):
            break
        if name == "COPY":
            before += rest.split()[:-1]
    scripts = (ROOT / "tools" / "setup.sh").read_text() + (ROOT / "tools" / "lib.sh").read_text()
    needed = set(re.findall(r"\b(?:tools/[\w.-]+|requirements\.txt|constraints\.txt)", scripts))
    assert needed
    for path in needed:
        assert path.split("/")[0] in before, path


def test_what_is_copied_is_there_and_not_ignored() -> None:
    for stage in ("build", "proxy"):
        for rest in values(stage, "COPY"):
            for source in rest.split()[:-1]:
                assert (ROOT / source).exists(), source
                assert source not in ignored()
    assert {".git", ".venv", "build*", ".cache"} <= set(ignored())


def test_distributions_are_supported_and_the_same() -> None:
    arguments = dict(rest.split("=", 1) for _, rest in stages()["head"])
    build, run = arguments["BUILD_BASE"], arguments["RUN_BASE"]
    match = re.fullmatch(r"nvidia/cuda:([\d.]+)-devel-(ubuntu)(\d+\.\d+)", build)
    assert match and run == f"{match[2]}:{match[3]}"
    setup = (ROOT / "tools" / "setup.sh").read_text()
    assert f'{match[2]}) version_at_least "$version" {match[3]}' in setup
    # The CUDA of the toolkit is that of torch's libraries, which the program is linked with too.
    torch_cuda = re.search(r"^cuda-toolkit==(\S+)$", (ROOT / "constraints.txt").read_text(), re.M)
    assert torch_cuda and match[1] == torch_cuda[1]


def test_the_server_runs_as_nobody_special_and_as_kubernetes_says() -> None:
    path = ROOT / "deploy" / "kubernetes" / "base"
    for stage, manifest in (
        ("server", "server.yaml"),
        ("proxy", "proxy.yaml"),
        ("gateway", "../gateway/gateway.yaml"),
    ):
        (user,) = values(stage, "USER")
        (pod,) = [
            item["spec"]["template"]["spec"]
            for item in yaml.safe_load_all((path / manifest).read_text())
            if item["kind"] in ("StatefulSet", "Deployment")
        ]
        context = pod["securityContext"]
        assert user == f"{context['runAsUser']}:{context['runAsGroup']}"
        ports = {str(port["containerPort"]) for port in pod["containers"][0]["ports"]}
        assert set(values(stage, "EXPOSE")[0].split()) == ports
        entry = json.loads(values(stage, "CMD")[0])
        assert pod["containers"][0]["args"] == entry


def test_the_health_check_asks_what_the_server_answers() -> None:
    (check,) = values("server", "HEALTHCHECK")
    command = json.loads(check[check.index("[") :])
    assert command[0] == "curl" and "curl" in values("server", "RUN")[0]
    config = yaml.safe_load((FOLDER / "dorad.yaml").read_text())
    port = config["server"]["metrics_listen"].rpartition(":")[2]
    assert command[-1] == f"http://127.0.0.1:{port}/healthz"
    assert "/healthz" in (ROOT / "docs" / "reference" / "metrics.md").read_text()


def test_every_shell_line_parses() -> None:
    for stage in stages():
        if stage != "head":
            for line in values(stage, "RUN"):
                run = subprocess.run(["bash", "-n", "-c", line], capture_output=True, text=True)
                assert run.returncode == 0, run.stderr
                assert shlex.split(line)


def test_the_server_takes_the_configuration(tmp_path: Path) -> None:
    check_config(FOLDER / "dorad.yaml", tmp_path)


def test_compose_fits_the_image_and_the_configuration() -> None:
    service = compose()["services"]["dorad"]
    build = service["build"]
    assert (FOLDER / build["context"]).resolve() == ROOT
    assert (ROOT / build["dockerfile"]).is_file() and build["target"] in stages()
    config = yaml.safe_load((FOLDER / "dorad.yaml").read_text())
    mounts = dict(volume.rsplit(":", 1)[0].rsplit(":", 1) if volume.endswith(":ro")
                  else volume.rsplit(":", 1) for volume in service["volumes"])  # fmt: skip
    assert mounts["./dorad.yaml"] == json.loads(values("server", "CMD")[0])[-1]
    assert config["model"]["path"] in mounts.values()
    assert config["adapters"]["store_path"].startswith(mounts["store"] + "/")
    ports = {config["server"][key].rpartition(":")[2] for key in ("grpc_listen", "metrics_listen")}
    assert set(service["ports"]) == {f"127.0.0.1:{port}:{port}" for port in ports}
    drain = yaml.safe_load((ROOT / "deploy" / "dorad.yaml").read_text())["server"]
    wait = drain["drain_timeout_seconds"] + drain.get("drain_delay_seconds", 0)
    assert int(service["stop_grace_period"].removesuffix("s")) >= wait + 20


def test_the_gateway_of_compose_reaches_the_server_and_has_its_model() -> None:
    gateway, server = compose()["services"]["gateway"], compose()["services"]["dorad"]
    assert gateway["build"]["target"] in stages()
    config = yaml.safe_load((FOLDER / "dorad.yaml").read_text())
    port = config["server"]["grpc_listen"].rpartition(":")[2]
    assert gateway["environment"] == {
        "DORAD_TARGET": f"dorad:{port}",
        "DORAD_MODEL": config["model"]["path"],
    }
    assert set(gateway["volumes"]) < set(server["volumes"])
    listened = json.loads(values("gateway", "CMD")[0])[1].rpartition(":")[2]
    assert gateway["ports"] == [f"127.0.0.1:{listened}:{listened}"]


@pytest.mark.parametrize("name", ["dorad", "gateway", "prometheus"])
def test_compose_publishes_on_the_loopback_only(name: str) -> None:
    assert all(port.startswith("127.0.0.1:") for port in compose()["services"][name]["ports"])


def test_prometheus_scrapes_the_server() -> None:
    scrape = yaml.safe_load((FOLDER / "prometheus.yml").read_text())["scrape_configs"]
    (gateway,) = scrape[1]["static_configs"][0]["targets"]
    assert gateway == f"gateway:{values('gateway', 'EXPOSE')[0]}"
    (target,) = scrape[0]["static_configs"][0]["targets"]
    host, port = target.split(":")
    config = yaml.safe_load((FOLDER / "dorad.yaml").read_text())
    assert host in compose()["services"] and config["server"]["metrics_listen"].endswith(port)
