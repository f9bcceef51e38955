"""Pixels of images that the server reads from a caller's memory."""

import asyncio
import gc
import hashlib
import itertools
import os
import socket
import struct
import time

import dorad
import dorad.aio
import grpc
import numpy as np
import pytest
from dorad._shared_memory_socket import Connection
from dorad._shared_pixels import SharedPixels
from dorad.v1 import adapters_pb2, inference_pb2
from lib.pictures import ELEMENTS, END, START, Picture, inputs_of, prompt_of
from lib.server import serve
from lib.tiny_models import IMAGE
from lib.wire import failure

OPTIONS = {"max_tokens": 4, "ignore_eos": True, "seed": 5, "logprobs": "raw"}
BYTES = 4 * 4 * ELEMENTS * 4  # of an image of 4 x 4 patches in fp32


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return str(tmp_path_factory.mktemp("pixels") / "memory.sock")


@pytest.fixture(scope="module")
def server(zoo, path):
    settings = {
        "server.shared_memory_socket": path,
        "limits.max_images": 3,
        "limits.max_image_tokens": 4,
    }
    with serve(zoo.model("qwen3_vl"), {}, settings) as running:
        yield running


def prompt(*seeds, after=6):
    return prompt_of(inputs_of("qwen3_vl", [5, *(Picture(s, 4, 4) for s in seeds), after]))


class Recorder:
    """In the place of a client's stub: notes how each image of each request has its pixels."""

    def __init__(self, client):
        self._stub, client._inference = client._inference, self
        self.ways = []

    def __getattr__(self, name):
        method = getattr(self._stub, name)

        def call(request, **options):
            for image in request.images:
                way = "memory" if image.HasField("memory") else "data" if image.data else "name"
                self.ways.append(way)
            return method(request, **options)

        return call

    def taken(self):
        taken, self.ways = self.ways, []
        return taken


def same(one, other):
    assert np.array_equal(one.token_ids, other.token_ids)
    assert np.array_equal(one.logprobs, other.logprobs)


def test_pixels_in_memory_are_those_of_a_call(server, path):
    """Of every kind of call, and each image once."""
    with dorad.Client(server.grpc) as plain, dorad.Client(server.grpc, shared_memory=path) as near:
        recorder = Recorder(near)
        ids, images = prompt(1, 2, 1)
        (ours,) = near.generate(ids, images=images, **OPTIONS)
        assert recorder.taken() == ["memory", "memory", "name"]
        (theirs,) = plain.generate(ids, images=images, **OPTIONS)
        same(ours, theirs)
        near.generate(ids, images=images, **OPTIONS)
        assert recorder.taken() == ["name"] * 3
        ids, images = prompt(3)
        deltas = list(near.stream(ids, images=images, **OPTIONS))
        assert recorder.taken() == ["memory"]
        (theirs,) = plain.generate(ids, images=images, **OPTIONS)
        assert np.array_equal(np.concatenate([d.token_ids for d in deltas]), theirs.token_ids)
        ids, images = prompt(4)
        ours = near.score([ids, ids], [None], images=[images, images])
        assert recorder.taken() == ["memory", "name"]
        theirs = plain.score([ids], [None], images=[images])
        assert np.array_equal(ours[0][0][1:], theirs[0][0][1:])


def test_async_calls_bring_their_pixels_in_memory(server, path):
    async def run():
        async with dorad.aio.Client(server.grpc, shared_memory=path) as near:
            recorder = Recorder(near)
            prompts = [prompt(seed) for seed in range(20, 32)]
            found = await near.generate_many(
                [dorad.GenerateRequest(i, images=images, **OPTIONS) for i, images in prompts]
            )
            assert recorder.taken() == ["memory"] * 12
            return prompts, found

    prompts, found = asyncio.run(run())
    with dorad.Client(server.grpc) as plain:
        for (ids, images), (ours,) in zip(prompts, found, strict=True):
            (theirs,) = plain.generate(ids, images=images, **OPTIONS)
            same(ours, theirs)


def test_what_finds_no_room_goes_with_the_call(server, path, monkeypatch):
    monkeypatch.setattr(SharedPixels, "BYTES", 4096)
    with dorad.Client(server.grpc, shared_memory=path) as near:
        recorder = Recorder(near)
        ids, images = prompt(41, 42)
        near.generate(ids, images=images, **OPTIONS)
        assert recorder.taken() == ["memory", "data"]
        ids, images = prompt(43)
        near.generate(ids, images=images, **OPTIONS)
        assert recorder.taken() == ["memory"]  # The place of the first is free again.


def test_a_server_that_starts_anew_gets_the_memory_anew(zoo, tmp_path):
    path = str(tmp_path / "m.sock")
    settings = {"server.shared_memory_socket": path}
    ids, images = prompt(1)
    with serve(zoo.model("qwen3_vl"), {}, settings) as first:
        port = first.grpc.rsplit(":", 1)[1]
        near = dorad.Client(first.grpc, shared_memory=path)
        (expected,) = near.generate(ids, images=images, **OPTIONS)
    settings["server.grpc_listen"] = f"127.0.0.1:{port}"
    with near, serve(zoo.model("qwen3_vl"), {}, settings):
        recorder = Recorder(near)
        (again,) = near.generate(ids, images=images, retry_for=60, **OPTIONS)
        assert recorder.taken()[-1] == "memory"
        same(again, expected)


def test_without_the_socket_the_call_says_so(server, tmp_path):
    with (
        dorad.Client(server.grpc, shared_memory=tmp_path / "none.sock", retry_for=0) as near,
        pytest.raises(dorad.Unavailable, match=r"none\.sock"),
    ):
        ids, images = prompt(1)
        near.generate(ids, images=images, **OPTIONS)


