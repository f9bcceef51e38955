"""The metrics under vLLM's names, read as endpoint pickers read them."""

import itertools
import re
import threading
import time
from collections import Counter
from dataclasses import dataclass

import pytest
from lib.server import ROOT, Server, serve, wait_until

SCRAPE_EVERY = 0.05
SCRAPE_FOR = 4.0
ADAPTERS = ["a", "b", "c"]
SAMPLE = re.compile(r"^(vllm:\w+)(?:\{(.*)\})? (\S+)$")
LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


@dataclass
class Sample:
    labels: dict[str, str]
    value: float


def parse(text: str) -> dict[str, list[Sample]]:
    samples: dict[str, list[Sample]] = {}
    for line in text.splitlines():
        match = SAMPLE.match(line)
        if match:
            labels = dict(LABEL.findall(match.group(2) or ""))
            samples.setdefault(match.group(1), []).append(Sample(labels, float(match.group(3))))
    return samples


@dataclass
class Picked:
    """What a picker knows of a server after a scrape."""

    waiting: int
    running: int
    kv_usage: float
    block_size: int
    blocks: int
    max_adapters: int
    active: set[str]
    queued: set[str]
    as_of: float
    adapter_series: int


def names(text: str) -> set[str]:
    return {name.strip() for name in text.split(",") if name.strip()}


def pick(text: str) -> Picked:
    """As the extractor does: the first series of a gauge; of the adapters the latest one."""
    samples = parse(text)
    cache = samples["vllm:cache_config_info"][0].labels
    adapters = samples["vllm:lora_requests_info"]
    latest = max(adapters, key=lambda sample: sample.value)
    return Picked(
        waiting=int(samples["vllm:num_requests_waiting"][0].value),
        running=int(samples["vllm:num_requests_running"][0].value),
        kv_usage=samples["vllm:kv_cache_usage_perc"][0].value,
        block_size=int(cache["block_size"]),
        blocks=int(cache["num_gpu_blocks"]),
        max_adapters=int(latest.labels["max_lora"]),
        active=names(latest.labels["running_lora_adapters"]),
        queued=names(latest.labels["waiting_lora_adapters"]),
        as_of=latest.value,
        adapter_series=len(adapters),
    )


@pytest.fixture(scope="module")
def server(zoo):
    adapters = {name: zoo.adapter("slow", "dora", seed) for seed, name in enumerate(ADAPTERS)}
    settings = {
        "metrics.vllm_aliases": True,
        "engine.max_running_sequences": 2,
        "engine.kv_bytes": 64 << 20,
    }
    with serve(zoo.model("slow"), adapters, settings) as running:
        yield running


def load(server: Server, over: threading.Event, adapter: str) -> None:
    while not over.is_set():
        server.wire.generate([11, 12, 13], adapter=adapter, max_tokens=24, ignore_eos=True)


def test_a_picker_that_scrapes_every_50_ms_follows_the_load(
    server: Server, figures: list[str]
) -> None:
    over = threading.Event()
    wanted = [*ADAPTERS, "a@1"]
    workers = [threading.Thread(target=load, args=(server, over, name)) for name in wanted]
    for worker in workers:
        worker.start()
    picked: list[Picked] = []
    began = time.time()
    try:
        end = time.monotonic() + SCRAPE_FOR
        while time.monotonic() < end:
            next_scrape = time.monotonic() + SCRAPE_EVERY
            picked.append(pick(server.metrics_text()))
            time.sleep(max(0.0, next_scrape - time.monotonic()))
    finally:
        over.set()
        for worker in workers:
            worker.join(60)
    assert {seen.adapter_series for seen in picked} == {1}, "there is one series at any time"
    assert {seen.max_adapters for seen in picked} == {2}
    assert {seen.block_size for seen in picked} == {16} and picked[0].blocks > 0
    assert all(0 <= seen.kv_usage <= 1 for seen in picked)
    assert max(seen.kv_usage for seen in picked) > 0
    assert max(seen.running for seen in picked) == 2
    assert max(seen.waiting for seen in picked) >= 1
    assert set().union(*(seen.active for seen in picked)) == set(wanted)
    assert set().union(*(seen.queued for seen in picked)) <= set(wanted)
    assert any(seen.queued for seen in picked)
    assert all(len(seen.active) <= 4 for seen in picked)
    stamps = [seen.as_of for seen in picked]
    assert stamps == sorted(stamps), "a later series must win"
    assert stamps[-1] >= began
    changes = [
        (before, after)
        for before, after in itertools.pairwise(picked)
        if (before.active, before.queued) != (after.active, after.queued)
    ]
    assert changes
    assert all(after.as_of > before.as_of for before, after in changes)
    figures.append(
        f"vLLM aliases: {len(picked)} scrapes in {SCRAPE_FOR:g} s, {len(changes)} changes"
    )


def test_an_idle_server_has_no_adapters_in_use(server: Server) -> None:
    wait_until(lambda: pick(server.metrics_text()).running == 0, what="the end of requests")
    seen = pick(server.metrics_text())
    assert (seen.active, seen.queued, seen.waiting) == (set(), set(), 0)
    assert seen.adapter_series == 1


def test_aliases_say_what_the_servers_own_metrics_say(server: Server) -> None:
    server.wire.generate([11, 12, 13], adapter="a", max_tokens=5, n=2, ignore_eos=True)
    own = server.metrics()
    aliases = Counter()
    for name, samples in parse(server.metrics_text()).items():
        aliases[name] = sum(sample.value for sample in samples)
    pairs = {
        "vllm:generation_tokens_total": "dorad_generated_tokens_total",
        "vllm:num_preemptions_total": "dorad_engine_preemptions_total",
        "vllm:prefix_cache_queries_total": "dorad_prefix_cache_queried_tokens_total",
        "vllm:time_to_first_token_seconds_count": "dorad_time_to_first_token_seconds_count",
        "vllm:inter_token_latency_seconds_sum": "dorad_inter_token_latency_seconds_sum",
        "vllm:iteration_tokens_total_sum": "dorad_engine_step_tokens_sum",
        "vllm:request_success_total": 'dorad_samples_ended_total{finish_reason="length"}',
    }
    for alias, name in pairs.items():
        assert aliases[alias] == own[name], alias
    assert aliases["vllm:generation_tokens_total"] >= 10


def test_every_alias_is_documented_and_typed(server: Server) -> None:
    text = server.metrics_text()
    typed = set(re.findall(r"^# TYPE (vllm:\w+) \w+$", text, re.MULTILINE))
    page = (ROOT / "docs" / "reference" / "metrics.md").read_text()
    assert typed == set(re.findall(r"^\| `(vllm:\w+)` \|", page, re.MULTILINE))
    assert set(re.findall(r"^# HELP (vllm:\w+) \S", text, re.MULTILINE)) == typed
