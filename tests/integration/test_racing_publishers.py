"""Many publishers at once, half of them wrong, while streams run: nobody harms anybody."""

import random
import statistics
import threading
import time
from collections.abc import Callable

import grpc
import pytest
import torch
from dorad.v1 import adapters_pb2, types_pb2
from lib.server import Server, serve, wait_until
from lib.wire import LENGTH, collect, failure, publish_parts
from safetensors.torch import load, save

THREADS = 5
GOOD = 25
PROMPT = [11, 12, 13, 14, 15]
TOKENS = 40


@pytest.fixture(scope="module")
def folders(zoo):
    return [zoo.adapter("slow", "dora", seed) for seed in range(5)]


def read(folder) -> tuple[str, bytes]:
    image = (folder / "adapter_model.safetensors").read_bytes()
    return (folder / "adapter_config.json").read_text(), image


def poisoned(image: bytes) -> bytes:
    tensors = load(image)
    next(iter(tensors.values())).view(-1)[3] = torch.nan
    return save(tensors)


def truncated(server: Server, config: str, image: bytes) -> None:
    begin = adapters_pb2.PublishBegin(
        name="bad", adapter_config_json=config, safetensors_size=len(image)
    )
    parts = list(publish_parts(begin, image))[:-1]
    server.wire.adapters.Publish(iter(parts), timeout=60)


def bad_publishes(server: Server, zoo, folders) -> list[tuple[str, Callable[[], object]]]:
    """(reason, call) of every way to be wrong."""
    config, image = read(folders[0])
    other = read(zoo.adapter("llama2", "dora"))

    def send(*content, **begin):
        return lambda: server.wire.publish_bytes("bad", *content, **begin)

    return [
        ("PUBLISH_SHA256_MISMATCH", send(config, image, safetensors_sha256=bytes(32))),
        ("PUBLISH_SIZE_MISMATCH", send(config, image, safetensors_size=len(image) + 1)),
        ("ADAPTER_CONFIG_NOT_JSON", send("{", image)),
        ("ADAPTER_NOT_FINITE", send(config, poisoned(image))),
        ("PUBLISH_INCOMPLETE", lambda: truncated(server, config, image)),
        ("ADAPTER_TENSOR_SHAPE", send(*other)),
    ]


