"""Bad images: each is refused with its reason before anything is kept, and the server goes on."""

import hashlib
from collections.abc import Callable

import grpc
import numpy as np
import pytest
from dorad.v1 import adapters_pb2, control_pb2, inference_pb2
from google.rpc import error_details_pb2
from grpc_status import rpc_status
from lib.pictures import ELEMENTS, END, START
from lib.server import Server, serve
from lib.tiny_models import IMAGE, VIDEO
from lib.wire import RAW, pack_ids

MAX_IMAGES, MAX_TOKENS = 3, 20
# The prompt has two images, of 2 x 4 and 4 x 4 patches.
PROMPT = [5, START, IMAGE, IMAGE, END, 6, START, *[IMAGE] * 4, END, 7]
PLACES = [(2, 2, 4), (7, 4, 4)]
Change = Callable[[inference_pb2.GenerateRequest], None]


@pytest.fixture(scope="module")
def server(zoo):
    settings = {"limits.max_images": MAX_IMAGES, "limits.max_image_tokens": MAX_TOKENS}
    with serve(zoo.model("qwen3_vl"), {}, settings) as running:
        yield running


def pixels(seed: int, patches: int, dtype: str = "<f4") -> bytes:
    values = np.random.default_rng(seed).standard_normal((patches, ELEMENTS))
    return values.astype(dtype).tobytes()


def image(offset: int, height: int, width: int, seed: int = 0) -> inference_pb2.Image:
    return inference_pb2.Image(
        offset=offset,
        length=height * width // 4,
        dtype=adapters_pb2.TENSOR_DTYPE_F32,
        grid=[1, height, width],
        data=pixels(seed, height * width),
    )


def good() -> inference_pb2.GenerateRequest:
    return inference_pb2.GenerateRequest(
        prompt_token_ids=pack_ids(PROMPT),
        images=[image(*place, seed=i) for i, place in enumerate(PLACES)],
        stop=inference_pb2.StopParams(max_tokens=2, ignore_eos=True),
        sampling=inference_pb2.SamplingParams(seed=1),
        logprobs=inference_pb2.LogprobParams(mode=RAW),
    )


def answer(server: Server, request=None) -> list[bytes]:
    return [m.logprobs for m in server.wire.inference.Generate(request or good(), timeout=60)]


@pytest.fixture(autouse=True)
def server_goes_on(server):
    before = answer(server)
    yield
    assert answer(server) == before


def first(**fields) -> Change:
    def change(request):
        for name, value in fields.items():
            if name == "grid":
                del request.images[0].grid[:]
                request.images[0].grid.extend(value)
            else:
                setattr(request.images[0], name, value)

    return change


def prompt(ids: list[int]) -> Change:
    return lambda request: setattr(request, "prompt_token_ids", pack_ids(ids))


def at(index: int, token: int) -> Change:
    return prompt([*PROMPT[:index], token, *PROMPT[index + 1 :]])


def images(*places: int) -> Change:
    """The images of the prompt in another order, or others."""

    def change(request):
        kept = [
            inference_pb2.Image.FromString(request.images[i].SerializeToString()) for i in places
        ]
        del request.images[:]
        request.images.extend(kept)

    return change


F32, F16, BF16 = (
    adapters_pb2.TENSOR_DTYPE_F32,
    adapters_pb2.TENSOR_DTYPE_F16,
    adapters_pb2.TENSOR_DTYPE_BF16,
)
WHOLE = 8 * ELEMENTS * 4  # bytes of the first image

