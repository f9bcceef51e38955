"""Adapters are published and retired while streams run: nobody notices."""

import threading
import time

import numpy as np
import pytest
from lib.server import Server, serve, wait_until
from lib.tiers import deep
from lib.wire import LENGTH, Sample, collect

STREAMS = 8
VERSIONS = 20 if deep() else 10
ROUNDS = 3  # in which each is published once; the first one is for the allocator
PROMPT = [11, 12, 13, 14, 15]
TOKENS = 60


class Streamer(threading.Thread):
    """Runs streams one after the other until a stop, and notes the gaps between messages."""

    def __init__(self, server: Server, adapter: str) -> None:
        super().__init__(daemon=True)
        self.server, self.adapter = server, adapter
        self.enough = threading.Event()
        # (when it ended, how long it was)
        self.gaps: list[tuple[float, float]] = []
        self.samples: list[Sample] = []
        self.error: Exception | None = None

    def run(self) -> None:
        try:
            while not self.enough.is_set():
                self.samples.append(self._one())
        except Exception as error:
            self.error = error

    def _one(self) -> Sample:
        messages, last = [], None
        call = self.server.wire.stream(
            PROMPT, adapter=self.adapter, max_tokens=TOKENS, ignore_eos=True, seed=1
        )
        for message in call:
            now = time.monotonic()
            if last is not None and message.token_ids:
                self.gaps.append((now, now - last))
            last = now
            messages.append(message)
        return collect(messages)[0]


@pytest.fixture(scope="module")
def folders(zoo):
    return [zoo.adapter("slow", "dora_r64", seed) for seed in range(VERSIONS)]


def test_streams_do_not_notice_publishes_and_retirements(zoo, folders, figures) -> None:
    fixed = {"fixed": zoo.adapter("slow", "dora")}
    with serve(zoo.model("slow"), fixed, {"engine.kv_bytes": 256 << 20}) as server:
        wire = server.wire
        bytes_before = wire.info().memory_bytes["adapters"]
        first = wire.publish("hot", folders[0], activate=True).adapter
        digests = {first.version: first.digest}
        version_bytes = wire.info().memory_bytes["adapters"] - bytes_before

        streamers = [Streamer(server, ["hot", "fixed", "", "hot"][i % 4]) for i in range(STREAMS)]
        for streamer in streamers:
            streamer.start()
        wait_until(lambda: all(s.samples for s in streamers), 60, "every stream to have run once")

        begin = time.monotonic()
        for i in range(ROUNDS * VERSIONS):
            if i == VERSIONS:
                rss_before = server.rss()
            adapter = wire.publish("hot", folders[(i + 1) % VERSIONS], activate=True).adapter
            digests[adapter.version] = adapter.digest
            wire.retire("hot", adapter.version - 1)
        end = time.monotonic()

        time.sleep(0.3)
        for streamer in streamers:
            streamer.enough.set()
        for streamer in streamers:
            streamer.join(60)
        wire.retire("hot", max(digests))

        assert [s.error for s in streamers if s.error] == []
        during = np.array([gap for s in streamers for at, gap in s.gaps if begin <= at <= end])
        quiet = np.array([gap for s in streamers for at, gap in s.gaps if at < begin])
        figures.append(
            f"hot load: {ROUNDS * VERSIONS} versions in {end - begin:.2f} s, {STREAMS} streams;"
            f" largest gap {during.max() * 1e3:.1f} ms, median {np.median(during) * 1e3:.1f} ms"
            f" (before: {quiet.max() * 1e3:.1f} and {np.median(quiet) * 1e3:.1f} ms)"
        )
        samples = [sample for s in streamers for sample in s.samples]
        assert all(sample.reason == LENGTH and len(sample.tokens) == TOKENS for sample in samples)
        # A request keeps its version to the end, and says which it was.
        served = set()
        for sample in samples:
            assert len(sample.spans) == 1 and sample.spans[0][3:] == (0, TOKENS)
            adapter, version, digest = sample.spans[0][:3]
            if adapter == "hot":
                assert digests[version] == digest
                served.add(version)
        assert len(served) >= 3, "the streams saw hardly any of the versions"
        same = {(sample.spans[0][:3], tuple(sample.tokens)) for sample in samples}
        assert len(same) == len({key for key, _ in same}), "one version gave two answers"

        wait_until(
            lambda: wire.info().memory_bytes["adapters"] == bytes_before, what="all bytes returned"
        )
        assert wire.info().engine.adapter_leases == 0
        # Allocators keep what they once needed, here and there; a leak keeps every version.
        grown = server.rss() - rss_before
        published = (ROUNDS - 1) * VERSIONS * version_bytes
        figures.append(
            f"hot load: the process grew by {grown / 2**20:.1f} MiB"
            f" while {published / 2**20:.0f} MiB were published and retired"
        )
        assert grown < published / 4