class Streams:
    """Streams of a fixed adapter, of the base and of the newest good version, one after another."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._enough = threading.Event()
        self.errors: list[Exception] = []
        self.ended = 0
        self.gaps: list[float] = []  # seconds between two messages of one stream
        self._threads = [
            threading.Thread(target=self._run, args=(name,)) for name in ("fixed", "", "good0")
        ]

    def __enter__(self) -> "Streams":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._enough.set()
        for thread in self._threads:
            thread.join(60)

    def _timed(self, call):
        last = None
        for message in call:
            now = time.monotonic()
            if last is not None:
                self.gaps.append(now - last)
            last = now
            yield message

    def _run(self, adapter: str) -> None:
        while not self._enough.is_set():
            try:
                call = self._server.wire.stream(
                    PROMPT, adapter=adapter, max_tokens=TOKENS, ignore_eos=True
                )
                sample = collect(self._timed(call))[0]
                assert sample.reason == LENGTH and len(sample.tokens) == TOKENS
                self.ended += 1
            except Exception as error:
                self.errors.append(error)
                return


@pytest.mark.parametrize("seed", [0, 1])
def test_bad_publishes_among_good_ones_harm_nobody(zoo, folders, seed: int, figures) -> None:
    with serve(zoo.model("slow"), {"fixed": folders[0]}) as server:
        digests = [server.wire.publish("probe", folder).adapter.digest for folder in folders]
        for version in range(1, len(folders) + 1):
            server.wire.retire("probe", version)
        wire = server.wire
        wait_until(lambda: len(ready(server)) == 1, what="the probes to go")
        # Not memory_bytes, which still counts probes that are being freed.
        bytes_before = wire.adapter("fixed").resident_bytes
        wire.publish("good0", folders[0], activate=True)

        bad = bad_publishes(server, zoo, folders)
        todo: list = [("bad", bad[i % len(bad)]) for i in range(GOOD)]
        todo += [("good", i) for i in range(GOOD)]
        random.Random(seed).shuffle(todo)
        lock = threading.Lock()
        refusals: list[tuple[str, str]] = []
        published: list[tuple[int, types_pb2.AdapterVersion]] = []
        surprises: list[BaseException] = []

        def work() -> None:
            while True:
                with lock:
                    if not todo:
                        return
                    kind, what = todo.pop()
                try:
                    if kind == "bad":
                        with pytest.raises(grpc.RpcError) as caught:
                            what[1]()
                        refusals.append((what[0], failure(caught.value).reason))
                    else:
                        folder = folders[what % len(folders)]
                        options = dict(activate=what % 5 == 0)
                        answer = wire.publish(f"good{what % 5}", folder, **options)
                        published.append((what, answer.adapter))
                except BaseException as error:
                    surprises.append(error)
                    return

        with Streams(server) as streams:
            wait_until(lambda: streams.ended >= 6 or streams.errors, 60, "streams alone")
            alone = len(streams.gaps)
            threads = [threading.Thread(target=work) for _ in range(THREADS)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(120)
            during, beside = streams.ended, len(streams.gaps)
            wait_until(lambda: streams.ended >= during + 3 or streams.errors, 60, "more streams")

        assert not surprises and not streams.errors
        for what, gaps in [
            ("alone", streams.gaps[:alone]),
            ("beside 25 good and 25 bad publishes", streams.gaps[alone:beside]),
        ]:
            milliseconds = sorted(1e3 * gap for gap in gaps)
            p99 = milliseconds[int(0.99 * (len(milliseconds) - 1))]
            figures.append(
                f"between two messages of a stream, {what}: median "
                f"{statistics.median(milliseconds):.1f} ms, p99 {p99:.1f}, longest "
                f"{milliseconds[-1]:.1f} ({len(milliseconds)})"
            )
        assert len(refusals) == GOOD and all(want == got for want, got in refusals), refusals
        assert len(published) == GOOD
        for number, adapter in published:
            assert adapter.state == types_pb2.ADAPTER_STATE_READY
            assert adapter.digest == digests[number % len(folders)]
        good = {key for key in ready(server) if key[0] != "fixed"}
        assert good == {("good0", 1)} | {(a.name, a.version) for _, a in published}
        assert not any(name == "bad" for name, _ in ready(server))

        for name, version in good:
            wire.retire(name, version)
        wait_until(lambda: wire.info().engine.adapter_leases == 0, what="all leases returned")
        wait_until(
            lambda: wire.info().memory_bytes["adapters"] == bytes_before, what="memory returned"
        )
        assert server.metric("dorad_adapter_idle_uploads") == 0


def ready(server: Server) -> set[tuple[str, int]]:
    return {
        (item.name, item.version)
        for item in server.wire.list_adapters()
        if item.state == types_pb2.ADAPTER_STATE_READY
    }


def test_one_of_many_publishers_of_the_same_version_wins(zoo, folders) -> None:
    with serve(zoo.model("slow")) as server:
        start = threading.Barrier(8)
        wins: list[types_pb2.AdapterVersion] = []
        losses = []

        def run(i: int) -> None:
            start.wait(30)
            try:
                folder = folders[i % len(folders)]
                wins.append(server.wire.publish("race", folder, version=7).adapter)
            except grpc.RpcError as error:
                losses.append(failure(error))

        threads = [threading.Thread(target=run, args=(i,)) for i in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert len(wins) == 1 and len(losses) == 7
        assert {loss.code for loss in losses} == {grpc.StatusCode.ABORTED}
        assert {loss.reason for loss in losses} == {"ADAPTER_VERSION_TAKEN"}
        (item,) = server.wire.list_adapters("race")
        assert (item.version, item.digest) == (7, wins[0].digest)
