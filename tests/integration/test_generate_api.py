"""What Generate and Score promise beyond the numbers: stopping, seeds, samples, log-probability
modes, aborts, deadlines, pauses and the queue."""

import signal
import threading
import time

import grpc
import numpy as np
import pytest
from dorad.v1 import control_pb2, inference_pb2
from lib.server import Server, is_idle, serve, wait_until
from lib.tiny_models import CONTEXT, VOCAB
from lib.wire import (
    ABORTED,
    LENGTH,
    NON_FINITE,
    PROCESSED,
    RAW,
    STOP,
    collect,
    failure,
    generate_request,
)

PROMPT = [11, 12, 13, 14, 15, 16, 17, 18, 19, 20]
VOCABULARY = list(range(VOCAB))
LONG = 4000


@pytest.fixture(scope="module")
def server(zoo):
    folders = {"a": zoo.adapter("llama2", "dora"), "b": zoo.adapter("llama2", "lora")}
    with serve(zoo.model("llama2"), folders, {"engine.kv_bytes": 32 << 20}) as running:
        yield running


@pytest.fixture(scope="module")
def slow(zoo):
    """A model whose requests last for seconds."""
    folders = {"a": zoo.adapter("slow", "dora"), "b": zoo.adapter("slow", "lora")}
    with serve(zoo.model("slow"), folders, {"engine.kv_bytes": 512 << 20}) as running:
        yield running


def greedy(server: Server, tokens: int, **options) -> list[int]:
    options = dict(temperature=0.0, max_tokens=tokens, ignore_eos=True) | options
    return server.wire.generate(PROMPT, **options)[0].tokens


def started(server: Server, prompt=PROMPT, **options):
    """A running stream, after its first message."""
    options = dict(max_tokens=LONG, ignore_eos=True, seed=1) | options
    call = server.wire.stream(prompt, **options)
    return call, [next(call)]


def finish(call, messages) -> dict:
    return collect([*messages, *call])


def assert_idle(server: Server) -> None:
    wait_until(lambda: is_idle(server), what="an idle engine")


# --- Stopping.


def test_max_tokens_is_exact(server: Server) -> None:
    (sample,) = server.wire.generate(PROMPT, max_tokens=7, ignore_eos=True, seed=1)
    assert len(sample.tokens) == 7 and sample.reason == LENGTH
    usage = sample.finish.usage
    assert (usage.prompt_tokens, usage.generated_tokens) == (len(PROMPT), 7)


