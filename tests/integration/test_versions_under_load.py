"""What RL loops meet with servers that key by name: a republished name, and a version that is
unloaded while many requests run on it."""

import numpy as np
from dorad.v1 import types_pb2
from lib.server import serve, wait_until
from lib.wire import LENGTH, RAW, collect, generate_request

PREFIX = [(7 * i) % 2000 + 10 for i in range(200)]  # twelve pages, shared by all prompts
VOCABULARY = list(range(2048))
STREAMS = 100


def test_a_republished_name_gives_the_logits_of_a_cold_run(zoo) -> None:
    prompts = [[*PREFIX, 5, 6, last] for last in (7, 8)]
    options = dict(adapter="p", max_tokens=6, ignore_eos=True, seed=3)
    options |= dict(logprobs=RAW, chosen=VOCABULARY)
    with serve(zoo.model("slow")) as server:
        folders = [zoo.adapter("slow", "dora", seed) for seed in (0, 1, 0)]
        for version, folder in enumerate(folders, 1):
            server.wire.publish("p", folder, activate=True)
            first, second = (server.wire.generate(prompt, **options)[0] for prompt in prompts)
            # The content of version 3 is that of version 1, whose prefixes are its own.
            cached = len(prompts[0]) - 1 if version == 3 else 0
            assert first.finish.usage.cached_prompt_tokens == cached
            assert second.finish.usage.cached_prompt_tokens == len(prompts[1]) - 1
            with serve(zoo.model("slow"), {"p": folder}) as cold:
                for prompt, warm in zip(prompts, (first, second), strict=True):
                    (fresh,) = cold.wire.generate(prompt, bypass=True, **options)
                    assert warm.tokens == fresh.tokens
                    assert np.array_equal(warm.chosen, fresh.chosen)


def test_a_version_retired_under_many_streams_ends_them_on_it(zoo) -> None:
    folders = {"other": zoo.adapter("slow", "lora")}
    settings = {"engine.kv_bytes": 256 << 20}
    with serve(zoo.model("slow"), folders, settings) as server:
        wire = server.wire
        resident = wire.info().memory_bytes["adapters"]
        wire.publish("p", zoo.adapter("slow", "dora", 0), activate=True)
        requests = [
            dict(
                prompt=[10 + i, 3, 5], adapter="p", max_tokens=100 + i % 17, ignore_eos=True, seed=i
            )
            for i in range(STREAMS)
        ]
        alone = {i: wire.generate(**requests[i])[0].tokens for i in (0, 41, 99)}
        calls = [
            wire.inference.Generate(generate_request(mode=2, **request)) for request in requests
        ]
        begun = [next(call) for call in calls]
        wire.publish("p", zoo.adapter("slow", "dora", 1), activate=True)
        assert wire.retire("p", 1).adapter.state == types_pb2.ADAPTER_STATE_RETIRING
        assert wire.adapter("p@1").leases > 0, "the streams ended before the version was retired"
        (other,) = wire.generate([1, 2, 3], adapter="other", max_tokens=3, ignore_eos=True)
        assert len(other.tokens) == 3
        for i, (call, first) in enumerate(zip(calls, begun, strict=True)):
            (sample,) = collect([first, *call]).values()
            assert sample.reason == LENGTH
            assert len(sample.tokens) == requests[i]["max_tokens"]
            assert [span[:2] for span in sample.spans] == [("p", 1)]
            assert i not in alone or sample.tokens == alone[i]
        gone = types_pb2.ADAPTER_STATE_GONE
        wait_until(lambda: wire.adapter("p@1").state == gone, what="the version to go")
        wire.retire("p", 2)
        wait_until(lambda: wire.info().memory_bytes["adapters"] == resident, what="its memory")
        info = wire.info().engine
        assert (info.adapter_leases, info.kv_pages_used) == (0, 0)