GRIDS = [
    ("none", [], "IMAGE_GRID_INVALID"),
    ("one", [8], "IMAGE_GRID_INVALID"),
    ("two", [2, 4], "IMAGE_GRID_INVALID"),
    ("four", [1, 2, 4, 1], "IMAGE_GRID_INVALID"),
    ("many", [1] * 1000, "IMAGE_GRID_INVALID"),
    ("no-time", [0, 2, 4], "VIDEO_UNSUPPORTED"),
    ("video", [2, 2, 4], "VIDEO_UNSUPPORTED"),
    ("long-video", [2**32 - 1, 2, 4], "VIDEO_UNSUPPORTED"),
    ("no-height", [1, 0, 4], "IMAGE_GRID_INVALID"),
    ("no-width", [1, 2, 0], "IMAGE_GRID_INVALID"),
    ("odd-height", [1, 3, 4], "IMAGE_GRID_INVALID"),
    ("odd-width", [1, 2, 5], "IMAGE_GRID_INVALID"),
    ("huge-height", [1, 2**32 - 2, 4], "IMAGE_GRID_INVALID"),
    ("huge-both", [1, 2**32 - 2, 2**32 - 2], "IMAGE_GRID_INVALID"),
    ("product-overflows", [1, 2**20, 2**20], "IMAGE_TOO_LARGE"),
    ("over-the-limit", [1, 2, 2 * (2 * MAX_TOKENS + 2)], "IMAGE_TOO_LARGE"),
    ("turned", [1, 4, 4], "IMAGE_LENGTH_MISMATCH"),
    ("smaller", [1, 2, 2], "IMAGE_LENGTH_MISMATCH"),
]
FIELDS = [
    ("no-length", first(length=0), "IMAGE_LENGTH_MISMATCH"),
    ("short-length", first(length=1), "IMAGE_LENGTH_MISMATCH"),
    ("long-length", first(length=3), "IMAGE_LENGTH_MISMATCH"),
    ("huge-length", first(length=2**32 - 1), "IMAGE_LENGTH_MISMATCH"),
    ("before", first(offset=1), "IMAGE_PLACE_INVALID"),
    ("start", first(offset=0), "IMAGE_PLACE_INVALID"),
    ("behind", first(offset=3), "IMAGE_PLACE_INVALID"),
    ("at-the-end", first(offset=len(PROMPT) - 1), "IMAGE_PLACE_INVALID"),
    ("beyond", first(offset=len(PROMPT)), "IMAGE_PLACE_INVALID"),
    ("far", first(offset=2**31), "IMAGE_PLACE_INVALID"),
    ("offset-overflows", first(offset=2**32 - 1), "IMAGE_PLACE_INVALID"),
    ("in-the-other", first(offset=8), "IMAGE_PLACE_INVALID"),
    ("no-dtype", first(dtype=0), "IMAGE_DTYPE_INVALID"),
    ("unknown-dtype", first(dtype=77), "IMAGE_DTYPE_INVALID"),
    ("fp16-of-fp32-bytes", first(dtype=F16), "IMAGE_DATA_SIZE"),
    ("bf16-of-fp32-bytes", first(dtype=BF16), "IMAGE_DATA_SIZE"),
    ("fp32-of-bf16-bytes", first(data=b"x" * (WHOLE // 2)), "IMAGE_DATA_SIZE"),
    ("a-byte-less", first(data=b"x" * (WHOLE - 1)), "IMAGE_DATA_SIZE"),
    ("a-byte-more", first(data=b"x" * (WHOLE + 1)), "IMAGE_DATA_SIZE"),
    ("a-patch-less", first(data=b"x" * (WHOLE - 4 * ELEMENTS)), "IMAGE_DATA_SIZE"),
    ("one-byte", first(data=b"x"), "IMAGE_DATA_SIZE"),
    ("nothing", first(data=b""), "IMAGE_DATA_MISSING"),
    ("short-digest", first(sha256=b"x" * 31), "IMAGE_DIGEST_INVALID"),
    ("long-digest", first(sha256=b"x" * 33), "IMAGE_DIGEST_INVALID"),
    ("hex-digest", first(sha256=b"0" * 64), "IMAGE_DIGEST_INVALID"),
    ("short-digest-alone", first(sha256=b"x", data=b""), "IMAGE_DIGEST_INVALID"),
    ("another-digest", first(sha256=b"x" * 32), "IMAGE_DIGEST_MISMATCH"),
    ("digest-of-less", first(sha256=hashlib.sha256(b"").digest()), "IMAGE_DIGEST_MISMATCH"),
    ("sequence", first(sequence=1), "IMAGE_PLACE_INVALID"),
    ("huge-sequence", first(sequence=2**32 - 1), "IMAGE_PLACE_INVALID"),
]
PROMPTS = [
    ("no-images", images(), "IMAGE_UNEXPECTED"),
    ("first-image-alone", images(0), "IMAGE_UNEXPECTED"),
    ("second-image-alone", images(1), "IMAGE_UNEXPECTED"),
    ("wrong-order", images(1, 0), "IMAGE_PLACE_INVALID"),
    ("twice", images(0, 0, 1), "IMAGE_PLACE_INVALID"),
    ("too-many", images(0, 1, 1, 1), "IMAGES_TOO_MANY"),
    ("a-thousand", images(*[0, 1] * 500), "IMAGES_TOO_MANY"),
    ("text-in-an-image", at(3, 9), "IMAGE_PLACE_INVALID"),
    ("video-in-an-image", at(8, VIDEO), "IMAGE_PLACE_INVALID"),
    ("a-placeholder-more", at(5, IMAGE), "IMAGE_UNEXPECTED"),
    ("a-placeholder-at-the-end", at(len(PROMPT) - 1, IMAGE), "IMAGE_UNEXPECTED"),
    ("a-video", at(0, VIDEO), "IMAGE_UNEXPECTED"),
    ("text-alone", prompt([5, 6, 7]), "IMAGE_PLACE_INVALID"),
    (
        "truncated",
        lambda r: setattr(r, "truncate_prompt_tokens", 5),
        "TRUNCATE_PROMPT_TOKENS_OUT_OF_RANGE",
    ),
]
CASES = [(name, first(grid=grid), reason) for name, grid, reason in GRIDS] + FIELDS + PROMPTS


def reasons_of(error: grpc.RpcError) -> set[str]:
    status = rpc_status.from_call(error)
    bad = error_details_pb2.BadRequest()
    reasons = set()
    for detail in status.details:
        if detail.Unpack(bad):
            reasons |= {violation.reason for violation in bad.field_violations}
    return reasons


@pytest.mark.parametrize(("change", "reason"), [c[1:] for c in CASES], ids=[c[0] for c in CASES])
def test_a_bad_image_is_refused_by_its_reason(server, change, reason):
    request = good()
    change(request)
    with pytest.raises(grpc.RpcError) as error:
        answer(server, request)
    assert error.value.code() == grpc.StatusCode.INVALID_ARGUMENT, error.value
    assert reason in reasons_of(error.value), error.value.details()


def test_refused_images_leave_no_memory_behind(server):
    """Each request has pixels of its own: nothing of them is stored."""

    def refuse(seed):
        request = good()
        request.images[0].data = pixels(seed, 8)
        request.images[1].length = 3
        with pytest.raises(grpc.RpcError):
            answer(server, request)

    for seed in range(200):
        refuse(seed)
    before = server.rss()
    for seed in range(200, 1200):
        refuse(seed)
    assert server.rss() - before < 4 << 20


def test_the_headers_of_a_call_tell_that_the_server_has_its_images(server):
    control = server.wire.control
    control.Pause(control_pb2.PauseRequest(mode=control_pb2.PAUSE_MODE_KEEP))
    try:
        call = server.wire.inference.Generate(good(), timeout=60)
        call.initial_metadata()  # Without headers of their own they come with the answer.
        assert not call.done()
        by_digest = good()
        for each in by_digest.images:
            each.sha256 = hashlib.sha256(each.data).digest()
            each.data = b""
        second = server.wire.inference.Generate(by_digest, timeout=60)
        second.initial_metadata()
        assert not second.done()
    finally:
        control.Resume(control_pb2.ResumeRequest())
    assert [m.logprobs for m in call] == [m.logprobs for m in second]


def test_an_image_is_named_by_its_digest_once_the_server_has_it(server):
    request = good()
    by_digest = good()
    for i, each in enumerate(by_digest.images):
        each.data = b""
        each.sha256 = hashlib.sha256(request.images[i].data).digest()
    assert answer(server, by_digest) == answer(server)
    unknown = hashlib.sha256(b"unknown").digest()
    by_digest.images[1].sha256 = unknown
    with pytest.raises(grpc.RpcError) as error:
        answer(server, by_digest)
    assert error.value.code() == grpc.StatusCode.FAILED_PRECONDITION
    assert unknown.hex() in error.value.details()
    assert by_digest.images[0].sha256.hex() not in error.value.details()
    # Another grid of the same bytes is another image.
    turned = good()
    turned.images[0].data = b""
    turned.images[0].sha256 = hashlib.sha256(request.images[0].data).digest()
    del turned.images[0].grid[:]
    turned.images[0].grid.extend([1, 4, 2])
    with pytest.raises(grpc.RpcError) as error:
        answer(server, turned)
    assert error.value.code() == grpc.StatusCode.FAILED_PRECONDITION
