"""What is shipped for Prometheus and Grafana, against the real Prometheus and a server at work."""

import contextlib
import re
import runpy
import subprocess
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
import yaml
from lib import dashboard
from lib.ext_proc import Picker, completion, pick, picking
from lib.gateway import RunningGateway, running_gateway
from lib.prometheus import Prometheus, finite, prometheus, target_of, write_config
from lib.server import ROOT, device, serve
from lib.tiny_models import CONTEXT, VOCAB
from lib.traffic import settings, traffic

DEPLOY = ROOT / "deploy" / "prometheus"
ALERTS = DEPLOY / "alerts.yml"
ALERTS_TEST = DEPLOY / "alerts_test.yml"
# A scrape a second: enough of them in a window for rates.
WINDOW = "20s"
PATIENCE = 90.0
# Of a server with a GPU, in MiB: what the panels that need one have to show.
GPU_RECORDING = {
    'dorad_memory_bytes{kind="weights"}': 16000,
    'dorad_memory_bytes{kind="kv"}': 8000,
    'dorad_memory_bytes{kind="adapters"}': 900,
    "dorad_memory_limit_bytes": 40000,
    "dorad_device_memory_bytes": 80000,
    "dorad_device_memory_free_bytes": 20000,
    "dorad_device_memory_pooled_bytes": 100,
    "dorad_device_memory_others_bytes": 35000,
    'dorad_memory_refusals_total{by="limit"}': 2,
    'dorad_memory_refusals_total{by="reserve"}': 1,
    'dorad_memory_released_bytes_total{from="kv"}': 512,
    "dorad_kv_grown_bytes_total": 256,
}


def promtool(*words: object) -> subprocess.CompletedProcess:
    line = ["promtool", *map(str, words)]
    return subprocess.run(line, capture_output=True, text=True, timeout=120)


def passes(*words: object) -> None:
    run = promtool(*words)
    assert run.returncode == 0, run.stdout + run.stderr


def alerts() -> list[str]:
    names = re.findall(r"- alert: (\w+)", ALERTS.read_text())
    assert len(names) > 10 and len(set(names)) == len(names)
    return names


def case_groups() -> dict[str, str]:
    """The cases of each alert."""
    _, *groups = re.split(r"(?<=\n)(?=  - name: )", ALERTS_TEST.read_text())
    return {group.split()[2]: group for group in groups}


def test_configuration_and_rules_are_valid() -> None:
    passes("check", "config", DEPLOY / "prometheus.yml")
    passes("check", "rules", ALERTS)


