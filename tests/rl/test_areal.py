"""AReaL's VLLMBackend against gateway and server."""

from lib.server import wait_until

IDS = [1, 40, 77, 120, 33]


def test_the_backend_generates_scores_pauses_and_loads(gateway, client, adapters, drive, result_of):
    with gateway() as running, drive("areal", running.http, adapters) as program:
        wait_until(lambda: client.info().engine.running_sequences, 200, "the long request")
        wait_until(lambda: client.info().engine.kv_pages_used > 2, 200, "its first tokens")
        program.stdin.write("\n")
        program.stdin.flush()
        found = result_of(program)

    def sample(adapter):
        (it,) = client.generate(IDS, adapter=adapter, max_tokens=12, temperature=0, logprobs="raw")
        return [it.token_ids.tolist(), it.logprobs.tolist(), it.finish_reason.value]

    client.publish("check", path=adapters / "dora-0")
    first = sample("check")
    client.publish("check", path=adapters / "dora-1")
    assert found["first"] == found["waiting"] == first
    assert found["second"] == found["awake"] == sample("check") != first
    assert found["base"] == sample(None)
    assert found["score"] == client.score([IDS])[0, 0].tolist()[-3:]
    tokens, logprobs, reason = found["aborted"]
    assert reason == "abort" and 0 < len(tokens) == len(logprobs) < 6000
    assert found["paused"]["success"] is found["continued"]["success"] is True
    names = {v.name for v in client.adapters() if v.state == "ready"}
    assert {"actor-v1--x0", "actor-v2--x0"} <= names
