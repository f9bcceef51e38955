"""SkyRL's RemoteInferenceClient against gateway and server."""

from lib.server import wait_until

IDS = [[1, 40, 77, 120, 33], [1, 200, 9]]
PARAMS = {"temperature": 0.7, "max_tokens": 12, "logprobs": "raw", "seed": 11}


def test_the_client_generates_pauses_sleeps_and_loads(gateway, client, adapters, drive, result_of):
    base = client.info().model.name
    with gateway() as running, drive("skyrl", running.url, base, adapters) as program:
        for change in ("keep", "abort", "wait"):
            assert program.stdout.readline().strip() == change
            wait_until(lambda: client.info().engine.running_sequences == 2, what="requests")
            program.stdin.write("\n")
            program.stdin.flush()
        found = result_of(program)

    def samples(adapter):
        many = client.generate_many(IDS, adapter=adapter, **PARAMS)
        return [sample.token_ids.tolist() for (sample,) in many], [
            sample.logprobs.tolist() for (sample,) in many
        ]

    def got(name):
        return found[name]["response_ids"], found[name]["response_logprobs"]

    client.publish("check", path=adapters / "dora-0")
    assert got("first") == got("awake") == got("late") == samples("check")
    assert got("base") == samples(None)
    client.publish("check", path=adapters / "dora-1")
    assert got("second") == samples("check")
    assert got("kept") == got("whole") == got("waited")
    assert [len(ids) for ids in found["kept"]["response_ids"]] == [600, 600]
    assert found["aborted"]["stop_reasons"] == ["abort", "abort"]
    assert all(len(ids) < 6000 for ids in found["aborted"]["response_ids"])
    assert found["world_size"] == [1, 1]
    assert found["text"] == ["harbour"]
    sequences = found["sample"]["sequences"]
    assert [len(s["tokens"]) == len(s["logprobs"]) for s in sequences] == [True, True]
    scores = client.score([IDS[0]], ["check"], top_k=2)
    assert found["sample"]["prompt_logprobs"][1:] == scores[0, 0].tolist()[1:]
    assert found["sample"]["topk_prompt_logprobs"][0] is None
    assert all(len(row) == 2 for row in found["sample"]["topk_prompt_logprobs"][1:])
    assert found["unloaded"][0] == 404
    assert found["outside"][0] == 403 and "--adapter-root" in found["outside"][1]