def test_documented_scrape_configuration_is_valid_and_makes_the_alerts_job(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "guides" / "monitoring.md").read_text()
    (example,) = re.findall(r"^```yaml\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    configuration = yaml.safe_load(example)
    (scrape,) = configuration["scrape_configs"]
    # Debian's promtool knows no Kubernetes.
    (discovery,) = scrape.pop("kubernetes_sd_configs")
    assert discovery == {"role": "pod", "namespaces": {"names": ["dorad"]}}
    scrape["static_configs"] = [{"targets": ["dorad-0:9464"]}]
    (tmp_path / "prometheus.yml").write_text(yaml.safe_dump(configuration))
    passes("check", "config", tmp_path / "prometheus.yml")
    jobs = {scrape["job_name"], "dorad-gateway", "dorad-picker"}
    assert jobs == set(re.findall(r'\bjob="([^"]*)"', ALERTS.read_text()))
    # Labels and the port's name are those of the servers' pods.
    base = ROOT / "deploy" / "kubernetes" / "base"
    (pod,) = [
        item["spec"]["template"]
        for item in yaml.safe_load_all((base / "server.yaml").read_text())
        if item["kind"] == "StatefulSet"
    ]
    (keep,) = scrape["relabel_configs"]
    label, port = keep["regex"].split(";")
    assert pod["metadata"]["labels"]["app.kubernetes.io/name"] == label
    assert port in [item["name"] for item in pod["spec"]["containers"][0]["ports"]]


def test_each_alert_fires_and_stays_silent_where_its_cases_say() -> None:
    passes("test", "rules", ALERTS_TEST)


@pytest.mark.deep
def test_each_alert_has_cases_that_would_miss_it(tmp_path: Path) -> None:
    """No alert has the name that the cases expect: for each, one has to miss it."""
    (tmp_path / "alerts.yml").write_text(ALERTS.read_text().replace("- alert: ", "- alert: Not"))
    cases = tmp_path / "alerts_test.yml"
    cases.write_text(ALERTS_TEST.read_text())
    run = promtool("test", "rules", cases)
    assert run.returncode != 0
    missed = re.findall(r" name: (\w+),\s+alertname: \1,", run.stdout + run.stderr)
    assert set(missed) == set(alerts())


def test_each_alert_is_silent_for_a_healthy_server_in_its_cases() -> None:
    groups = case_groups()
    assert sorted(groups) == sorted(alerts())
    for group in groups.values():
        assert 'instance="well"' in group
        assert "instance: well" not in group, "a healthy server's alert is expected"


def test_monitoring_page_explains_every_alert() -> None:
    page = (ROOT / "docs" / "guides" / "monitoring.md").read_text()
    explained = re.findall(r"^\| `(Dorad\w+)` \|", page, re.MULTILINE)
    assert sorted(explained) == sorted(alerts())


def test_dashboard_and_alerts_use_documented_metrics_only() -> None:
    page = (ROOT / "docs" / "reference" / "metrics.md").read_text()
    page += (ROOT / "docs" / "guides" / "gateway.md").read_text()
    page += (ROOT / "docs" / "guides" / "fleet.md").read_text()
    documented = set(re.findall(r"`(\w+)`", page))
    used = set(re.findall(r"\b(?:dorad|process)_\w+", ALERTS.read_text()))
    for panel in dashboard.panels("1m"):
        for target in panel.targets:
            used |= set(re.findall(r"\b(?:dorad|process)_\w+", target.expression))
    names = {re.sub(r"_(bucket|sum|count)$", "", name) for name in used}
    assert len(names) > 50
    assert {name for name in names if name not in documented} == set()


def test_dashboard_is_what_its_generator_makes(monkeypatch) -> None:
    folder = ROOT / "deploy" / "grafana"
    monkeypatch.syspath_prepend(folder)
    made = runpy.run_path(str(folder / "make_dashboard.py"))["text"]()
    assert dashboard.PATH.read_text() == made, "run deploy/grafana/make_dashboard.py"


def test_dashboard_can_be_imported() -> None:
    board = dashboard.load()
    assert board["uid"] == "dorad" and board["title"] and board["schemaVersion"] >= 36
    variables = {variable["name"]: variable for variable in board["templating"]["list"]}
    assert list(variables) == ["datasource", "job", "instance"]
    assert variables["datasource"]["type"] == "datasource"
    # "All" are the values that are listed, not what else a shared Prometheus scrapes.
    assert not any("allValue" in variable for variable in variables.values())
    ids = [panel["id"] for panel in board["panels"]]
    assert len(set(ids)) == len(ids)
    titles = [panel["title"] for panel in board["panels"]]
    assert len(set(titles)) == len(titles)
    places = set()
    for panel in board["panels"]:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & places, f"{panel['title']} lies over another panel"
        places |= cells
        if panel["type"] == "row":
            continue
        assert panel["datasource"]["uid"] == "${datasource}"
        assert panel["description"] and panel["fieldConfig"]["defaults"]["unit"]
        refs = [target["refId"] for target in panel["targets"]]
        assert refs and len(set(refs)) == len(refs)
        for target in panel["targets"]:
            assert 'job=~"$job",instance=~"$instance"' in target["expr"]


def backfill(data: Path, scratch: Path) -> float:
    """Puts the recording of a GPU's server where Prometheus finds it; returns a time within."""
    end = time.time() - 3 * 3600
    lines = []
    families = sorted({re.sub(r"\{.*", "", name) for name in GPU_RECORDING})
    for family in families:
        counter = family.endswith("_total")
        kind = "counter" if counter else "gauge"
        lines.append(f"# TYPE {family.removesuffix('_total')} {kind}")
        for name, mebibytes in GPU_RECORDING.items():
            if re.sub(r"\{.*", "", name) != family:
                continue
            labels = 'job="gpu",instance="gpu:9464"'
            full = name.replace("{", "{" + labels + ",") if "{" in name else f"{name}{{{labels}}}"
            for i in range(120):
                value = (mebibytes << 20) + (i if counter else 0)
                lines.append(f"{full} {value} {end - 120 + i:.3f}")
    recording = scratch / "gpu.om"
    recording.write_text("\n".join([*lines, "# EOF", ""]))
    passes("tsdb", "create-blocks-from", "openmetrics", recording, data)
    return end - 5


def missing(server: Prometheus, panels, at: float | None = None) -> list[str]:
    return [
        f"{panel.title}: {target.expression}"
        for panel in panels
        for target in panel.targets
        if not finite(server.query(target.expression, at))
    ]


@contextlib.contextmanager
def streams_through(gateway: RunningGateway, picker: Picker) -> Iterator[None]:
    """One short stream after the other, each with the choice of its pod, until the block ends."""
    done = threading.Event()

    def work() -> int:
        answered = 0
        with httpx.Client(base_url=gateway.url, timeout=60) as http:
            body = {"model": http.get("/v1/models").json()["data"][0]["id"], "prompt": [1, 2, 3]}
            while not done.wait(0.05):
                pick(picker.stub, completion("Hello"))
                answer = http.post(
                    "/v1/completions", json={**body, "max_tokens": 4, "stream": True}
                )
                answered += "[DONE]" in answer.text
        return answered

    with ThreadPoolExecutor(1) as pool:
        answered = pool.submit(work)
        try:
            yield
        finally:
            done.set()
        assert answered.result(60) > 0


@pytest.mark.skipif(device() != "cpu", reason="panels that need a GPU are to be empty")
def test_every_panel_has_data_under_load(zoo, tmp_path: Path, figures: list[str]) -> None:
    folders = [zoo.adapter("llama2", "dora", seed) for seed in range(4)]
    with serve(zoo.model("llama2"), {"probe": folders[0]}) as probe:
        size = probe.wire.adapter("probe").resident_bytes
    data = tmp_path / "data"
    recorded = backfill(data, tmp_path)
    panels = dashboard.panels(WINDOW)
    here = [panel for panel in panels if not panel.needs_gpu]
    elsewhere = [panel for panel in panels if panel.needs_gpu]
    assert len(here) > 30 and len(elsewhere) >= 3
    with (
        serve(zoo.model("llama2"), None, settings(tmp_path / "store", size)) as server,
        running_gateway(server.grpc, scratch=tmp_path) as gateway,
        picking([server.grpc], tmp_path) as picker,
        prometheus(
            write_config(
                tmp_path / "prometheus.yml",
                [target_of(server.metrics_url), gateway.http, target_of(picker.metrics)],
                rules=str(ALERTS),
            ),
            data,
        ) as observer,
    ):
        assert missing(observer, elsewhere, recorded) == []
        with traffic(server, folders, VOCAB, CONTEXT), streams_through(gateway, picker):
            begin = time.monotonic()
            while (left := missing(observer, here)) and time.monotonic() < begin + PATIENCE:
                time.sleep(1)
            assert left == [], f"no data within {PATIENCE} s"
            took = time.monotonic() - begin
        # A panel that needs a GPU shows nothing here, rather than zeros of one that is not there.
        for panel in elsewhere:
            for target in panel.targets:
                assert not finite(observer.query(target.expression)), target.expression
        groups = observer.get("/api/v1/rules")["groups"]
        rules = [rule for group in groups for rule in group["rules"]]
        assert {rule["name"] for rule in rules} == set(alerts())
        assert [rule for rule in rules if rule["health"] == "err"] == []
        for variable in ("job", "instance"):
            assert observer.get(f"/api/v1/label/{variable}/values")
    count = sum(len(panel.targets) for panel in panels)
    figures.append(
        f"dashboard: {count} queries of {len(panels)} panels have data after {took:.0f} s"
    )
