"""deploy/kubernetes/overlays/inference, in agreement with the fleet, the picker and the gateway."""

import inspect
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml
from dorad.cli.endpoint_picker import endpoint_picker
from lib import gateway_api
from lib.kustomize import render
from lib.server import ROOT

MONITORING = ROOT / "deploy" / "kubernetes" / "monitoring"
FOLDER = ROOT / "deploy" / "kubernetes" / "overlays" / "inference"
VERSION = "1.32"
SERVERS = {"app.kubernetes.io/name": "dorad", "app.kubernetes.io/component": "server"}
PICKERS = {"app.kubernetes.io/name": "dorad-picker", "app.kubernetes.io/component": "picker"}


@pytest.fixture(scope="module")
def rendered() -> list[dict]:
    return render(FOLDER)


@pytest.fixture
def named(rendered):
    def find(kind: str, name: str) -> dict[str, Any]:
        (found,) = (
            item for item in rendered if item["kind"] == kind and item["metadata"]["name"] == name
        )
        return found

    return find


def containers(workload: dict) -> dict[str, dict]:
    return {each["name"]: each for each in workload["spec"]["template"]["spec"]["containers"]}


def port_of(container: dict, name: str) -> int:
    return {port["name"]: port["containerPort"] for port in container["ports"]}[name]


def options(container: dict) -> dict[str, str]:
    words = [word.removeprefix("--") for word in container["args"]]
    return dict(word.partition("=")[::2] for word in words)


def test_kubernetes_takes_all_of_it(rendered) -> None:
    for item in rendered:
        if item["kind"] in gateway_api.KINDS:
            gateway_api.validate(item)
        else:
            kubernetes_validate.validate(item, VERSION, strict=True)


def test_the_validation_is_strict(named) -> None:
    pool = named("InferencePool", "dorad")
    for wrong in ({"targetPortNumber": 8000}, {"targetPorts": []}):
        with pytest.raises(jsonschema.ValidationError):
            gateway_api.validate(pool | {"spec": pool["spec"] | wrong})


def test_the_pool_is_of_the_servers_and_their_gateways(named) -> None:
    pool = named("InferencePool", "dorad")["spec"]
    servers = named("StatefulSet", "dorad")
    assert pool["selector"]["matchLabels"] == SERVERS
    assert SERVERS.items() <= servers["spec"]["template"]["metadata"]["labels"].items()
    gateway, server = containers(servers)["gateway"], containers(servers)["dorad"]
    (target,) = pool["targetPorts"]
    assert target["number"] == port_of(gateway, "http")
    environment = {item["name"]: item["value"] for item in gateway["env"]}
    assert environment["DORAD_TARGET"] == f"127.0.0.1:{port_of(server, 'grpc')}"
    assert gateway["image"] == "registry.example.com/dorad-gateway:0.1.0"
    mounts = {mount["mountPath"] for mount in gateway["volumeMounts"]}
    assert environment["DORAD_MODEL"].rpartition("/")[0] in mounts
    grace = servers["spec"]["template"]["spec"]["terminationGracePeriodSeconds"]
    assert int(gateway["args"][gateway["args"].index("--drain") + 1]) < grace
    (rule,) = named("HTTPRoute", "dorad-inference")["spec"]["rules"]
    (backend,) = rule["backendRefs"]
    assert (backend["kind"], backend["name"]) == ("InferencePool", "dorad")
    (parent,) = named("HTTPRoute", "dorad-inference")["spec"]["parentRefs"]
    assert named("Gateway", parent["name"])


