"""deploy/kubernetes: valid for Kubernetes, and in agreement with the server and with itself."""

import inspect
import re
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import kubernetes_validate
import pytest
import yaml
from dorad.cli.gateway import gateway as gateway_command
from grpc_health.v1 import health_pb2, health_pb2_grpc
from lib import gateway_api
from lib.server import ROOT, check_config, serve

FOLDER = ROOT / "deploy" / "kubernetes"
BASE = FOLDER / "base"
VERSION = "1.32"
SCHEMALESS = {"PodMonitor", "ScaledObject"}  # of operators


def documents(path: Path) -> list[dict]:
    return [item for item in yaml.safe_load_all(path.read_text()) if item is not None]


def manifests() -> list[Path]:
    return [path for path in sorted(FOLDER.rglob("*.yaml")) if "kind:" in path.read_text()]


EVERY_DOCUMENT = [
    (path.relative_to(FOLDER).as_posix(), item)
    for path in manifests()
    if path.name != "kustomization.yaml"
    for item in documents(path)
]
# test_kubernetes_fleet.py and test_kubernetes_inference.py are about these overlays.
OTHERS = ("overlays/fleet/", "overlays/inference/")
EVERYTHING = [(path, item) for path, item in EVERY_DOCUMENT if not path.startswith(OTHERS)]


def all_of(kind: str) -> dict[str, dict]:
    return {item["metadata"]["name"]: item for _, item in EVERYTHING if item["kind"] == kind}


def workloads() -> dict[str, dict]:
    return all_of("StatefulSet") | all_of("Deployment")


def server() -> dict:
    return all_of("StatefulSet")["dorad"]["spec"]


def container(workload: dict) -> dict:
    (only,) = workload["template"]["spec"]["containers"]
    return only


def server_config() -> dict:
    return yaml.safe_load((BASE / "dorad.yaml").read_text())


def port_number(workload: dict, name: str) -> int:
    return {port["name"]: port["containerPort"] for port in container(workload)["ports"]}[name]


@pytest.mark.parametrize(
    "item",
    [item for _, item in EVERY_DOCUMENT],
    ids=[f"{path}:{item['kind']}" for path, item in EVERY_DOCUMENT],
)
def test_kubernetes_takes_the_manifest(item: dict) -> None:
    if item["kind"] in gateway_api.KINDS:
        gateway_api.validate(item)
        return
    if item["kind"] in SCHEMALESS:
        assert item.keys() == {"apiVersion", "kind", "metadata", "spec"}
        return
    kubernetes_validate.validate(item, VERSION, strict=True)


def test_the_validation_is_strict() -> None:
    wrong = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": "x"},
        "spec": {"prots": []},
    }
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(wrong, VERSION, strict=True)


@pytest.mark.parametrize(
    "folder",
    [
        *("../nginx", "base", "gateway", "overlays/cpu", "overlays/fleet"),
        *("overlays/fleet-gateway", "overlays/inference"),
    ],
)
def test_kustomizations_name_files_that_are_there_and_leave_none_out(folder: str) -> None:
    root = (FOLDER / folder).resolve()
    (kustomization,) = documents(root / "kustomization.yaml")
    named = {"kustomization.yaml"} | set(kustomization.get("resources", []))
    for generator in kustomization.get("configMapGenerator", []):
        named |= set(generator["files"])
    for name in named:
        target = root / name
        assert target.is_file() or (target / "kustomization.yaml").is_file(), name
    here = {path.name for path in root.iterdir()} - {"dorad-servers.conf"}
    assert here <= named


# --- The server's configuration


@pytest.mark.parametrize(
    "path", sorted(FOLDER.rglob("dorad.yaml")), ids=lambda path: path.parent.name
)
def test_the_server_takes_the_configuration(path: Path, tmp_path: Path) -> None:
    check_config(path, tmp_path)


def in_bytes(size: str) -> int:
    number, unit = re.fullmatch(r"(\d+)([MG]i)B?", size).groups()
    return int(number) << {"Mi": 20, "Gi": 30}[unit]