def test_default_max_tokens_fills_the_context(server: Server) -> None:
    prompt = PROMPT * (CONTEXT // len(PROMPT))
    (sample,) = server.wire.generate(prompt, ignore_eos=True, seed=1)
    assert len(prompt) + len(sample.tokens) == CONTEXT and sample.reason == LENGTH


def test_stop_token_ends_the_sample_and_is_its_last_token(server: Server) -> None:
    tokens = greedy(server, 30)
    stop = next(token for index, token in enumerate(tokens) if index >= 5)
    end = tokens.index(stop)
    (sample,) = server.wire.generate(
        PROMPT, temperature=0.0, max_tokens=30, ignore_eos=True, stop=[299, stop]
    )
    assert sample.tokens == tokens[: end + 1]
    assert sample.reason == STOP and sample.finish.stop_token_id == stop


def test_min_tokens_bans_stop_tokens_until_then(server: Server) -> None:
    tokens = greedy(server, 30)
    stop = tokens[3]
    (sample,) = server.wire.generate(
        PROMPT, temperature=0.0, max_tokens=60, min_tokens=12, stop=[stop]
    )
    assert stop not in sample.tokens[:12] and 2 not in sample.tokens[:12]
    assert len(sample.tokens) > 12 or sample.reason == STOP
    assert sample.tokens[:3] == tokens[:3]


def test_end_of_sequence_stops_unless_ignored(server: Server) -> None:
    options = dict(n=64, temperature=8.0, seed=4, max_tokens=40)
    samples = server.wire.generate(PROMPT, **options)
    stopped = [sample for sample in samples if sample.reason == STOP]
    assert stopped, "no end of sequence in 2560 nearly uniform draws"
    for sample in samples:
        assert 2 not in sample.tokens[:-1]
        assert (sample.reason == STOP) == (sample.tokens[-1] == 2)
    ignored = server.wire.generate(PROMPT, ignore_eos=True, **options)
    assert all(sample.reason == LENGTH for sample in ignored)
    assert any(2 in sample.tokens for sample in ignored)
    for short, full in zip(samples, ignored, strict=True):
        assert full.tokens[: len(short.tokens)] == short.tokens


# --- Seeds and samples.


def test_seed_reproduces_and_is_reported(server: Server) -> None:
    options = dict(max_tokens=16, ignore_eos=True, temperature=1.0)
    (chosen,) = server.wire.generate(PROMPT, **options)
    (again,) = server.wire.generate(PROMPT, seed=chosen.seed, **options)
    assert again.tokens == chosen.tokens and again.seed == chosen.seed
    (other,) = server.wire.generate(PROMPT, seed=chosen.seed + 1, **options)
    assert other.tokens != chosen.tokens


def test_samples_are_distinct_and_complete(server: Server) -> None:
    samples = server.wire.generate(
        PROMPT, n=8, temperature=1.0, seed=9, max_tokens=10, ignore_eos=True
    )
    assert len({tuple(sample.tokens) for sample in samples}) == 8
    assert {len(sample.tokens) for sample in samples} == {10}


def test_draws_follow_the_distribution(server: Server) -> None:
    """First tokens of 4096 draws against the raw distribution: total variation distance."""
    (sample,) = server.wire.generate(
        PROMPT, max_tokens=1, temperature=1.0, seed=0, logprobs=RAW, chosen=VOCABULARY
    )
    p = np.exp(sample.chosen[0].astype(np.float64))
    assert abs(p.sum() - 1) < 1e-4
    draws = [
        sample.tokens[0]
        for seed in range(32)
        for sample in server.wire.generate(
            PROMPT, n=128, max_tokens=1, temperature=1.0, seed=seed, ignore_eos=True
        )
    ]
    observed = np.bincount(draws, minlength=VOCAB) / len(draws)
    expected_noise = np.sqrt(2 * p * (1 - p) / (np.pi * len(draws))).sum() / 2
    distance = np.abs(observed - p).sum() / 2
    assert distance < 1.25 * expected_noise, (distance, expected_noise)


# --- Log-probabilities.


def test_top_logprobs_are_sorted_and_match_chosen(server: Server) -> None:
    (sample,) = server.wire.generate(
        PROMPT,
        temperature=0.0,
        max_tokens=6,
        ignore_eos=True,
        logprobs=RAW,
        top_logprobs=5,
        chosen=VOCABULARY,
    )
    for row in range(6):
        order = np.lexsort((VOCABULARY, -sample.chosen[row]))[:5]
        assert sample.top_ids[row].tolist() == order.tolist()
        assert np.array_equal(sample.top_logprobs[row], sample.chosen[row][order])
        assert sample.tokens[row] == order[0]
        assert sample.logprobs[row] == sample.top_logprobs[row][0]


def processed_reference(raw: np.ndarray, temperature, top_k, top_p, min_p) -> np.ndarray:
    """Temperature, then top-k, then top-p within it, then min-p; renormalised."""
    scaled = raw.astype(np.float64) / temperature
    p = np.exp(scaled - scaled.max())
    p /= p.sum()
    order = np.lexsort((np.arange(len(p)), -p))
    kept = order[:top_k] if top_k else order
    mass = p[kept] / p[kept].sum()
    kept = kept[: int(np.searchsorted(np.cumsum(mass), top_p) + 1)]
    kept = kept[p[kept] >= min_p * p[kept].max()]
    result = np.full(len(p), -np.inf)
    result[kept] = np.log(p[kept] / p[kept].sum())
    return result


@pytest.mark.parametrize(
    "options",
    [
        dict(temperature=0.7),
        dict(temperature=1.5, top_k=5),
        dict(temperature=1.0, top_p=0.6),
        dict(temperature=1.2, min_p=0.2),
        dict(temperature=0.9, top_k=20, top_p=0.8, min_p=0.05),
    ],
    ids=lambda options: "-".join(options),
)
def test_processed_logprobs_are_of_the_sampled_distribution(server: Server, options) -> None:
    common = dict(seed=21, max_tokens=12, ignore_eos=True, chosen=VOCABULARY, **options)
    (raw,) = server.wire.generate(PROMPT, logprobs=RAW, **common)
    (processed,) = server.wire.generate(PROMPT, logprobs=PROCESSED, **common)
    assert raw.tokens == processed.tokens
    limits = dict(top_k=0, top_p=1.0, min_p=0.0) | options
    for row, token in enumerate(raw.tokens):
        expected = processed_reference(raw.chosen[row], **limits)
        assert np.isfinite(expected[token]), "a token outside the truncated set was drawn"
        assert abs(processed.logprobs[row] - expected[token]) < 1e-4
        finite = np.isfinite(expected)
        assert np.abs(processed.chosen[row][finite] - expected[finite]).max() < 1e-4
        assert np.isneginf(processed.chosen[row][~finite]).all()


def test_greedy_processed_logprob_is_zero(server: Server) -> None:
    (sample,) = server.wire.generate(
        PROMPT, temperature=0.0, max_tokens=4, ignore_eos=True, logprobs=PROCESSED
    )
    assert not sample.logprobs.any()


def test_no_logprobs_unless_asked(server: Server) -> None:
    (sample,) = server.wire.generate(PROMPT, max_tokens=4, seed=1)
    assert sample.top_ids is None and sample.chosen is None and len(sample.logprobs) == 0


def test_score_orders_adapters_and_names_versions(server: Server) -> None:
    sequences = [PROMPT, PROMPT[::-1], [9]]
    response = server.wire.score_response(sequences, ["a", "", "b@1", "a"])
    assert [(item.adapter, item.version) for item in response.versions] == [
        ("a", 1),
        ("", 0),
        ("b", 1),
        ("a", 1),
    ]
    assert response.versions[0].digest == server.wire.adapter("a").digest
    rows = server.wire.score(sequences, ["a", "", "b@1", "a"])
    for row in rows:
        assert np.array_equal(row[0].logprobs, row[3].logprobs, equal_nan=True)
    assert not np.array_equal(rows[0][0].logprobs[1:], rows[0][1].logprobs[1:])
    assert np.isnan(rows[2][0].logprobs).tolist() == [True]


def test_score_of_no_adapters_is_the_base_model(server: Server) -> None:
    ((implied,),) = server.wire.score([PROMPT])
    ((named,),) = server.wire.score([PROMPT], [""])
    assert implied.logprobs.tobytes() == named.logprobs.tobytes()


def test_score_temperature_divides_logits(server: Server) -> None:
    ((raw,),) = server.wire.score([PROMPT], chosen=VOCABULARY)
    ((warm,),) = server.wire.score([PROMPT], chosen=VOCABULARY, temperature=2.0)
    scaled = raw.chosen[1:].astype(np.float64) / 2
    expected = scaled - np.log(np.exp(scaled).sum(axis=-1, keepdims=True))
    assert np.abs(warm.chosen[1:] - expected).max() < 1e-5


# --- Adapters named by requests.


def test_spans_name_the_version_of_every_token(server: Server) -> None:
    for adapter, expected in [("a", ("a", 1)), ("b@1", ("b", 1)), ("", ("", 0))]:
        (sample,) = server.wire.generate(PROMPT, adapter=adapter, max_tokens=9, ignore_eos=True)
        digest = server.wire.adapter(adapter).digest if adapter else ""
        assert sample.spans == [(*expected, digest, 0, 9)]


def test_adapters_change_the_answer(server: Server) -> None:
    answers = {tuple(greedy(server, 20, adapter=name)) for name in ("", "a", "b")}
    assert len(answers) == 3


# --- Ending requests.


def test_abort_by_id_returns_the_tokens_so_far(slow: Server) -> None:
    call, messages = started(slow, request_id="the-one", adapter="a")
    other, other_messages = started(slow, request_id="another", max_tokens=40)
    assert slow.wire.abort("the-one", "unknown-id") == 1
    (sample,) = finish(call, messages).values()
    assert sample.reason == ABORTED and 0 < len(sample.tokens) < LONG
    assert sample.finish.detail
    assert finish(other, other_messages)[0].reason == LENGTH
    assert_idle(slow)


@pytest.mark.parametrize("target", ["a", "a@1"])
def test_abort_by_adapter_spares_others(slow: Server, target: str) -> None:
    victims = [started(slow, adapter="a") for _ in range(2)]
    bystander = started(slow, adapter="b", max_tokens=60)
    request = inference_pb2.AbortRequest(adapter=target)
    assert slow.wire.inference.Abort(request, timeout=10).aborted == 2
    assert all(finish(*victim)[0].reason == ABORTED for victim in victims)
    assert finish(*bystander)[0].reason == LENGTH


def test_abort_all_ends_scores_too(slow: Server) -> None:
    calls = [started(slow, adapter=name) for name in ("", "a", "b")]
    errors = []

    def score() -> None:
        try:
            slow.wire.score([[5] * 8000] * 8, ["a", "b"])
        except grpc.RpcError as error:
            errors.append(failure(error))

    thread = threading.Thread(target=score)
    thread.start()
    wait_until(lambda: slow.wire.info().engine.running_sequences > 3, what="the score to run")
    slow.wire.inference.Abort(inference_pb2.AbortRequest(all=True), timeout=10)
    thread.join(20)
    assert errors and errors[0].code == grpc.StatusCode.ABORTED
    assert all(finish(*call)[0].reason == ABORTED for call in calls)
    assert_idle(slow)


def test_cancel_frees_everything(slow: Server) -> None:
    calls = [started(slow, adapter="a", n=4) for _ in range(4)]
    assert slow.wire.info().engine.adapter_leases == 4
    for call, _ in calls:
        call.cancel()
    assert_idle(slow)


def test_deadline_ends_a_running_request(slow: Server) -> None:
    begin = time.monotonic()
    with pytest.raises(grpc.RpcError) as caught:
        slow.wire.generate(PROMPT, max_tokens=LONG, ignore_eos=True, timeout=0.4)
    assert caught.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
    assert time.monotonic() - begin < 5
    assert_idle(slow)


def test_deadline_ends_a_queued_request(zoo) -> None:
    settings = {"engine.max_running_sequences": 1, "engine.kv_bytes": 256 << 20}
    with serve(zoo.model("slow"), None, settings) as server:
        blocker, _ = started(server)
        with pytest.raises(grpc.RpcError) as caught:
            server.wire.generate(PROMPT, max_tokens=4, timeout=0.4)
        assert caught.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
        wait_until(lambda: server.wire.info().engine.queued_requests == 0, what="an empty queue")
        blocker.cancel()
        assert_idle(server)


def test_duplicate_request_id_is_refused(slow: Server) -> None:
    call, _ = started(slow, request_id="twin")
    with pytest.raises(grpc.RpcError) as caught:
        slow.wire.generate(PROMPT, max_tokens=2, request_id="twin")
    refusal = failure(caught.value)
    assert refusal.code == grpc.StatusCode.ALREADY_EXISTS
    assert refusal.reason == "REQUEST_ID_IN_USE" and "twin" in refusal.message
    call.cancel()
    assert_idle(slow)
    assert slow.wire.generate(PROMPT, max_tokens=2, request_id="twin", ignore_eos=True)


# --- Pause.


def test_pause_keep_freezes_and_resumes_with_equal_tokens(slow: Server) -> None:
    options = dict(prompt=PROMPT, max_tokens=80, ignore_eos=True, seed=3)
    (whole,) = slow.wire.generate(**options)
    call = slow.wire.stream(**options)
    messages = [next(call)]
    assert slow.wire.pause(control_pb2.PAUSE_MODE_KEEP) == 1
    info = slow.wire.info().engine
    assert info.paused
    time.sleep(0.2)
    assert slow.wire.info().engine.steps == info.steps, "a step was taken while paused"
    slow.wire.resume()
    (sample,) = finish(call, messages).values()
    assert sample.tokens == whole.tokens
    assert not slow.wire.info().engine.paused


def test_requests_wait_while_paused_by_keep(slow: Server) -> None:
    slow.wire.pause(control_pb2.PAUSE_MODE_KEEP)
    call = slow.wire.inference.Generate(generate_request(PROMPT, max_tokens=3, ignore_eos=True))
    wait_until(lambda: slow.wire.info().engine.queued_requests == 1, what="the request to queue")
    slow.wire.resume()
    assert collect(call)[0].reason == LENGTH


def test_pause_abort_ends_everything(slow: Server) -> None:
    calls = [started(slow) for _ in range(3)]
    assert slow.wire.pause(control_pb2.PAUSE_MODE_ABORT) == 3
    slow.wire.resume()
    assert all(finish(*call)[0].reason == ABORTED for call in calls)
    assert len(greedy(slow, 3)) == 3


def test_pause_wait_lets_running_requests_finish_and_refuses_new_ones(slow: Server) -> None:
    call, messages = started(slow, max_tokens=150)
    pause = slow.wire.control.Pause.future(
        control_pb2.PauseRequest(mode=control_pb2.PAUSE_MODE_WAIT), timeout=60
    )

    def refused():
        try:
            slow.wire.generate(PROMPT, max_tokens=1)
        except grpc.RpcError as error:
            return failure(error)
        return None

    refusal = wait_until(refused, what="a refusal")
    assert refusal.code == grpc.StatusCode.UNAVAILABLE and refusal.reason == "ENGINE_PAUSED"
    assert finish(call, messages)[0].reason == LENGTH
    assert pause.result(timeout=60) is not None
    slow.wire.resume()
    assert len(greedy(slow, 3)) == 3


def test_pause_of_one_adapter_leaves_the_others_running(slow: Server, zoo) -> None:
    for name in ("one", "two"):
        slow.wire.publish(name, zoo.adapter("slow", "lora"), activate=True)
    options = dict(prompt=PROMPT, adapter="one", max_tokens=80, ignore_eos=True, seed=3)
    (whole,) = slow.wire.generate(**options)
    call = slow.wire.stream(**options)
    messages = [next(call)]
    assert slow.wire.pause(control_pb2.PAUSE_MODE_KEEP, "one") == 1
    info = slow.wire.info().engine
    assert not info.paused and list(info.paused_adapters) == ["one"] and info.frozen_requests == 1
    # Publishing and activating go on; a new request waits.
    slow.wire.publish("one", zoo.adapter("slow", "lora"), activate=True)
    late = slow.wire.inference.Generate(generate_request(**options | dict(adapter="one@2")))
    for adapter in ("two", ""):
        assert len(greedy(slow, 3, adapter=adapter)) == 3
    assert slow.wire.info().engine.frozen_requests == 2
    slow.wire.resume("one")
    (sample,) = finish(call, messages).values()
    assert sample.tokens == whole.tokens == collect(late)[0].tokens
    assert slow.wire.info().engine.frozen_requests == 0


def test_pause_wait_of_one_adapter_refuses_it_alone(slow: Server, zoo) -> None:
    slow.wire.publish("one", zoo.adapter("slow", "lora"), activate=True)
    assert slow.wire.pause(control_pb2.PAUSE_MODE_WAIT, "one") == 0
    with pytest.raises(grpc.RpcError) as caught:
        slow.wire.generate(PROMPT, adapter="one", max_tokens=1)
    assert failure(caught.value).reason == "ENGINE_PAUSED"
    assert len(greedy(slow, 3)) == 3
    slow.wire.resume()
    assert len(greedy(slow, 3, adapter="one")) == 3


def test_requests_frozen_by_a_pause_of_their_adapter_end_with_the_server(zoo) -> None:
    with serve(zoo.model("slow"), {"one": zoo.adapter("slow", "lora")}) as server:
        call, messages = started(server, adapter="one")
        server.wire.pause(control_pb2.PAUSE_MODE_KEEP, "one")
        server.process.send_signal(signal.SIGTERM)
        assert finish(call, messages)[0].reason == ABORTED
        assert server.process.wait(20) == 0, "it waited for the drain's timeout"


# --- Queue and order.


def test_full_queue_is_refused_with_a_retry_hint(zoo) -> None:
    settings = {
        "engine.max_running_sequences": 1,
        "limits.max_queued_requests": 3,
        "engine.kv_bytes": 256 << 20,
    }
    with serve(zoo.model("slow"), None, settings) as server:
        blocker, _ = started(server)
        queued = [server.wire.stream(PROMPT, max_tokens=2, ignore_eos=True) for _ in range(3)]
        wait_until(lambda: server.wire.info().engine.queued_requests == 3, what="a full queue")
        with pytest.raises(grpc.RpcError) as caught:
            server.wire.generate(PROMPT, max_tokens=2)
        refusal = failure(caught.value)
        assert refusal.code == grpc.StatusCode.RESOURCE_EXHAUSTED
        assert refusal.reason == "QUEUE_FULL" and refusal.retry_after > 0
        blocker.cancel()
        assert all(collect(call)[0].reason == LENGTH for call in queued)


def test_lower_priority_value_runs_first(zoo) -> None:
    settings = {"engine.max_running_sequences": 1, "engine.kv_bytes": 256 << 20}
    with serve(zoo.model("slow"), None, settings) as server:
        # The blocker outranks the others, or they would take its place.
        blocker, _ = started(server, priority=-100)
        order, threads = [], []

        def run(priority: int) -> None:
            server.wire.generate(PROMPT, max_tokens=20, ignore_eos=True, priority=priority)
            order.append(priority)

        for count, priority in enumerate((5, 0, -5), start=1):
            threads.append(threading.Thread(target=run, args=(priority,)))
            threads[-1].start()
            wait_until(
                lambda wanted=count: server.wire.info().engine.queued_requests == wanted,
                what="the request to queue",
            )
        blocker.cancel()
        for thread in threads:
            thread.join(30)
        assert order == [-5, 0, 5]


# --- Non-finite logits.


def test_non_finite_logits_end_the_sample_only(zoo, tmp_path) -> None:
    """Finite weights whose product overflows: magnitudes of 3e38 on the head."""
    import shutil

    from safetensors.torch import load_file, save_file

    folder = tmp_path / "overflow"
    shutil.copytree(zoo.adapter("llama2", "dora_head"), folder)
    tensors = load_file(folder / "adapter_model.safetensors")
    key = "base_model.model.lm_head.lora_magnitude_vector"
    tensors[key] = tensors[key] * 0 + 3e38
    save_file(tensors, folder / "adapter_model.safetensors")
    with serve(zoo.model("llama2"), {"overflow": folder}) as server:
        calls = server.wire.generate_many(
            [
                dict(prompt=PROMPT, adapter="overflow", max_tokens=5),
                dict(prompt=PROMPT, max_tokens=5, ignore_eos=True),
            ]
        )
        assert calls[0][0].reason == NON_FINITE and calls[0][0].tokens == []
        assert calls[0][0].finish.detail
        assert calls[1][0].reason == LENGTH and len(calls[1][0].tokens) == 5
        with pytest.raises(grpc.RpcError) as caught:
            server.wire.score([PROMPT], ["overflow"])
        assert failure(caught.value).reason == "LOGITS_NOT_FINITE"
        assert_idle(server)
