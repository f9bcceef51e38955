"""The metrics endpoint: names, values that move, format."""

import re
import socket
import subprocess
import urllib.request

import pytest
from lib.server import ROOT, Server, device, serve, wait_until

PROMPT = list(range(10, 50))


@pytest.fixture(scope="module")
def server(zoo):
    adapters = {"a": zoo.adapter("llama2", "dora"), "b": zoo.adapter("llama2", "lora")}
    with serve(zoo.model("llama2"), adapters) as running:
        yield running


def delta(server: Server, action) -> dict[str, float]:
    before = server.metrics()
    action()
    return {key: value - before.get(key, 0.0) for key, value in server.metrics().items()}


def moved(changes: dict[str, float], name: str) -> float:
    values = [v for key, v in changes.items() if key == name or key.startswith(name + "{")]
    assert values, f"{name} is not exported"
    return sum(values)


def test_generation_moves_its_counters(server: Server) -> None:
    def run() -> None:
        for _ in range(2):
            server.wire.generate(PROMPT, adapter="a", n=2, max_tokens=6, ignore_eos=True)

    changes = delta(server, run)
    assert moved(changes, "dorad_requests_ended_total") == 2
    assert moved(changes, "dorad_generated_tokens_total") == 2 * 2 * 6
    assert moved(changes, "dorad_prompt_tokens_total") == 2 * 2 * len(PROMPT)
    assert moved(changes, "dorad_time_to_first_token_seconds_count") == 2
    assert moved(changes, "dorad_inter_token_latency_seconds_count") == 2 * 2 * 5
    assert moved(changes, "dorad_engine_step_seconds_count") >= 12
    assert moved(changes, "dorad_prefix_cache_hit_tokens_total") >= 32


def test_scoring_and_refusals_are_counted(server: Server) -> None:
    import grpc

    def run() -> None:
        server.wire.score([PROMPT], ["a", "b", ""])
        with pytest.raises(grpc.RpcError):
            server.wire.generate(PROMPT, adapter="nobody")

    changes = delta(server, run)
    assert moved(changes, "dorad_scored_tokens_total") >= 3 * (len(PROMPT) - 1)
    codes = [key for key, value in changes.items() if value and 'code="NOT_FOUND"' in key]
    assert codes, "the refused call is not counted by its code"


def test_requests_and_tokens_are_counted_by_adapter(server: Server) -> None:
    def run() -> None:
        server.wire.generate(PROMPT, adapter="a@1", n=2, max_tokens=6, ignore_eos=True)
        server.wire.generate(PROMPT, max_tokens=4, ignore_eos=True)
        server.wire.score([PROMPT, PROMPT[:9]], ["b", ""])

    changes = delta(server, run)
    expected = {
        'dorad_adapter_requests_total{adapter="a"}': 1,
        'dorad_adapter_requests_total{adapter="b"}': 1,
        'dorad_adapter_requests_total{adapter="(base)"}': 2,
        'dorad_adapter_tokens_total{adapter="a",kind="prompt"}': 2 * len(PROMPT),
        'dorad_adapter_tokens_total{adapter="a",kind="generated"}': 12,
        'dorad_adapter_tokens_total{adapter="b",kind="scored"}': len(PROMPT) - 1 + 8,
        'dorad_adapter_tokens_total{adapter="(base)",kind="generated"}': 4,
        'dorad_adapter_tokens_total{adapter="other",kind="generated"}': 0,
    }
    assert {name: changes[name] for name in expected} == expected


def test_failed_requests_are_counted_by_reason(server: Server) -> None:
    import grpc

    def run() -> None:
        call = server.wire.stream(PROMPT, n=64, max_tokens=150, ignore_eos=True)
        next(iter(call))
        call.cancel()
        wait_until(lambda: server.metric("dorad_engine_running_sequences") == 0, what="the end")
        with pytest.raises(grpc.RpcError):
            server.wire.generate(PROMPT, adapter="nobody")

    changes = delta(server, run)
    failed = 'dorad_requests_failed_total{kind="generate",reason="CLIENT_CANCELLED"}'
    assert changes[failed] == 1
    assert moved(changes, "dorad_requests_failed_total") == 1, "a refused request has not failed"


def test_steps_are_split_into_phases(server: Server) -> None:
    def run() -> None:
        server.wire.generate(PROMPT, max_tokens=20, ignore_eos=True, bypass=True)

    changes = delta(server, run)
    split = {
        phase: changes[f'dorad_engine_step_phase_seconds_total{{phase="{phase}"}}']
        for phase in ("schedule", "launch", "compute", "process")
    }
    # The CPU's engine thread computes itself.
    idle = "launch" if device() == "cpu" else ""
    assert {phase for phase, seconds in split.items() if seconds == 0} <= {idle}
    assert moved(changes, "dorad_engine_step_tokens_sum") == len(PROMPT) + 19