def test_the_pool_finds_its_picker(named) -> None:
    picker = named("Deployment", "dorad-picker")
    container = containers(picker)["picker"]
    reference = named("InferencePool", "dorad")["spec"]["endpointPickerRef"]
    (port,) = named("Service", reference["name"])["spec"]["ports"]
    assert reference["port"]["number"] == port["port"]
    assert port["targetPort"] == "ext-proc"
    assert options(container)["listen"] == f"0.0.0.0:{port_of(container, 'ext-proc')}"
    assert options(container)["metrics-listen"] == f"0.0.0.0:{port_of(container, 'metrics')}"
    gateway = containers(named("StatefulSet", "dorad"))["gateway"]
    assert int(options(container)["endpoint-port"]) == port_of(gateway, "http")
    known = {name.replace("_", "-") for name in inspect.signature(endpoint_picker).parameters}
    assert options(container).keys() <= known
    spec = picker["spec"]["template"]["spec"]
    assert int(options(container)["drain"]) < spec["terminationGracePeriodSeconds"]
    timeout = named("HTTPRoute", "dorad-inference")["spec"]["rules"][0]["timeouts"]["request"]
    assert int(options(container)["drain"]) >= int(timeout.removesuffix("s"))


def test_the_picker_may_read_the_manifest(named) -> None:
    picker = named("Deployment", "dorad-picker")
    (entry,) = containers(picker)["picker"]["env"]
    assert entry["name"] == "DORAD_FLEET"
    kind, _, manifest = entry["value"].partition(":")
    assert kind == "configmap" and named("ConfigMap", manifest)
    # test_kubernetes_fleet.py has its rights.
    pod = picker["spec"]["template"]["spec"]
    assert pod["serviceAccountName"] == "dorad-fleet-reader"
    assert named("ServiceAccount", "dorad-fleet-reader")


def test_proxies_reach_pickers_and_pods_and_pickers_the_servers(named) -> None:
    picker = named("Deployment", "dorad-picker")["spec"]["template"]
    assert PICKERS.items() <= picker["metadata"]["labels"].items()
    policy = named("NetworkPolicy", "dorad-picker")["spec"]
    assert policy["podSelector"]["matchLabels"] == PICKERS
    proxies, prometheus = policy["ingress"]
    assert proxies == {"ports": [{"port": "ext-proc"}]}
    (server,) = (
        rule
        for rule in named("NetworkPolicy", "dorad-server")["spec"]["ingress"]
        if rule["ports"] == [{"port": "metrics"}]
    )
    assert prometheus == server
    http = named("NetworkPolicy", "dorad-server-http")["spec"]
    assert http["podSelector"]["matchLabels"] == SERVERS
    assert http["ingress"] == [{"ports": [{"port": "http"}]}]
    # As a gateway: the servers, DNS and the API server.
    assert picker["metadata"]["labels"]["dorad/role"] == "gateway"
    budget = named("PodDisruptionBudget", "dorad-picker")["spec"]
    assert budget["selector"]["matchLabels"] == PICKERS


def test_prometheus_finds_the_picker(named) -> None:
    monitors = yaml.safe_load_all((MONITORING / "pod-monitor.yaml").read_text())
    (monitor,) = (each["spec"] for each in monitors if each["metadata"]["name"] == "dorad-picker")
    picker = named("Deployment", "dorad-picker")
    labels = picker["spec"]["template"]["metadata"]["labels"]
    assert monitor["selector"]["matchLabels"] == PICKERS
    assert labels[monitor["jobLabel"]] == "dorad-picker"
    (endpoint,) = monitor["podMetricsEndpoints"]
    assert port_of(containers(picker)["picker"], endpoint["port"])


def test_no_container_has_rights_that_it_does_not_need(named) -> None:
    for workload in (named("StatefulSet", "dorad"), named("Deployment", "dorad-picker")):
        pod = workload["spec"]["template"]["spec"]
        assert pod["enableServiceLinks"] is False
        assert pod["securityContext"]["runAsNonRoot"]
        for container in pod["containers"]:
            own = container["securityContext"]
            assert own["readOnlyRootFilesystem"] and own["allowPrivilegeEscalation"] is False
            assert own["capabilities"] == {"drop": ["ALL"]}


def test_the_guide_names_what_is_to_be_made() -> None:
    guide = (ROOT / "docs" / "guides" / "fleet.md").read_text()
    assert "`dorad-picker-tls`" in guide and "overlays/inference" in guide