def test_one_publisher_cannot_fill_the_memory_of_a_pod() -> None:
    """Uploads under way may be twice as large as an adapter; most is for the rest."""
    overlay = FOLDER / "overlays" / "cpu"
    (kustomization,) = documents(overlay / "kustomization.yaml")
    (patch,) = kustomization["patches"]
    (small,) = (
        change["value"]
        for change in yaml.safe_load(patch["patch"])
        if change["path"].endswith("/resources")
    )
    for config, resources in [
        (server_config(), container(server())["resources"]),
        (yaml.safe_load((overlay / "dorad.yaml").read_text()), small),
    ]:
        uploads = 2 * in_bytes(config["adapters"]["max_bytes"])
        assert uploads <= in_bytes(resources["limits"]["memory"]) / 4


def test_ports_are_those_of_the_configuration() -> None:
    config = server_config()["server"]
    assert config["grpc_listen"] == f"0.0.0.0:{port_number(server(), 'grpc')}"
    assert config["metrics_listen"] == f"0.0.0.0:{port_number(server(), 'metrics')}"


def test_paths_of_the_configuration_are_mounted() -> None:
    mounts = {mount["name"]: mount for mount in container(server())["volumeMounts"]}
    config = server_config()
    assert config["model"]["path"].startswith(mounts["models"]["mountPath"] + "/")
    assert config["adapters"]["store_path"].startswith(mounts["store"]["mountPath"] + "/")
    assert not mounts["store"].get("readOnly")
    arguments = container(server())["args"]
    assert arguments == ["serve", "--config", mounts["config"]["mountPath"]]


def test_the_probes_ask_for_services_that_the_server_has(zoo) -> None:
    probes = {
        kind: container(server())[kind]["grpc"]
        for kind in ("startupProbe", "livenessProbe", "readinessProbe")
    }
    assert {probe["port"] for probe in probes.values()} == {port_number(server(), "grpc")}
    with serve(zoo.model("llama2")) as running:
        stub = health_pb2_grpc.HealthStub(running.wire.channel)
        for probe in probes.values():
            request = health_pb2.HealthCheckRequest(service=probe["service"])
            answer = stub.Check(request, timeout=10)
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
        with pytest.raises(grpc.RpcError):
            stub.Check(health_pb2.HealthCheckRequest(service="no-such"), timeout=10)


def test_a_pod_may_take_as_long_to_end_as_the_server_drains() -> None:
    config = server_config()["server"]
    wait = config["drain_timeout_seconds"] + config.get("drain_delay_seconds", 0)
    hook = container(server()).get("lifecycle", {}).get("preStop")
    if hook is not None:
        program, seconds = hook["exec"]["command"]
        assert program == "sleep"
        wait += int(seconds)
    assert server()["template"]["spec"]["terminationGracePeriodSeconds"] >= wait + 20


def test_metrics_that_scaling_asks_for_are_exported(zoo) -> None:
    (metric,) = all_of("HorizontalPodAutoscaler")["dorad"]["spec"]["metrics"]
    (trigger,) = all_of("ScaledObject")["dorad"]["spec"]["triggers"]
    names = {metric["pods"]["metric"]["name"]}
    names |= set(re.findall(r"dorad_[a-z_]+", trigger["metadata"]["query"]))
    documented = (ROOT / "docs" / "reference" / "metrics.md").read_text()
    with serve(zoo.model("llama2")) as running:
        for name in names:
            assert f"`{name}`" in documented
            assert running.metric(name) == 0


# --- Among each other


def test_selectors_select_pods_that_there_are() -> None:
    labels = [
        workload["spec"]["template"]["metadata"]["labels"] for workload in workloads().values()
    ]

    def selects(selector: dict) -> bool:
        return any(selector.items() <= own.items() for own in labels)

    for workload in workloads().values():
        assert selects(workload["spec"]["selector"]["matchLabels"])
    for _, item in EVERYTHING:
        spec = item.get("spec", {})
        if item["kind"] == "Service" and "app.kubernetes.io/name" in spec["selector"]:
            assert selects(spec["selector"]), item["metadata"]["name"]
        # test_kubernetes_inference.py has the picker's.
        of_base = item["metadata"]["name"] != "dorad-picker"
        if item["kind"] in ("PodDisruptionBudget", "PodMonitor") and of_base:
            assert selects(spec["selector"]["matchLabels"]), item["metadata"]["name"]
        if item["kind"] == "NetworkPolicy" and "matchLabels" in spec["podSelector"]:
            assert selects(spec["podSelector"]["matchLabels"]), item["metadata"]["name"]


