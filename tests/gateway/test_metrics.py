"""What the gateway counts."""

from pathlib import Path

import dorad
import pytest
from fake_server import overloaded
from lib.gateway_clients import COMPLETION
from prometheus_client.parser import text_string_to_metric_families

ROOT = Path(__file__).resolve().parents[2]


def samples_of(http):
    return {
        (s.name, tuple(sorted(s.labels.items()))): s.value
        for family in text_string_to_metric_families(http.get("/metrics").text)
        for s in family.samples
    }


def test_metrics_count_requests_and_tokens(fake_http):
    assert fake_http.post("/v1/completions", json=COMPLETION).status_code == 200
    fake_http.post("/v1/completions", json={})
    samples = samples_of(fake_http)
    for code in ("200", "400"):
        key = ("dorad_gateway_requests_total", (("code", code), ("endpoint", "completions")))
        assert samples[key] == 1
    assert samples["dorad_gateway_tokens_total", (("kind", "completion"),)] == 4
    assert samples["dorad_gateway_requests_in_flight", ()] == 0


@pytest.mark.parametrize(
    ("route", "body"),
    [
        ("/v1/completions", {**COMPLETION, "stream": True}),
        (
            "/v1/chat/completions",
            {"model": "fake-model", "messages": [{"role": "user", "content": "x"}], "stream": True},
        ),
        ("/v2/models/fake-model/generate_stream", {"input_ids": [5, 6], "max_tokens": 4}),
    ],
)
def test_metrics_count_no_tokens_of_a_refused_stream(fake, fake_http, route, body):
    prompt = ("dorad_gateway_tokens_total", (("kind", "prompt"),))
    fake.refuse_generate = [overloaded(None)]
    assert fake_http.post(route, json=body).status_code == 429
    assert samples_of(fake_http).get(prompt, 0) == 0
    assert fake_http.post(route, json=body).status_code == 200
    sent = fake.generate_calls[-1].prompt_token_ids
    assert samples_of(fake_http)[prompt] == len(sent) // 4


def test_metrics_have_the_process_its_connections_its_version_and_its_servers(fake, fake_http):
    samples = samples_of(fake_http)
    assert samples["process_resident_memory_bytes", ()] > 1 << 20
    assert samples["process_open_fds", ()] > 3
    assert samples["process_cpu_seconds_total", ()] > 0
    assert samples["process_start_time_seconds", ()] > 1e9
    assert samples["dorad_gateway_connections", ()] == 1
    assert samples["dorad_gateway_server_ready", (("server", fake.target),)] == 1
    (labels,) = [dict(of) for name, of in samples if name == "dorad_gateway_build_info"]
    assert labels["version"] == dorad.__version__ and set(labels) == {"version", "python", "grpc"}


def test_every_metric_of_the_gateway_is_in_its_guide(fake_http):
    fake_http.post("/v1/completions", json={**COMPLETION, "stream": True})
    page = (ROOT / "docs" / "guides" / "gateway.md").read_text()
    for family in text_string_to_metric_families(fake_http.get("/metrics").text):
        name = family.name + ("_total" if family.type == "counter" else "")
        if not name.startswith("process_") and not name.endswith("_created"):
            assert f"`{name}`" in page, name
