"""Generate, stream and generate_many of the sync client, against the fake server."""

import math
import pickle
import threading

import dorad
import grpc
import numpy as np
import pytest
from dorad.v1 import inference_pb2
from fake_server import fail, overloaded, unavailable
from lib.server import wait_until


def test_returns_samples_with_the_documented_types(client):
    samples = client.generate([1, 2, 3], n=2, max_tokens=4, logprobs="raw", seed=11)
    assert [s.index for s in samples] == [0, 1]
    second = samples[1]
    assert second.token_ids.dtype == np.int32 and second.token_ids.tolist() == [16, 17, 18, 19]
    assert second.logprobs.dtype == np.float32
    np.testing.assert_allclose(second.logprobs, [-0.17, -0.18, -0.19, -0.20], rtol=1e-6)
    assert second.finish_reason is dorad.FinishReason.LENGTH and second.finish_reason == "length"
    assert second.seed == 11 and second.stop_token_id is None
    assert second.usage.prompt_tokens == 3 and second.usage.time_to_first_token == 1.5
    assert second.spans == [dorad.Span("", 0, "", 0, 4)] and second.spans[0].label is None


def test_sends_only_what_was_set(client, server):
    client.generate(np.array([5], dtype=np.int64))
    request = server.generate_calls[0]
    assert not request.HasField("n") and not request.HasField("logprobs")
    for name in ("temperature", "top_k", "top_p", "min_p", "seed"):
        assert not request.sampling.HasField(name), name
    assert not request.stop.HasField("max_tokens") and not request.HasField("priority")
    assert not request.HasField("truncate_prompt_tokens")
    assert not request.drafts and not request.HasField("ngram_drafts")
    assert request.response_mode == inference_pb2.RESPONSE_MODE_FINAL


def test_sends_every_option(client, server):
    client.publish("a", path="/x", server_side=True)
    client.generate(
        [1],
        adapter="a@1",
        n=1,
        max_tokens=5,
        min_tokens=2,
        temperature=0.0,
        top_k=3,
        top_p=0.5,
        min_p=0.25,
        seed=2**64 - 1,
        stop_token_ids=np.array([5]),
        stop_sequences=[[6, 7], np.array([8])],
        truncate_prompt_tokens=12,
        prompt_logprobs=True,
        ignore_eos=True,
        logprobs="processed",
        top_logprobs=2,
        chosen_token_ids=(4, 9),
        cache_salt="s",
        bypass_prefix_cache=True,
        priority=-3,
        request_id="r1",
        drafts=[[3], np.array([4])],
        ngram_drafts=False,
    )
    request = server.generate_calls[0]
    assert request.adapter == "a@1" and request.request_id == "r1" and request.priority == -3
    assert request.sampling.HasField("temperature") and request.sampling.temperature == 0.0
    assert request.sampling.seed == 2**64 - 1 and request.sampling.min_p == 0.25
    assert request.stop.stop_token_ids == b"\x05\0\0\0" and request.stop.ignore_eos
    assert [s.token_ids for s in request.stop.stop_sequences] == [b"\6\0\0\0\7\0\0\0", b"\10\0\0\0"]
    assert request.truncate_prompt_tokens == 12 and request.logprobs.prompt
    assert request.logprobs.mode == inference_pb2.LOGPROB_MODE_PROCESSED
    assert request.cache_salt == "s" and request.bypass_prefix_cache
    assert [d.token_ids for d in request.drafts] == [b"\3\0\0\0", b"\4\0\0\0"]
    assert request.HasField("ngram_drafts") and not request.ngram_drafts


def test_logprobs_of_the_prompt_belong_to_all_samples(client):
    options = {"max_tokens": 3, "prompt_logprobs": True, "n": 2}
    samples = client.generate([4, 7, 9], top_logprobs=2, chosen_token_ids=[1, 3], **options)
    prompt = samples[0].prompt_logprobs
    assert samples[1].prompt_logprobs is prompt and samples[0].logprobs is not None
    assert prompt.logprobs.dtype == np.float32 and math.isnan(prompt.logprobs[0])
    np.testing.assert_allclose(prompt.logprobs[1:], [-0.07, -0.09], rtol=1e-6)
    assert prompt.top_logprobs.token_ids.tolist() == [[-1, -1], [0, 1], [0, 1]]
    assert prompt.chosen_logprobs.shape == (3, 2)
    (plain,) = client.generate([4, 7], max_tokens=2, logprobs="raw")
    assert plain.prompt_logprobs is None


