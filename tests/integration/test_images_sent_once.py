"""Pixels travel once: the client names images by digest, and sends them again when it must."""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import dorad
import dorad.aio
import numpy as np
import pytest
from dorad._aio.images import SentImages
from dorad._sync.images import CallImages
from dorad._sync.images import SentImages as SyncSentImages
from dorad.v1 import inference_pb2
from lib.pictures import Picture, inputs_of, prompt_of
from lib.server import command, free_port, serve, start
from lib.tokens import write_tokens

OPTIONS = {"max_tokens": 2, "ignore_eos": True, "seed": 5, "logprobs": "raw"}


class Recorder:
    """In the place of a client's stub: notes the bytes of each image of each request."""

    def __init__(self, client):
        self._stub, client._inference = client._inference, self
        self.calls, self._lock = [], threading.Lock()

    def __getattr__(self, name):
        method = getattr(self._stub, name)

        def call(request, **options):
            with self._lock:
                self.calls.append([len(image.data) for image in request.images])
            return method(request, **options)

        return call

    def taken(self):
        taken, self.calls = self.calls, []
        return taken

    def with_pixels(self):
        """The number of images that went with pixels."""
        return sum(size > 0 for call in self.taken() for size in call)


def prompt(seed=1, after=6):
    return prompt_of(inputs_of("qwen3_vl", [5, Picture(seed, 4, 4), after]))


SIZE = len(prompt()[1][0].data)


def start_at(zoo, folder, port, **settings):
    settings = {"server.grpc_listen": f"127.0.0.1:{port}"} | settings
    line, log = command(zoo.model("qwen3_vl"), {}, settings, folder / "log"), folder / "log"
    return start(line, log)


@pytest.fixture
def target(zoo):
    with serve(zoo.model("qwen3_vl"), {}) as server:
        yield server.grpc


@pytest.fixture
def client(target):
    with dorad.Client(target) as client:
        yield client


def same(one, other):
    assert np.array_equal(one[0].token_ids, other[0].token_ids)
    assert np.array_equal(one[0].logprobs, other[0].logprobs)


def test_calls_of_every_kind_bring_an_image_once(client):
    recorder = Recorder(client)
    ids, images = prompt()
    first = client.generate(ids, images=images, n=4, **OPTIONS)
    assert recorder.taken() == [[SIZE]]
    same(first, client.generate(ids, images=images, n=4, **OPTIONS))
    client.score([ids], images=[images])
    with client.stream(ids, images=images, **OPTIONS) as stream:
        assert [token for delta in stream for token in delta.token_ids]
    assert recorder.taken() == [[0], [0], [0]]


def test_a_score_and_a_stream_bring_pixels_for_the_calls_after_them(client):
    recorder = Recorder(client)
    client.score([prompt(1)[0]], images=[prompt(1)[1]])
    with client.stream(prompt(2)[0], images=prompt(2)[1], **OPTIONS) as stream:
        assert list(stream)
    assert recorder.taken() == [[SIZE], [SIZE]]
    for seed in (1, 2):
        client.generate(prompt(seed)[0], images=prompt(seed)[1], **OPTIONS)
    assert recorder.taken() == [[0], [0]]


def test_an_image_in_several_places_of_a_request_goes_once(client):
    recorder = Recorder(client)
    ids, images = prompt()
    scores = client.score([ids, ids], images=[images, images])
    assert recorder.taken() == [[SIZE, 0]]
    assert np.array_equal(scores.logprobs[0][0][1:], scores.logprobs[1][0][1:])
    ids, images = prompt_of(inputs_of("qwen3_vl", [5, Picture(2, 4, 4), 6, Picture(2, 4, 4), 7]))
    client.generate(ids, images=images, **OPTIONS)
    assert recorder.taken() == [[SIZE, 0]]


def test_prompts_that_begin_at_once_bring_their_image_once(client):
    recorder = Recorder(client)
    requests = [
        dorad.GenerateRequest(ids, images=images, **OPTIONS)
        for ids, images in (prompt(seed, after) for after in range(6, 22) for seed in (1, 2))
    ]
    assert len(client.generate_many(requests)) == 32
    assert recorder.with_pixels() == 2