def test_loads_are_split_into_stages(server: Server, zoo) -> None:
    def run() -> None:
        server.wire.publish("staged", zoo.adapter("llama2", "dora"), activate=True)

    changes = delta(server, run)
    stages = {
        re.search(r'stage="(\w+)"', key).group(1): value
        for key, value in changes.items()
        if key.startswith("dorad_adapter_load_seconds_sum{") and value > 0
    }
    parts = {"queue", "read", "validate", "copy", "norms", "activate"}
    assert set(stages) == parts | {"total"}, "nothing is stored"
    assert sum(stages[part] for part in parts) <= stages["total"] * 1.001
    server.wire.retire("staged", 1)


def test_the_build_is_named(server: Server) -> None:
    (info,) = [key for key in server.metrics() if key.startswith("dorad_build_info")]
    assert re.search(r'commit="(unknown|[0-9a-f]{12,}(-dirty)?)"', info)
    assert re.search(r'cuda="(yes|no)"', info) and re.search(r'version="\d+\.\d+\.\d+"', info)


def test_adapters_and_memory_are_gauged(server: Server, zoo) -> None:
    def resident() -> float:
        return server.metric("dorad_adapter_resident_bytes")

    def listed() -> float:
        return sum(version.resident_bytes for version in server.wire.list_adapters())

    # A version that another test has retired may still be on its way out.
    wait_until(lambda: resident() == listed(), what="the bytes of the listed versions")
    before = resident()
    server.wire.publish("c", zoo.adapter("llama2", "dora_r96"), activate=True)
    assert resident() == listed() > before
    server.wire.retire("c", 1)
    wait_until(lambda: resident() == before, what="bytes returned")
    values = server.metrics()
    memory = {key: value for key, value in values.items() if key.startswith("dorad_memory_bytes{")}
    kinds = {re.search(r'kind="(\w+)"', key).group(1) for key in memory}
    more = {"norms"} if device() == "cpu" else {"workspace", "loading", "graphs"}
    assert kinds == {"weights", "kv", "adapters"} | more
    # A load is over, and graphs of a tiny model may fit into what CUDA has anyway.
    rest = [value for key, value in memory.items() if not re.search("loading|graphs", key)]
    assert min(rest) > 0
    assert any("load" in key and 'stage="norms"' in key for key in values)


def test_memory_by_kind_agrees_with_info(server: Server) -> None:
    memory = server.wire.info().memory_bytes
    for key, value in server.metrics().items():
        match = re.fullmatch(r'dorad_memory_bytes\{kind="(\w+)"\}', key)
        if match:
            assert memory[match.group(1)] == value


def test_names_of_adapters_are_in_bounded_families_only_and_all_have_help(
    server: Server,
) -> None:
    text = server.metrics_text()
    described = set(re.findall(r"^# HELP (\w+) \S", text, re.MULTILINE))
    typed = dict(re.findall(r"^# TYPE (\w+) (\w+)$", text, re.MULTILINE))
    assert described == set(typed) and len(typed) > 20
    for name, kind in typed.items():
        assert name.startswith(("dorad_", "process_")), name
        assert name.endswith("_total") == (kind == "counter"), name
        assert not re.search(r"_(ms|milliseconds|kb|mb|percent)(_|$)", name), name
    named = set(re.findall(r'^(\w+)\{[^}]*="(?:a|b|a@1)"', text, re.MULTILINE))
    assert named <= {"dorad_adapter_requests_total", "dorad_adapter_tokens_total"}


def test_documentation_lists_every_metric(server: Server) -> None:
    exported = set(re.findall(r"^# TYPE (dorad_\w+) ", server.metrics_text(), re.MULTILINE))
    page = (ROOT / "docs" / "reference" / "metrics.md").read_text()
    documented = set(re.findall(r"`(dorad_\w+)`", page))
    assert exported - documented == set()
    # A metric with labels appears with its first value.
    assert len(exported) > 20 and documented


def test_text_passes_promtool(server: Server) -> None:
    text = server.metrics_text()
    sample = re.compile(r'^[a-z_]+(\{([a-z_]+="[^"\n]*",?)*\})? (-?[0-9.e+-]+|NaN|\+Inf|-Inf)$')
    bad = [
        line for line in text.splitlines() if not line.startswith("# ") and not sample.match(line)
    ]
    assert bad == []
    run = subprocess.run(
        ["promtool", "check", "metrics"], input=text, text=True, capture_output=True, timeout=30
    )
    assert run.returncode == 0, run.stdout + run.stderr


def test_half_open_connections_do_not_keep_scrapes_away(server: Server) -> None:
    host, _, port = server.metrics_url.removeprefix("http://").partition("/")[0].partition(":")
    idle = [socket.create_connection((host, int(port)), 5) for _ in range(12)]
    try:
        for connection in idle[:6]:
            connection.sendall(b"GET /metrics HTTP/1.1\r\nHo")
        # Each has three seconds: a scrape that waited for them all would meet its own timeout.
        assert "dorad_" in server.metrics_text()
    finally:
        for connection in idle:
            connection.close()


def test_health_endpoints_and_unknown_paths(server: Server) -> None:
    base = server.metrics_url.removesuffix("/metrics")
    for path in ("/healthz", "/readyz"):
        assert urllib.request.urlopen(base + path, timeout=30).status == 200
    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(base + "/nothing", timeout=30)
    assert caught.value.code == 404