def test_logprobs_of_a_truncated_prompt_are_those_of_its_end(client):
    options = {"max_tokens": 2, "prompt_logprobs": True, "truncate_prompt_tokens": 2}
    (sample,) = client.generate([4, 7, 9], **options)
    assert sample.usage.prompt_tokens == 2 and sample.prompt_logprobs.logprobs.shape == (2,)
    assert sample.prompt_logprobs.top_logprobs is None
    assert sample.prompt_logprobs.chosen_logprobs is None


def test_a_stream_has_the_logprobs_of_the_prompt_in_its_first_delta(client):
    with client.stream([4, 7, 9], n=2, max_tokens=3, prompt_logprobs=True) as deltas:
        found = [(d.index, d.prompt_logprobs is not None) for d in deltas]
    assert found[0] == (0, True) and not any(has for _, has in found[1:])


def test_stop_sequences_must_be_lists_of_token_ids(client):
    with pytest.raises(TypeError, match=r"stop_sequences\[0\]"):
        client.generate([1], stop_sequences=[5, 6])
    with pytest.raises(TypeError, match="stop_sequences must be a list"):
        client.generate([1], stop_sequences="\n")


def test_names_what_happens_when_the_active_version_moves(client, server):
    client.generate([1], in_flight_policy="switch_keep_kv")
    policy = server.generate_calls[0].in_flight_policy
    assert policy == inference_pb2.IN_FLIGHT_POLICY_SWITCH_KEEP_KV
    with pytest.raises(ValueError, match="pin, switch_keep_kv, switch_recompute"):
        client.generate([1], in_flight_policy="switch")


def test_shapes_of_top_and_chosen_logprobs(client):
    (sample,) = client.generate([1], max_tokens=4, top_logprobs=2, chosen_token_ids=[3, 4, 5])
    ids, logprobs = sample.top_logprobs
    assert ids.shape == logprobs.shape == (4, 2) and ids.dtype == np.int32
    assert ids[1].tolist() == [2, 3]
    assert sample.chosen_logprobs.shape == (4, 3)
    assert sample.logprobs is not None  # Asking for either implies "raw".


def test_a_last_message_without_tokens_keeps_its_shapes():
    from dorad import _wire

    request = dorad.GenerateRequest([1], top_logprobs=2, chosen_token_ids=[3, 4, 5])
    message = inference_pb2.GenerateResponse()
    message.finish.reason = 3
    delta = _wire.delta(message, request)
    assert delta.top_logprobs.logprobs.shape == (0, 2) and delta.chosen_logprobs.shape == (0, 3)
    assert delta.finish.reason is dorad.FinishReason.ABORTED


@pytest.mark.parametrize("field", ["logprobs", "chosen_logprobs", "top_logprobs"])
def test_answers_of_the_wrong_size_are_refused(field):
    from dorad import _wire

    request = dorad.GenerateRequest([1], top_logprobs=1, chosen_token_ids=[3])
    two, one = b"\0" * 8, b"\0" * 4
    message = inference_pb2.GenerateResponse(token_ids=two, logprobs=two, chosen_logprobs=two)
    message.top_logprobs.k = 1
    message.top_logprobs.token_ids = message.top_logprobs.logprobs = two
    _wire.delta(message, request)
    if field == "top_logprobs":
        message.top_logprobs.logprobs = one
    else:
        setattr(message, field, one)
    with pytest.raises(dorad.Internal, match="the server sent 1"):
        _wire.delta(message, request)


def test_stop_token_is_reported(client):
    (sample,) = client.generate([1], max_tokens=2)
    assert sample.finish_reason == "stop" and sample.stop_token_id == 2


def test_zero_tokens_keep_their_shapes(client):
    (sample,) = client.generate([1], max_tokens=0, logprobs="raw", top_logprobs=2)
    assert sample.token_ids.shape == (0,) and sample.logprobs.shape == (0,)
    assert sample.top_logprobs.token_ids.shape == (0, 2)


@pytest.mark.parametrize(
    ("token_ids", "error", "words"),
    [
        ([1.5], TypeError, "integers"),
        ([[1, 2]], ValueError, "one dimension"),
        ([2**31], ValueError, "int32"),
        (np.array([-(2**31) - 1]), ValueError, "int32"),
    ],
)
def test_refuses_token_ids_that_cannot_be_sent(client, server, token_ids, error, words):
    with pytest.raises(error, match=words):
        client.generate(token_ids)
    assert server.generate_calls == []


