"""Contexts much longer than the windows of a model's layers: the pages behind a window are given
back, and no answer shows it."""

import numpy as np
import pytest
from lib import tiny_models
from lib.oracle import compare
from lib.server import Server, device, serve, wait_until
from lib.wire import RAW, STREAM, Sample

# All have windows of 8 positions: in every layer, in half of them, in three of four.
FAMILIES = ["mistral", "qwen2_window", "gemma3_text"]
ADAPTERS = ["", "dora"]
NEW_TOKENS = 48
# Chunks much shorter than a prompt, so that windows move on while it is computed.
SETTINGS = {"engine.max_step_tokens": 24, "engine.kv_bytes": 16 << 20}
COMMON = 100  # tokens that all prompts begin with


def requests() -> list[dict]:
    rng = np.random.default_rng(12)
    common = rng.integers(6, tiny_models.VOCAB, size=COMMON).tolist()
    return [
        dict(
            prompt=common
            + rng.integers(6, tiny_models.VOCAB, size=[1, 12, 33, 40][i % 4]).tolist(),
            adapter=ADAPTERS[i % 2],
            temperature=0.0 if i % 3 == 0 else 0.9,
            seed=i,
            max_tokens=NEW_TOKENS,
            ignore_eos=True,
            logprobs=RAW,
            top_logprobs=3,
        )
        for i in range(8)
    ]


def bits(sample: Sample) -> tuple:
    return sample.tokens, sample.logprobs.tobytes(), sample.top_logprobs.tobytes()


def together(server: Server, **changes) -> list[tuple]:
    return [bits(s[0]) for s in server.wire.generate_many([r | changes for r in requests()])]


class Served:
    def __init__(self, zoo, family: str, server: Server) -> None:
        self.zoo, self.family, self.server = zoo, family, server
        # Each alone, without any other's pages.
        self.alone = [bits(server.wire.generate(**r, bypass=True)[0]) for r in requests()]

    def serve(self, **settings):
        """Another server of the model."""
        folders = {"dora": self.zoo.adapter(self.family, "dora")}
        return serve(self.zoo.model(self.family), folders, SETTINGS | settings)


@pytest.fixture(scope="module", params=FAMILIES)
def served(request, zoo):
    folders = {"dora": zoo.adapter(request.param, "dora")}
    with serve(zoo.model(request.param), folders, SETTINGS) as server:
        yield Served(zoo, request.param, server)


def test_long_contexts_equal_the_oracle(served: Served) -> None:
    rng = np.random.default_rng(3)
    sequences = [rng.integers(6, tiny_models.VOCAB, size=tiny_models.CONTEXT - 2).tolist()]
    vocabulary = list(range(tiny_models.VOCAB))
    for kind in ["base", "dora"]:
        (oracle,) = served.zoo.next_logprobs(served.family, kind, sequences)
        name = "" if kind == "base" else kind
        ((score,),) = served.server.wire.score(sequences, [name], chosen=vocabulary)
        cosine, error = compare(score.chosen[1:], oracle[:-1])
        if device() == "cpu":
            assert cosine >= 0.999999 and error <= 1e-4
        else:
            assert cosine >= 0.999


def test_chunks_equal_one_pass(served: Served) -> None:
    with served.serve(**{"engine.max_step_tokens": 512}) as server:
        assert together(server, bypass=True) == served.alone
    assert together(served.server, bypass=True) == served.alone
    assert together(served.server, bypass=True, mode=STREAM) == served.alone


def test_generate_equals_score(served: Served) -> None:
    for request, (tokens, logprobs, _) in zip(requests(), served.alone, strict=True):
        ids = request["prompt"] + tokens
        ((score,),) = served.server.wire.score([ids], [request["adapter"]])
        assert score.logprobs[len(request["prompt"]) :].tobytes() == logprobs


def test_prefix_hits_far_beyond_the_window(served: Served) -> None:
    for salt in ["one", "many"]:
        if salt == "many":
            assert together(served.server, salt=salt) == served.alone
        for request, expected in zip(requests(), served.alone, strict=True):
            (sample,) = served.server.wire.generate(**request, salt=salt)
            assert bits(sample) == expected
        # The second turn of a conversation goes on where the first ended.
        for request, (tokens, *_) in zip(requests(), served.alone, strict=True):
            turn = request | dict(prompt=request["prompt"] + tokens, max_tokens=2)
            (sample,) = served.server.wire.generate(**turn, salt=salt)
            assert sample.finish.usage.cached_prompt_tokens == len(turn["prompt"]) - 1
            (again,) = served.server.wire.generate(**turn, bypass=True)
            assert bits(sample) == bits(again)
    assert sample.finish.usage.prompt_tokens > 10 * 8


def test_samples_share_a_long_prompt(served: Served) -> None:
    request = requests()[5]
    samples = served.server.wire.generate(**request, salt="n", n=4)
    assert bits(samples[0]) == served.alone[5]
    cached = [sample.finish.usage.cached_prompt_tokens for sample in samples]
    assert sum(count >= len(request["prompt"]) - 1 for count in cached) == 3
    # One place: each comes when the one before it is far beyond the prompt, or has ended.
    with served.serve(**{"engine.max_running_sequences": 1}) as server:
        apart = server.wire.generate(**request, n=4)
        assert [bits(sample) for sample in apart] == [bits(sample) for sample in samples]


def test_drafts_that_are_wrong_in_parts(served: Served) -> None:
    drafted = []
    for index, (request, (tokens, *_)) in enumerate(zip(requests(), served.alone, strict=True)):
        guess = list(tokens)
        if index % 2:
            guess[17] = guess[30] = 7
        drafted.append(request | dict(drafts=[guess], bypass=True))
    samples = [s[0] for s in served.server.wire.generate_many(drafted)]
    assert [bits(sample) for sample in samples] == served.alone
    assert sum(s.finish.usage.accepted_draft_tokens for s in samples) > NEW_TOKENS


def test_few_pages(served: Served) -> None:
    """Sequences lose their pages, and prefixes the pages of their windows."""
    least = served.server.wire.info().model.whole_context_kv_bytes
    ways = [{"bypass": True}, {}, {"drafts": [served.alone[0][0]]}, {"salt": "two"}]
    preemptions, cached = 0.0, set()
    for size in [4, 5, 6, 7]:
        with served.serve(**{"engine.kv_bytes": least * size // 4}) as server:
            for changes in ways:
                assert together(server, **changes) == served.alone
                for request, expected in zip(requests(), served.alone, strict=True):
                    for _ in range(2):
                        (sample,) = server.wire.generate(**request | changes)
                        assert bits(sample) == expected
                        cached.add(sample.finish.usage.cached_prompt_tokens)
            preemptions += server.metric("dorad_engine_preemptions_total")
            # The engine counts a sequence's end after it has sent the last answer.
            wait_until(
                lambda: server.wire.info().engine.kv_pages_used == 0, what="no page is in use"
            )
    assert len(cached) > 3, "prefixes were found in parts"
    # Where all layers have windows no sequence grows.
    assert preemptions > 0 or served.family == "mistral"
