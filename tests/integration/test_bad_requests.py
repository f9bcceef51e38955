"""Bad requests: each is refused with its code and reason and a message that names the culprit, and
the server goes on as before."""

import json
from dataclasses import dataclass

import dorad
import grpc
import pytest
from dorad.v1 import adapters_pb2, inference_pb2
from lib.bad_input import INVALID, PROMPT, WEIGHTS, answer, check, refused
from lib.server import Server, serve, wait_until
from lib.tiny_models import CONTEXT, VOCAB
from lib.wire import RAW, generate_request


@pytest.fixture(scope="module")
def server(zoo):
    settings = {
        "limits.max_tokens": 100,
        "limits.max_n": 16,
        "limits.max_logprobs_k": 20,
        "limits.max_chosen_ids": 50,
        "limits.max_stop_ids": 8,
        "limits.max_stop_sequences": 4,
        "limits.max_stop_sequence_tokens": 6,
        "limits.max_logit_biases": 9,
        "limits.max_allowed_ids": 11,
        "limits.max_bad_word_tokens": 6,
        "limits.max_draft_tokens": 7,
        "limits.max_score_tokens": 2000,
        "engine.kv_bytes": 32 << 20,
    }
    with serve(zoo.model("llama2"), {"good": zoo.adapter("llama2", "dora")}, settings) as running:
        yield running


@pytest.fixture(autouse=True)
def server_goes_on(server: Server):
    """After every case the server answers as before."""
    before = answer(server)
    yield
    assert answer(server) == before


def test_the_server_tells_its_limits(server: Server) -> None:
    limits = server.wire.info().limits
    assert (limits.max_n, limits.max_logprobs_k, limits.max_chosen_ids) == (16, 20, 50)
    assert limits.max_draft_tokens == 7
    with dorad.Client(server.grpc) as client:
        assert client.info().limits.max_draft_tokens == 7


@dataclass(frozen=True)
class BadRequest:
    name: str
    culprit: str
    options: dict


def bad(name: str, culprit: str, **options) -> BadRequest:
    return BadRequest(name, culprit, options)


BAD_GENERATES = [
    bad("empty-prompt", "prompt_token_ids", prompt=[]),
    bad("negative-id", "prompt_token_ids", prompt=[5, -1]),
    bad("id-out-of-range", "prompt_token_ids", prompt=[5, VOCAB]),
    bad("id-int-min", "prompt_token_ids", prompt=[-(2**31)]),
    bad("prompt-fills-context", "prompt_token_ids", prompt=[5] * CONTEXT),
    bad("prompt-beyond-context", "prompt_token_ids", prompt=[5] * (10 * CONTEXT)),
    bad("n-zero", "n", n=0),
    bad("n-million", "n", n=1_000_000),
    bad("max-tokens-zero", "max_tokens", max_tokens=0),
    bad("max-tokens-2-31", "max_tokens", max_tokens=2**31),
    bad("max-tokens-2-32", "max_tokens", max_tokens=2**32 - 1),
    bad("min-above-max", "min_tokens", max_tokens=5, min_tokens=6),
    bad("negative-temperature", "temperature", temperature=-0.5),
    bad("huge-temperature", "temperature", temperature=1000.0),
    bad("nan-temperature", "temperature", temperature=float("nan")),
    bad("infinite-temperature", "temperature", temperature=float("inf")),
    bad("zero-top-k", "top_k", top_k=0),
    bad("zero-top-p", "top_p", top_p=0.0),
    bad("large-top-p", "top_p", top_p=1.5),
    bad("nan-top-p", "top_p", top_p=float("nan")),
    bad("negative-min-p", "min_p", min_p=-0.1),
    bad("large-min-p", "min_p", min_p=1.1),
    bad("large-presence-penalty", "presence_penalty", presence_penalty=2.1),
    bad("nan-frequency-penalty", "frequency_penalty", frequency_penalty=float("nan")),
    bad("zero-repetition-penalty", "repetition_penalty", repetition_penalty=0.0),
    bad("large-bias", "logit_biases", logit_bias={5: 101.0}),
    bad("biased-id-out-of-range", "logit_bias_token_ids", logit_bias={VOCAB: 1.0}),
    bad("too-many-biases", "logit_bias_token_ids", logit_bias=dict.fromkeys(range(10), 1.0)),
    bad("allowed-id-out-of-range", "allowed_token_ids", allowed=[5, VOCAB]),
    bad("too-many-allowed", "allowed_token_ids", allowed=list(range(12))),
    bad("empty-bad-word", "bad_words", bad_words=[[5], []]),
    bad("bad-word-out-of-range", "bad_words", bad_words=[[5, VOCAB]]),
    bad("too-many-bad-words", "bad_words", bad_words=[[5, 6, 7], [8, 9, 10], [11]]),
    bad("more-drafts-than-samples", "drafts", drafts=[[5], [6]]),
    bad("too-many-draft-tokens", "drafts", drafts=[[5] * 8]),
    bad("draft-out-of-range", "drafts", drafts=[[5, VOCAB]]),
    bad("stop-id-out-of-range", "stop_token_ids", stop=[VOCAB]),
    bad("too-many-stop-ids", "stop_token_ids", stop=list(range(9))),
    bad("too-many-stop-sequences", "stop_sequences", stop_sequences=[[5]] * 5),
    bad("empty-stop-sequence", "stop_sequences", stop_sequences=[[5], []]),
    bad("long-stop-sequence", "stop_sequences", stop_sequences=[[5] * 7]),
    bad("stop-sequence-out-of-range", "stop_sequences", stop_sequences=[[5, VOCAB]]),
    bad("top-logprobs", "top_k", logprobs=RAW, top_logprobs=21),
    bad("chosen-out-of-range", "chosen_token_ids", logprobs=RAW, chosen=[VOCAB]),
    bad("too-many-chosen", "chosen_token_ids", logprobs=RAW, chosen=list(range(51))),
    bad("truncate-to-nothing", "truncate_prompt_tokens", truncate=0),
    bad("truncate-to-context", "truncate_prompt_tokens", truncate=CONTEXT),
    bad("bad-mode", "response_mode", mode=77),
    bad("bad-logprob-mode", "mode", logprobs=77),
    bad("long-request-id", "request_id", request_id="x" * 5000),
]