def test_refuses_unknown_options_and_modes(client):
    with pytest.raises(TypeError, match="temprature"):
        client.generate([1], temprature=1.0)
    with pytest.raises(ValueError, match="processed"):
        client.generate([1], logprobs="cooked")
    with pytest.raises(ValueError, match="timeout"):
        client.generate([1], timeout=0)


def test_options_and_request_have_the_same_fields():
    fields = set(dorad.GenerateRequest.__dataclass_fields__) - {"token_ids"}
    assert fields == set(dorad.GenerateOptions.__annotations__)


def test_stream_yields_tokens_and_finish(client):
    deltas = list(client.stream([1, 2], n=2, max_tokens=3, logprobs="raw"))
    first = [d for d in deltas if d.index == 0]
    assert np.concatenate([d.token_ids for d in first]).tolist() == [3, 4, 5]
    assert [d.finish is None for d in first] == [True, True, False]
    assert first[1].spans[0].begin == 1 and first[1].logprobs.shape == (1,)


def test_streamed_messages_add_up_to_one_sample(server, client):
    """FINAL mode may be cut by a server too; spans of one version are merged."""
    from dorad import _samples, _wire

    request = dorad.GenerateRequest([1], max_tokens=3, logprobs="raw")
    samples = _samples.Samples(request)
    message = _wire.generate_request(request, stream=True)
    with grpc.insecure_channel(server.target) as channel:
        from dorad.v1.inference_pb2_grpc import InferenceServiceStub

        for answer in InferenceServiceStub(channel).Generate(message):
            samples.add(answer)
    (sample,) = samples.finish()
    assert sample.token_ids.tolist() == [1, 2, 3] and len(sample.logprobs) == 3
    assert sample.spans == [dorad.Span("", 0, "", 0, 3)]


def test_leaving_a_stream_cancels_it_on_the_server(client, server):
    server.endless, server.token_delay = True, 0.005
    with client.stream([1]) as stream:
        next(stream)
    wait_until(lambda: server.cancelled == 1)
    assert list(stream) == []  # Closed: ends instead of raising.


def test_dropping_a_stream_cancels_it_on_the_server(client, server):
    server.endless, server.token_delay = True, 0.005
    for _ in client.stream([1]):
        break
    wait_until(lambda: server.cancelled == 1)


def test_retries_before_the_first_message(client, server):
    server.refuse_generate = [unavailable, overloaded(retry_after=0.01)]
    assert len(client.generate([1], max_tokens=2)) == 1
    assert len(server.generate_calls) == 3


def test_the_server_can_forbid_retries(client, server):
    server.refuse_generate = [overloaded(retry_after=None)]
    with pytest.raises(dorad.Overloaded) as caught:
        client.generate([1])
    assert caught.value.reason == "QUEUE_FULL" and caught.value.retry_after is None
    assert not caught.value.retryable
    assert len(server.generate_calls) == 1


def test_never_retries_after_the_first_message(client, server):
    server.break_after = 2
    tokens = []
    with pytest.raises(dorad.Unavailable, match="connection lost"):
        for delta in client.stream([1], max_tokens=5):
            tokens += delta.token_ids.tolist()
    assert tokens == [1, 2] and len(server.generate_calls) == 1


def test_retries_can_be_turned_off(server):
    server.refuse_generate = [unavailable]
    with dorad.Client(server.target, retry_for=0) as client, pytest.raises(dorad.Unavailable):
        client.generate([1])
    assert len(server.generate_calls) == 1


def test_errors_carry_reason_and_every_violation(client):
    with pytest.raises(dorad.InvalidArgument) as caught:
        client.generate([])
    error = caught.value
    assert error.code == "INVALID_ARGUMENT" and error.reason == "EMPTY_PROMPT"
    assert error.metadata == {"k": "v"}
    assert [v.field for v in error.violations] == ["prompt_token_ids", "n"]
    assert error.violations[1].reason == "OUT_OF_RANGE"
    assert "prompt_token_ids: is empty [EMPTY_PROMPT]" in str(error)
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is dorad.InvalidArgument and copy.violations == error.violations


@pytest.mark.parametrize(
    ("code", "cls"),
    [
        ("ABORTED", dorad.Conflict),
        ("ALREADY_EXISTS", dorad.Conflict),
        ("FAILED_PRECONDITION", dorad.Conflict),
        ("OUT_OF_RANGE", dorad.InvalidArgument),
        ("PERMISSION_DENIED", dorad.PermissionDenied),
        ("UNIMPLEMENTED", dorad.Unimplemented),
        ("INTERNAL", dorad.Internal),
        ("UNKNOWN", dorad.Internal),
        ("CANCELLED", dorad.Cancelled),
    ],
)
def test_exception_by_code(client, server, code, cls):
    server.refuse_generate = [lambda c: fail(c, grpc.StatusCode[code], "WHY", "because")]
    with pytest.raises(cls) as caught:
        client.generate([1])
    assert type(caught.value) is cls and caught.value.code == code and caught.value.reason == "WHY"