def test_named_ports_are_ports_of_pods() -> None:
    names = {
        port["name"]
        for workload in workloads().values()
        for port in container(workload["spec"])["ports"]
    }
    for service in all_of("Service").values():
        assert {port["targetPort"] for port in service["spec"]["ports"]} <= names
    for policy in all_of("NetworkPolicy").values():
        for rule in policy["spec"].get("ingress", []):
            assert {port["port"] for port in rule["ports"]} <= names
    (endpoint,) = all_of("PodMonitor")["dorad"]["spec"]["podMetricsEndpoints"]
    assert endpoint["port"] in names


def test_the_proxy_knows_each_pod_by_its_service() -> None:
    (kustomization,) = documents(BASE / "kustomization.yaml")
    lines = re.findall(
        r"^server (\S+):(\d+) max_fails=0;$", (BASE / "dorad-servers.conf").read_text(), re.M
    )
    pods = [f"dorad-{index}" for index in range(server()["replicas"])]
    assert [host for host, _ in lines] == [
        f"{pod}.{kustomization['namespace']}.svc.cluster.local" for pod in pods
    ]
    services = all_of("Service")
    for pod, (_, port) in zip(pods, lines, strict=True):
        spec = services[pod]["spec"]
        assert spec["selector"] == {"statefulset.kubernetes.io/pod-name": pod}
        assert [item["port"] for item in spec["ports"]] == [int(port)]
        assert int(port) == port_number(server(), "grpc")
    scaled = all_of("HorizontalPodAutoscaler")["dorad"]["spec"]
    assert scaled["scaleTargetRef"]["name"] in workloads()


def test_the_proxy_finds_its_files() -> None:
    proxy = workloads()["dorad-proxy"]["spec"]
    pod = proxy["template"]["spec"]
    mounts = {mount["name"]: mount["mountPath"] for mount in container(proxy)["volumeMounts"]}
    assert f"{mounts['config']}/nginx.conf" in container(proxy)["args"]
    text = (ROOT / "deploy" / "nginx" / "dorad.conf").read_text()
    certificates = set(re.findall(r"^\s*ssl_\w+ (/\S+);", text, re.M))
    assert {str(Path(path).parent) for path in certificates} == {mounts["tls"]}
    assert {Path(path).name for path in certificates} == {"tls.crt", "tls.key", "client-ca.crt"}
    listened = {int(port) for port in re.findall(r"^\s*listen (\d+) ", text, re.M)}
    assert listened == {port["containerPort"] for port in container(proxy)["ports"]}
    assert min(listened) < 1024 and pod["securityContext"]["sysctls"]


def test_volumes_are_of_things_that_there_are() -> None:
    generated = {
        generator["name"]
        for folder in (BASE, ROOT / "deploy" / "nginx")
        for generator in documents(folder / "kustomization.yaml")[0]["configMapGenerator"]
    }
    to_be_made = (ROOT / "docs" / "guides" / "deployment.md").read_text()
    for workload in workloads().values():
        spec = workload["spec"]
        claims = {claim["metadata"]["name"] for claim in spec.get("volumeClaimTemplates", [])}
        volumes = {volume["name"]: volume for volume in spec["template"]["spec"]["volumes"]}
        assert {m["name"] for m in container(spec)["volumeMounts"]} == volumes.keys() | claims
        text = yaml.safe_dump(list(volumes.values()))
        for volume in volumes.values():
            for source in [volume, *volume.get("projected", {}).get("sources", [])]:
                if "configMap" in source:
                    assert source["configMap"]["name"] in generated
                if "secret" in source:
                    name = source["secret"].get("secretName") or source["secret"]["name"]
                    assert f"`{name}`" in to_be_made, text
                if "persistentVolumeClaim" in source:
                    assert f"`{source['persistentVolumeClaim']['claimName']}`" in to_be_made


