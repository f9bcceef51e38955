"""deploy/kubernetes/overlays/fleet, in agreement with the base, the server and the client."""

import json
import subprocess
from pathlib import Path

import kubernetes_validate
import pytest
import yaml
from dorad.fleet.config_map import ConfigMap
from lib.kustomize import render
from lib.server import ROOT, binary, serve

FOLDER = ROOT / "deploy" / "kubernetes" / "overlays" / "fleet"
BASE = ROOT / "deploy" / "kubernetes" / "base"
SERVERS = {"app.kubernetes.io/name": "dorad", "app.kubernetes.io/component": "server"}


READER = "dorad-fleet-reader"


def named(path: Path, kind: str, name: str) -> dict:
    (found,) = (
        item
        for item in yaml.safe_load_all(path.read_text())
        if item["kind"] == kind and item["metadata"]["name"] == name
    )
    return found


@pytest.fixture(scope="module")
def rendered() -> list[dict]:
    return render(FOLDER)


def patches() -> list[dict]:
    kustomization = yaml.safe_load((FOLDER / "kustomization.yaml").read_text())
    (patch,) = (
        patch["patch"]
        for patch in kustomization["patches"]
        if patch["target"] == {"kind": "StatefulSet", "name": "dorad"}
    )
    return yaml.safe_load(patch)


def added() -> list[str]:
    """The arguments of the server that the overlay adds."""
    return [change["value"] for change in patches() if change["path"].endswith("/args/-")]


def test_the_server_takes_the_configuration(tmp_path: Path) -> None:
    line = [binary(), "check-config", BASE / "dorad.yaml", *added()]
    line += ["--set", "model.path=", "--set", f"adapters.store_path={tmp_path}/store"]
    run = subprocess.run(line, capture_output=True, text=True, timeout=60)
    assert run.returncode == 0, run.stderr
    assert any(word.startswith("--set=peers.allowed=") for word in added())


def autoscaler() -> dict:
    path = FOLDER / "horizontal-pod-autoscaler.yaml"
    return named(path, "HorizontalPodAutoscaler", "dorad-fleet")["spec"]


def test_metrics_that_scaling_asks_for_are_exported(zoo) -> None:
    with serve(zoo.model("llama2"), settings={"metrics.vllm_aliases": True}) as running:
        for metric in autoscaler()["metrics"]:
            assert running.metric(metric["pods"]["metric"]["name"]) == 0
    assert "--set=metrics.vllm_aliases=true" in added()


def test_the_fewest_servers_without_an_evicted_one_are_more_than_half_of_the_members() -> None:
    scaling = autoscaler()
    budget = named(BASE / "server.yaml", "PodDisruptionBudget", "dorad")["spec"]
    assert budget["selector"]["matchLabels"] == SERVERS
    left = scaling["minReplicas"] - budget["maxUnavailable"]
    assert 2 * left > scaling["maxReplicas"]
    assert scaling["scaleTargetRef"] == {
        "apiVersion": "apps/v1",
        "kind": "StatefulSet",
        "name": "dorad",
    }
    assert {"op": "remove", "path": "/spec/replicas"} in patches()
    # The members that the guide names.
    guide = (ROOT / "docs" / "guides" / "fleet.md").read_text()
    service = named(BASE / "server-services.yaml", "Service", "dorad-servers")
    assert service["spec"]["clusterIP"] == "None"
    assert f"for n in range({scaling['maxReplicas']})" in guide
    assert "dorad-{n}.dorad-servers" in guide


def test_servers_reach_servers_and_trainers_the_manifest() -> None:
    peers = named(FOLDER / "network-policies.yaml", "NetworkPolicy", "dorad-peers")["spec"]
    assert peers["podSelector"]["matchLabels"] == SERVERS
    (incoming,) = peers["ingress"]
    assert incoming == {
        "from": [{"podSelector": {"matchLabels": SERVERS}}],
        "ports": [{"port": "grpc"}],
    }
    to_servers, to_names = peers["egress"]
    assert to_servers["to"] == [{"podSelector": {"matchLabels": SERVERS}}]
    assert [port["port"] for port in to_servers["ports"]] == [50051]
    assert {port["port"] for port in to_names["ports"]} == {53}
    manifest = named(FOLDER / "network-policies.yaml", "NetworkPolicy", "dorad-manifest")["spec"]
    (expression,) = manifest["podSelector"]["matchExpressions"]
    assert expression["values"] == ["trainer", "gateway"]
    assert manifest["policyTypes"] == ["Egress"]