def test_regions_do_not_overlap_and_are_used_again(path, server):
    shared = SharedPixels(path)
    regions = [shared.write(bytes([i]) * (5000 + i)) for i in range(50)]
    assert len({r.place.offset for r in regions}) == 50
    places = sorted(r.place.offset for r in regions)
    assert all(b - a >= 5000 for a, b in itertools.pairwise(places))
    for i, region in enumerate(regions):
        found = os.pread(shared._fd, 5000 + i, region.place.offset)
        assert found == bytes([i]) * (5000 + i)
    first = regions[7].place.offset
    del regions[7], region
    gc.collect()
    assert shared.write(b"x" * 100).place.offset == first
    shared.close()
    with pytest.raises(ValueError, match="closed"):
        shared.write(b"x")


# --- Refusals -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def memory(path, server):
    """A registered memory file with one image's pixels from byte 100 on."""
    connection = Connection(path)
    fd = os.memfd_create("test")
    os.ftruncate(fd, 100 + BYTES)
    data = np.random.default_rng(1).standard_normal(BYTES // 4).astype(np.float32).tobytes()
    os.pwrite(fd, data, 100)
    index = connection.offer_file(fd, 100 + BYTES)
    yield connection, index, fd, data
    connection.close()
    os.close(fd)


def request(memory, **changes):
    connection, index, _, data = memory
    place = {"session_token": connection.session_token, "memory": index, "offset": 100}
    fields = {"sha256": hashlib.sha256(data).digest(), **changes}
    place |= fields.pop("place", {})
    image = inference_pb2.Image(
        offset=1,
        length=4,
        grid=[1, 4, 4],
        dtype=adapters_pb2.TENSOR_DTYPE_F32,
        memory=inference_pb2.ImageMemory(**place),
    )
    for name, value in fields.items():
        setattr(image, name, value)
    ids = [START, *[IMAGE] * 4, END]
    return inference_pb2.GenerateRequest(
        prompt_token_ids=struct.pack(f"<{len(ids)}i", *ids),
        images=[image],
        stop=inference_pb2.StopParams(max_tokens=2),
    )


def refused(call, message):
    """The fields and reasons of a refusal; empty if the call is answered."""
    try:
        list(call(message, timeout=60))  # A Score raises at once, a Generate at its end.
    except grpc.RpcError as error:
        assert error.code() == grpc.StatusCode.INVALID_ARGUMENT, error
        return [(field, reason) for field, reason, _ in failure(error).violations]
    return []


@pytest.mark.parametrize(
    ("changes", "field", "reason"),
    [
        ({"place": {"session_token": b"x" * 16}}, "memory", "IMAGE_MEMORY_INVALID"),
        ({"place": {"session_token": b""}}, "memory", "IMAGE_MEMORY_INVALID"),
        ({"place": {"memory": 7}}, "memory", "IMAGE_MEMORY_INVALID"),
        ({"place": {"offset": 101}}, "memory", "IMAGE_MEMORY_INVALID"),
        ({"place": {"offset": 2**64 - 1}}, "memory", "IMAGE_MEMORY_INVALID"),
        ({"place": {"offset": 2**64 - BYTES}}, "memory", "IMAGE_MEMORY_INVALID"),
        ({"place": {"offset": 96}}, "sha256", "IMAGE_DIGEST_MISMATCH"),
        ({"sha256": b"x" * 32}, "sha256", "IMAGE_DIGEST_MISMATCH"),
        ({"sha256": b""}, "memory", "IMAGE_MEMORY_INVALID"),
        ({"sha256": b"x"}, "sha256", "IMAGE_DIGEST_INVALID"),
        ({"data": b"x" * BYTES}, "memory", "IMAGE_MEMORY_INVALID"),
        ({"length": 3}, "length", "IMAGE_LENGTH_MISMATCH"),
        ({"offset": 2}, "offset", "IMAGE_PLACE_INVALID"),
    ],
)
def test_what_is_no_image_in_memory_is_refused_by_name(server, memory, changes, field, reason):
    found = refused(server.wire.inference.Generate, request(memory, **changes))
    assert found == [(f"images[0].{field}", reason)]


def test_the_right_place_is_read_and_its_end_is_noticed(server, memory, path):
    generate = server.wire.inference.Generate
    assert list(generate(request(memory), timeout=60))
    connection = Connection(path)
    fd = os.memfd_create("test")
    os.ftruncate(fd, 2 * BYTES)
    index = connection.offer_file(fd, 2 * BYTES)
    os.ftruncate(fd, BYTES)  # After its registration.
    of = (connection, index, fd, b"\0" * BYTES)
    beyond = request(of, place={"offset": BYTES})
    assert refused(generate, beyond) == [("images[0].memory", "IMAGE_MEMORY_INVALID")]
    connection._socket.shutdown(socket.SHUT_RDWR)
    gone = request(of, place={"offset": 0})
    deadline = time.monotonic() + 60
    while not (found := refused(generate, gone)):  # The server learns of the end a little later.
        assert time.monotonic() < deadline
    assert found == [("images[0].memory", "IMAGE_MEMORY_INVALID")]
    connection.close()
    os.close(fd)


def test_a_score_reads_no_more_than_a_prompt_may_have(server, memory):
    one = request(memory).images[0]
    ids = request(memory).prompt_token_ids
    score = inference_pb2.ScoreRequest(adapters=[""])
    for i in range(4):
        score.sequences.add(token_ids=ids)
        score.images.add().CopyFrom(one)
        score.images[i].sequence = i
    assert refused(server.wire.inference.Score, score) == [("images", "IMAGES_TOO_LARGE")]
    del score.images[3], score.sequences[3]
    assert len(server.wire.inference.Score(score, timeout=60).sequences) == 3