def test_tasks_that_begin_at_once_bring_their_image_once(target):
    async def run():
        async with dorad.aio.Client(target) as client:
            recorder = Recorder(client)
            calls = [prompt(1, after) for after in range(6, 22)]
            await asyncio.gather(
                *(client.generate(ids, images=images, **OPTIONS) for ids, images in calls)
            )
            assert recorder.with_pixels() == 1
            ids, images = prompt()
            async with client.stream(ids, images=images, **OPTIONS) as stream:
                assert [delta async for delta in stream]
            await client.score([ids], images=[images])
            assert recorder.with_pixels() == 0

    asyncio.run(asyncio.wait_for(run(), 120))


def test_a_leader_that_is_refused_leaves_the_image_to_the_next(client):
    recorder = Recorder(client)
    ids, images = prompt()

    def call(number):
        adapter = "none" if number % 2 else None
        try:
            return client.generate(ids, images=images, adapter=adapter, **OPTIONS)
        except dorad.NotFound:
            return None

    with ThreadPoolExecutor(8) as threads:
        answers = list(threads.map(call, range(8)))
    assert [answer is None for answer in answers] == [False, True] * 4
    assert 1 <= recorder.with_pixels() <= 8
    client.generate(ids, images=images, **OPTIONS)
    assert recorder.taken() == [[0]]


def test_a_server_that_starts_anew_gets_the_pixels_again(zoo, tmp_path):
    port = free_port()
    calls = [prompt(1, after) for after in range(6, 14)]
    requests = [dorad.GenerateRequest(ids, images=images, **OPTIONS) for ids, images in calls]
    server = start_at(zoo, tmp_path, port)
    with dorad.Client(f"127.0.0.1:{port}", retry_for=60) as client:
        recorder = Recorder(client)
        first = client.generate_many(requests)
        assert server.stop() == 0
        server = start_at(zoo, tmp_path, port)
        try:
            recorder.taken()
            for one, other in zip(first, client.generate_many(requests), strict=True):
                same(one, other)
            assert recorder.with_pixels() == 1
            assert server.stop() == 0
            server = start_at(zoo, tmp_path, port)
            ids, images = calls[0]
            with client.stream(ids, images=images, **OPTIONS) as stream:
                assert [int(i) for d in stream for i in d.token_ids] == list(first[0][0].token_ids)
            assert recorder.taken()[-2:] == [[0], [SIZE]]
        finally:
            server.stop()


@pytest.mark.parametrize("room", [0, SIZE, SIZE * 3])
def test_a_small_cache_costs_pixels_and_never_an_answer(zoo, client, room):
    calls = [prompt(seed, after) for after in (6, 7, 8) for seed in range(4)]
    requests = [dorad.GenerateRequest(ids, images=images, **OPTIONS) for ids, images in calls]
    expected = client.generate_many(requests)
    with (
        serve(zoo.model("qwen3_vl"), {}, {"engine.image_cache_bytes": room}) as server,
        dorad.Client(server.grpc) as other,
    ):
        recorder = Recorder(other)
        for request, answer in zip(requests, expected, strict=True):
            same(other.generate_many([request])[0], answer)
        # With a digest first, and then with pixels.
        assert all(call in ([0], [SIZE]) for call in recorder.calls)
        assert recorder.with_pixels() == len(requests)
        for answer, one in zip(expected, other.generate_many(requests), strict=True):
            same(answer, one)
        # Calls that run beside each other wait for one another at most twice.
        assert len(recorder.taken()) <= 3 * len(requests)


def test_only_the_images_that_are_missing_are_sent_again(zoo):
    with (
        serve(zoo.model("qwen3_vl"), {}, {"engine.image_cache_bytes": 2 * SIZE}) as server,
        dorad.Client(server.grpc) as client,
    ):
        recorder = Recorder(client)
        for seed in (1, 2, 3):  # The third drops the first.
            client.generate(prompt(seed)[0], images=prompt(seed)[1], **OPTIONS)
        assert recorder.taken() == [[SIZE]] * 3
        ids, images = prompt_of(
            inputs_of("qwen3_vl", [5, Picture(1, 4, 4), 6, Picture(3, 4, 4), 7])
        )
        client.generate(ids, images=images, **OPTIONS)
        assert recorder.taken() == [[0, 0], [SIZE, 0]]