def test_the_proxys_servers_are_those_of_the_manifest(rendered) -> None:
    (proxy,) = (item for item in rendered if item["kind"] == "Deployment")
    pod = proxy["spec"]["template"]["spec"]
    nginx, servers = pod["containers"]
    (files,) = pod["initContainers"]
    assert servers["image"] == "registry.example.com/dorad-gateway:0.1.0"
    assert files["image"] == nginx["image"]
    assert servers["command"][1:] == ["fleet", "proxy"]
    manifest, written, pid = servers["args"]
    assert manifest == "configmap:dorad-fleet"
    where = {mount["mountPath"]: mount["name"] for mount in servers["volumeMounts"]}
    theirs = {mount["mountPath"]: mount["name"] for mount in nginx["volumeMounts"]}
    for path in (written, pid.removeprefix("--pid-file=")):
        folder = path.rpartition("/")[0]
        assert where[folder] == theirs[folder] and not path.startswith("/config")
    assert f"pid {pid.removeprefix('--pid-file=')};" in " ".join(nginx["args"])
    assert pid.removeprefix("--pid-file=") in " ".join(
        nginx["lifecycle"]["preStop"]["exec"]["command"]
    )
    assert pod["shareProcessNamespace"] and pod["automountServiceAccountToken"]
    assert pod["serviceAccountName"] == READER
    policy = named(FOLDER / "network-policies.yaml", "NetworkPolicy", "dorad-proxy-manifest")
    labels = proxy["spec"]["template"]["metadata"]["labels"]
    assert policy["spec"]["podSelector"]["matchLabels"].items() <= labels.items()


def test_readers_may_read_the_manifest_and_nothing_else() -> None:
    path = FOLDER / "reader.yaml"
    (rule,) = named(path, "Role", READER)["rules"]
    assert (rule["resources"], rule["resourceNames"], rule["verbs"]) == (
        ["configmaps"], ["dorad-fleet"], ["get"],
    )  # fmt: skip
    (subject,) = named(path, "RoleBinding", READER)["subjects"]
    assert subject["name"] == READER and named(path, "ServiceAccount", READER)


def test_a_gateway_over_the_fleet_has_no_other_servers() -> None:
    for item in render(FOLDER.parent / "fleet-gateway"):
        kubernetes_validate.validate(item, "1.32", strict=True)
        if item["kind"] == "Deployment":
            pod = item["spec"]["template"]["spec"]
            environment = {entry["name"]: entry["value"] for entry in pod["containers"][0]["env"]}
            assert environment["DORAD_FLEET"] == "configmap:dorad-fleet"
            assert "DORAD_TARGET" not in environment
            assert pod["serviceAccountName"] == READER and pod["automountServiceAccountToken"]
            assert item["spec"]["template"]["metadata"]["labels"]["dorad/role"] == "gateway"


def test_the_account_has_the_rights_that_the_manifest_needs_and_no_others() -> None:
    path = FOLDER / "manifest.yaml"
    (rule,) = named(path, "Role", "dorad-fleet")["rules"]
    config_map = named(path, "ConfigMap", "dorad-fleet")
    # Data here would take the fleet's place when it is applied again.
    assert config_map.keys() == {"apiVersion", "kind", "metadata"}
    assert rule == {
        "apiGroups": [""],
        "resources": ["configmaps"],
        "resourceNames": [config_map["metadata"]["name"]],
        "verbs": ["get", "update"],
    }
    binding = named(path, "RoleBinding", "dorad-fleet")
    account = named(path, "ServiceAccount", "dorad-fleet")
    assert [subject["name"] for subject in binding["subjects"]] == [account["metadata"]["name"]]
    assert "get and update" in " ".join(ConfigMap.__doc__.split())


def test_kustomize_renders_it(rendered) -> None:
    for item in rendered:
        kubernetes_validate.validate(item, "1.32", strict=True)
    (server,) = (item for item in rendered if item["kind"] == "StatefulSet")
    assert "replicas" not in server["spec"], json.dumps(server["spec"])
    (container,) = server["spec"]["template"]["spec"]["containers"]
    assert container["args"] == ["serve", "--config", "/etc/dorad/dorad.yaml", *added()]