@pytest.mark.parametrize("name", ["dorad", "dorad-proxy", "dorad-gateway"])
def test_pods_have_no_rights_that_they_do_not_need(name: str) -> None:
    pod = workloads()[name]["spec"]["template"]["spec"]
    assert pod["automountServiceAccountToken"] is False
    # A Service called dorad would put DORAD_... into the environment.
    assert pod["enableServiceLinks"] is False
    context = pod["securityContext"]
    assert context["runAsNonRoot"] and context["runAsUser"] > 1000
    assert context["seccompProfile"] == {"type": "RuntimeDefault"}
    own = container(workloads()[name]["spec"])["securityContext"]
    assert own["readOnlyRootFilesystem"] and own["allowPrivilegeEscalation"] is False
    assert own["capabilities"] == {"drop": ["ALL"]}
    assert not any(pod.get(key) for key in ("hostNetwork", "hostPID", "hostIPC"))
    assert not any("hostPath" in volume for volume in pod["volumes"])


def test_what_is_not_allowed_is_refused_on_the_network() -> None:
    policies = all_of("NetworkPolicy")
    everything = policies["dorad-default"]["spec"]
    assert everything == {"podSelector": {}, "policyTypes": ["Ingress", "Egress"]}
    # Any pod may call the proxy; the server's ports have a list.
    assert all("from" in rule for rule in policies["dorad-server"]["spec"]["ingress"])
    assert "egress" not in policies["dorad-server"]["spec"]


@dataclass
class Pod:
    """One end of a connection; `ports` are those that have names."""

    labels: dict[str, str]
    namespace: str = "dorad"
    ports: dict[str, int] = field(default_factory=dict)


def pod_of(workload: str) -> Pod:
    spec = workloads()[workload]["spec"]
    ports = {port["name"]: port["containerPort"] for port in container(spec)["ports"]}
    return Pod(spec["template"]["metadata"]["labels"], ports=ports)


DNS = Pod({"k8s-app": "kube-dns"}, "kube-system")
PROMETHEUS = Pod({}, "monitoring")
ELSEWHERE = Pod({}, "default")


def caller(role: str, namespace: str = "dorad") -> Pod:
    return Pod({"dorad/role": role}, namespace)


def selected(selector: dict, labels: dict[str, str]) -> bool:
    assert selector.keys() <= {"matchLabels", "matchExpressions"}
    for expression in selector.get("matchExpressions", []):
        assert expression["operator"] == "In"
        if labels.get(expression["key"]) not in expression["values"]:
            return False
    return selector.get("matchLabels", {}).items() <= labels.items()


def admits(direction: str, own: Pod, other: Pod, port: int, ports: dict[str, int]) -> bool:
    """Whether `own` may have the connection; `ports` are the names of its target's ports."""
    (kustomization,) = documents(BASE / "kustomization.yaml")
    policies = [
        policy["spec"]
        for policy in all_of("NetworkPolicy").values()
        if direction in policy["spec"]["policyTypes"]
        and own.namespace == kustomization["namespace"]
        and selected(policy["spec"]["podSelector"], own.labels)
    ]

    def is_peer(peer: dict) -> bool:
        assert peer.keys() <= {"podSelector", "namespaceSelector"}
        if "namespaceSelector" in peer:
            labels = {"kubernetes.io/metadata.name": other.namespace}
            if not selected(peer["namespaceSelector"], labels):
                return False
        elif own.namespace != other.namespace:
            return False
        return selected(peer.get("podSelector", {}), other.labels)

    def allows(rule: dict) -> bool:
        peers = rule.get("from" if direction == "Ingress" else "to")
        if peers is not None and not any(map(is_peer, peers)):
            return False
        return port in {ports.get(entry["port"], entry["port"]) for entry in rule["ports"]}

    return not policies or any(
        allows(rule) for policy in policies for rule in policy.get(direction.lower(), [])
    )


def reaches(source: Pod, target: Pod, port: int) -> bool:
    return admits("Egress", source, target, port, target.ports) and admits(
        "Ingress", target, source, port, target.ports
    )