@pytest.mark.parametrize("case", BAD_GENERATES, ids=lambda case: case.name)
def test_bad_generates(server: Server, case: BadRequest) -> None:
    options = dict(prompt=PROMPT, max_tokens=2) | case.options
    refusal = refused(server.wire.generate, **options)
    assert refusal.code == INVALID, refusal
    assert refusal.reason and refusal.domain == "dorad", refusal
    fields = [field.partition("[")[0].rpartition(".")[2] for field, *_ in refusal.violations]
    assert set(fields) == {case.culprit}, refusal
    assert case.culprit in refusal.message, refusal


def test_all_problems_of_a_request_are_listed_at_once(server: Server) -> None:
    refusal = refused(server.wire.generate, [VOCAB], n=0, temperature=-1.0, top_p=2.0, max_tokens=0)
    fields = " ".join(field for field, *_ in refusal.violations)
    for word in ("prompt_token_ids", "n", "temperature", "top_p", "max_tokens"):
        assert word in fields, refusal


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_packed_ids_of_broken_length(server: Server, size: int) -> None:
    request = generate_request(PROMPT, max_tokens=2)
    request.prompt_token_ids = bytes(size)
    refusal = refused(lambda: list(server.wire.inference.Generate(request, timeout=10)))
    assert refusal.code == INVALID
    assert any("prompt_token_ids" in field for field, *_ in refusal.violations)


BAD_SCORES = [
    ("no-sequences", "sequences", dict(sequences=[])),
    ("empty-sequence", "sequences", dict(sequences=[PROMPT, []])),
    ("id-out-of-range", "sequences", dict(sequences=[[1, VOCAB]])),
    ("beyond-context", "sequences", dict(sequences=[[5] * (CONTEXT + 1)])),
    ("too-many-tokens", "sequences", dict(sequences=[[5] * 100] * 30)),
    ("zero-temperature", "temperature", dict(temperature=0.0)),
    ("nan-temperature", "temperature", dict(temperature=float("nan"))),
    ("top-k", "top_k", dict(top_k=21)),
    ("chosen", "chosen_token_ids", dict(chosen=[-1])),
]


@pytest.mark.parametrize(
    "culprit, options", [case[1:] for case in BAD_SCORES], ids=[case[0] for case in BAD_SCORES]
)
def test_bad_scores(server: Server, culprit: str, options: dict) -> None:
    refusal = refused(server.wire.score_response, **(dict(sequences=[PROMPT]) | options))
    assert refusal.code in (INVALID, grpc.StatusCode.RESOURCE_EXHAUSTED), refusal
    assert refusal.reason and culprit in refusal.message, refusal


def test_bad_adapter_among_good_ones_of_a_score(server: Server) -> None:
    refusal = refused(server.wire.score_response, [PROMPT], ["good", "", "missing"])
    check(refusal, "ADAPTER_NOT_FOUND", "missing", grpc.StatusCode.NOT_FOUND)
    assert server.wire.info().engine.adapter_leases == 0


def test_abort_without_a_target(server: Server) -> None:
    for request in (inference_pb2.AbortRequest(), inference_pb2.AbortRequest(all=False)):
        assert refused(server.wire.inference.Abort, request, timeout=10).code == INVALID


def test_bad_paging(server: Server) -> None:
    for request in (
        adapters_pb2.ListRequest(page_token="garbage"),
        adapters_pb2.ListRequest(page_size=0),
        adapters_pb2.ListRequest(page_size=1_000_000),
    ):
        assert refused(server.wire.adapters.List, request, timeout=10).code == INVALID, request


def test_watch_from_the_future(server: Server) -> None:
    request = adapters_pb2.WatchRequest(from_generation=10**12)
    refusal = refused(lambda: next(server.wire.adapters.Watch(request, timeout=10)))
    assert refusal.code in (INVALID, grpc.StatusCode.OUT_OF_RANGE), refusal


def test_garbage_on_the_wire(server: Server) -> None:
    call = server.wire.channel.unary_unary(
        "/dorad.v1.InferenceService/Score",
        request_serializer=lambda request: request,
        response_deserializer=lambda response: response,
    )
    for message in (b"\xff" * 40, b"\x0a\xff\xff\xff\xff\x0f", bytes(1000)):
        assert refused(call, message, timeout=10).reason == "REQUEST_MALFORMED"


def test_memory_stays_flat_under_bad_input(server: Server, zoo) -> None:
    folder = zoo.adapter("llama2", "dora")
    values = json.loads((folder / "adapter_config.json").read_text())
    image = (folder / WEIGHTS).read_bytes()

    def burst(count: int) -> None:
        for _ in range(count):
            refused(server.wire.publish_bytes, "bad", values | {"r": 4}, image)
            refused(server.wire.publish_bytes, "bad", values, image[:-1000])
            refused(server.wire.generate, [VOCAB])
            refused(server.wire.score_response, [PROMPT], ["missing"])

    burst(60)
    before = server.rss()
    burst(240)
    wait_until(lambda: server.wire.info().engine.adapter_leases == 0, what="no leases")
    assert server.rss() - before < 24 << 20