def test_a_reset_without_a_status_is_tried_again(client, server):
    server.refuse_generate = [lambda c: c.abort(grpc.StatusCode.CANCELLED, "")]
    (sample,) = client.generate([1], max_tokens=2)
    assert sample.token_ids.tolist() == [1, 2]


def test_garbage_in_the_details_does_not_hide_the_error(client, server):
    def refuse(context):
        context.set_trailing_metadata([("grpc-status-details-bin", b"\xff\xff garbage")])
        context.abort(grpc.StatusCode.NOT_FOUND, "gone")

    server.refuse_generate = [refuse]
    with pytest.raises(dorad.NotFound, match="gone") as caught:
        client.generate([1])
    assert caught.value.reason == ""


def test_timeout(client, server):
    server.endless = True
    with pytest.raises(dorad.DeadlineExceeded):
        client.generate([1], timeout=0.2)
    wait_until(lambda: server.running == 0)


def test_unreachable_server():
    with dorad.Client("127.0.0.1:1", retry_for=0) as client, pytest.raises(dorad.Unavailable):
        client.generate([1], timeout=5)


def test_many_keeps_order_and_bounds_concurrency(client, server):
    server.token_delay = 0.002
    prompts = [[i] for i in range(40)]
    seen = []
    results = client.generate_many(
        prompts,
        concurrency=5,
        max_tokens=2,
        progress=lambda done, total: seen.append((done, total)),
    )
    assert [r[0].token_ids[0] for r in results] == list(range(40))
    assert 2 <= server.most_running <= 5
    assert seen == [(i + 1, 40) for i in range(40)]


def test_many_takes_requests_with_their_own_options(client):
    requests = [dorad.GenerateRequest([1], max_tokens=1), [2]]
    results = client.generate_many(requests, max_tokens=3)
    assert [len(r[0].token_ids) for r in results] == [1, 3]
    assert client.generate_many([]) == []
    with pytest.raises(ValueError, match="concurrency"):
        client.generate_many([[1]], concurrency=0)


def test_many_waits_for_room_in_the_queue(client, server):
    server.capacity, server.token_delay = 2, 0.002
    results = client.generate_many([[i] for i in range(30)], concurrency=8, max_tokens=2)
    assert len(results) == 30 and server.most_running == 2
    assert len(server.generate_calls) > 30  # Some were refused and sent again.


def test_many_gives_up_at_the_timeout(client, server):
    server.capacity = 0
    # The last try may also meet the deadline itself.
    with pytest.raises((dorad.Overloaded, dorad.DeadlineExceeded)):
        client.generate_many([[1]], timeout=0.3)
    assert len(server.generate_calls) > 1


def test_many_cancels_the_rest_on_an_error(client, server):
    server.endless = True
    prompts = [[1]] * 6 + [[]]
    with pytest.raises(dorad.InvalidArgument):
        client.generate_many(prompts, concurrency=7)
    wait_until(lambda: server.running == 0)


def test_many_reports_progress_of_prompts_that_failed(client):
    seen = []
    client.generate_many(
        [[1], [], [3]], return_errors=True, max_tokens=1, progress=lambda *at: seen.append(at)
    )
    assert seen == [(1, 3), (2, 3), (3, 3)]


def test_many_can_return_errors(client):
    results = client.generate_many([[1], [], [3]], return_errors=True, max_tokens=1)
    assert isinstance(results[1], dorad.InvalidArgument)
    assert results[2][0].token_ids.tolist() == [3]


def test_no_deadline_with_infinity(client, server):
    assert client.generate([1], timeout=math.inf, max_tokens=1)


def test_metadata_and_channel_options(server):
    with dorad.Client(server.target, metadata=[("authorization", "Bearer x")]) as client:
        client.generate([1])
    assert server.metadata[0]["authorization"] == "Bearer x"
    assert server.metadata[0]["user-agent"].startswith("dorad-python")
    with pytest.raises(ValueError, match="30 s"):
        dorad.Client(server.target, keepalive=10)


def test_one_client_serves_many_threads(client, folder):
    client.publish("a", path=folder)
    results = []

    def work(i):
        results.append(client.generate([i], adapter="a", max_tokens=3)[0].token_ids[0] == i)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [True] * 16