@pytest.mark.parametrize("namespace", ["dorad", "training"])
@pytest.mark.parametrize("role", ["trainer", "gateway"])
def test_trainers_and_gateways_reach_the_servers_and_names(role: str, namespace: str) -> None:
    pod, target = caller(role, namespace), pod_of("dorad")
    assert reaches(pod, target, target.ports["grpc"])
    assert not reaches(pod, target, target.ports["metrics"])
    assert reaches(pod, DNS, 53)
    assert f"`dorad/role: {role}`" in (ROOT / "docs" / "guides" / "deployment.md").read_text()


def test_nobody_else_reaches_the_servers() -> None:
    target = pod_of("dorad")
    grpc_port, metrics_port = target.ports["grpc"], target.ports["metrics"]
    assert reaches(pod_of("dorad-proxy"), target, grpc_port)
    assert reaches(PROMETHEUS, target, metrics_port)
    for pod in (Pod({}), caller("worker"), ELSEWHERE, PROMETHEUS, target):
        assert not reaches(pod, target, grpc_port), pod
    for pod in (Pod({}), ELSEWHERE, pod_of("dorad-proxy")):
        assert not reaches(pod, target, metrics_port), pod


def test_pods_of_the_namespace_reach_nothing_that_they_do_not_need() -> None:
    proxy = pod_of("dorad-proxy")
    for pod in (pod_of("dorad"), proxy, caller("trainer"), caller("gateway")):
        assert not reaches(pod, ELSEWHERE, 443), pod
        assert not reaches(pod, caller("gateway"), 8000), pod
    assert not reaches(pod_of("dorad"), DNS, 53)
    assert reaches(ELSEWHERE, proxy, proxy.ports["public"])
    gateway = pod_of("dorad-gateway")
    assert reaches(ELSEWHERE, gateway, gateway.ports["http"])
    assert reaches(PROMETHEUS, gateway, gateway.ports["http"])
    assert reaches(gateway, pod_of("dorad"), pod_of("dorad").ports["grpc"])
    assert not reaches(gateway, ELSEWHERE, 443)
    assert reaches(proxy, DNS, 53)


# --- The gateway


def test_the_gateway_is_a_pool_of_all_servers() -> None:
    spec = workloads()["dorad-gateway"]["spec"]
    environment = {item["name"]: item["value"] for item in container(spec)["env"]}
    (kustomization,) = documents(FOLDER / "gateway" / "kustomization.yaml")
    services = f"{server()['serviceName']}.{kustomization['namespace']}"
    assert environment["DORAD_TARGET"].split() == [
        f"dorad-{index}.{services}:{port_number(server(), 'grpc')}"
        for index in range(server()["replicas"])
    ]
    mounts = {mount["mountPath"] for mount in container(spec)["volumeMounts"]}
    assert str(Path(environment["DORAD_MODEL"]).parent) in mounts


def test_a_gateway_may_take_as_long_to_end_as_it_drains() -> None:
    pod = workloads()["dorad-gateway"]["spec"]["template"]["spec"]
    _, wait = container(workloads()["dorad-gateway"]["spec"])["lifecycle"]["preStop"]["exec"][
        "command"
    ]
    drain = inspect.signature(gateway_command).parameters["drain"].default
    assert pod["terminationGracePeriodSeconds"] >= int(wait) + drain + 20


# --- With Prometheus


def test_the_job_is_the_one_that_the_alerts_ask_for() -> None:
    jobs = set()
    for name in ("dorad", "dorad-gateway"):
        monitor = all_of("PodMonitor")[name]["spec"]
        assert selected(monitor["selector"], pod_of(name).labels)
        (endpoint,) = monitor["podMetricsEndpoints"]
        assert endpoint["port"] in pod_of(name).ports
        jobs.add(pod_of(name).labels[monitor["jobLabel"]])
    alerts = (ROOT / "deploy" / "prometheus" / "alerts.yml").read_text()
    assert set(re.findall(r'\bjob="([^"]*)"', alerts)) == jobs | {"dorad-picker"}