def test_an_image_without_pixels_is_not_sent_again(client):
    recorder = Recorder(client)
    ids, images = prompt()
    nameless = [image.without_pixels() for image in images]
    for call in (
        lambda: client.generate(ids, images=nameless, **OPTIONS),
        lambda: client.score([ids], images=[nameless]),
        lambda: list(client.stream(ids, images=nameless, **OPTIONS)),
    ):
        with pytest.raises(dorad.Conflict) as error:
            call()
        assert error.value.reason == "IMAGE_MISSING"
        assert images[0].sha256.hex() in str(error.value)
    assert recorder.taken() == [[0]] * 3


def test_a_pool_sends_each_of_its_servers_the_pixels_once(zoo):
    with (
        serve(zoo.model("qwen3_vl"), {}) as one,
        serve(zoo.model("qwen3_vl"), {}) as two,
    ):
        recorders = {}

        def connect(target):
            client = dorad.aio.Client(target)
            recorders[target] = Recorder(client)
            return client

        calls = [prompt(seed, after) for after in range(6, 14) for seed in (1, 2, 3)]
        requests = [dorad.GenerateRequest(ids, images=images, **OPTIONS) for ids, images in calls]
        with dorad.RolloutPool([one.grpc], connect=connect) as pool:
            first = pool.generate_many(requests)
            assert recorders[one.grpc].with_pixels() == 3
            pool.add(two.grpc)
            pool.remove(one.grpc)
            for answer, again in zip(first, pool.generate_many(requests), strict=True):
                same(answer, again)
            assert recorders[two.grpc].with_pixels() == 3
            pool.generate_many(requests)
            assert recorders[two.grpc].with_pixels() == 0


def test_tenants_that_share_a_connection_bring_their_own_pixels(zoo, tmp_path):
    tokens = {"a": ("team-a", ["infer"]), "b": ("team-b", ["infer"])}
    write_tokens(
        tmp_path / "tokens", tokens, {team: {"adapters": f"{team}."} for team, _ in tokens.values()}
    )
    settings = {"security.tokens_file": tmp_path / "tokens"}
    ids, images = prompt()
    with (
        serve(zoo.model("qwen3_vl"), {}, settings) as server,
        dorad.Client(server.grpc, token="a-token") as a,
    ):
        recorder = Recorder(a)
        b = a.with_metadata([("authorization", "Bearer b-token")])
        first = a.generate(ids, images=images, **OPTIONS)
        same(first, b.generate(ids, images=images, **OPTIONS))
        assert recorder.taken() == [[SIZE], [0], [SIZE]]
        for caller in (a, b):
            same(first, caller.generate(ids, images=images, **OPTIONS))
        assert recorder.taken() == [[0], [0]]


def test_a_refusal_that_comes_late_does_not_count_against_pixels_sent_since():
    message = inference_pb2.GenerateRequest(images=[inference_pb2.Image()])
    sent = SyncSentImages()
    _, images = prompt()
    missing = dorad.Conflict(
        "", code="FAILED_PRECONDITION", reason="IMAGE_MISSING",
        metadata={"sha256": images[0].sha256.hex()},
    )  # fmt: skip
    first, early, late = (CallImages(sent, images) for _ in range(3))

    def size(call):
        return len(call.message(message).images[0].data)

    assert size(first) == SIZE
    first.arrived()
    assert (size(early), size(late)) == (0, 0)  # Then the server starts anew.
    assert early.lacking(missing)
    assert size(early) == SIZE
    early.arrived()
    assert late.lacking(missing)
    assert size(late) == 0
    assert late.lacking(missing)
    assert size(late) == SIZE
    assert not late.lacking(missing)  # It has sent them.


@pytest.mark.parametrize("kind", [SentImages, SyncSentImages])
def test_the_memory_of_sent_images_is_bounded(kind, monkeypatch):
    monkeypatch.setattr(kind, "MOST", 3)
    sent = kind()
    for number in range(10):
        sent.arrived((bytes([number]), "float32", (1, 4, 4)))
    assert [name[0][0] for name in sent.arrivals] == [7, 8, 9]
