"""prime-rl's path: renderers.client.generate, and a load under the same name in the middle."""

from lib.server import wait_until


def test_a_request_in_flight_switches_to_the_loaded_adapter(
    gateway, client, folder, adapters, drive, result_of
):
    with gateway() as running, drive("renderers", running.url, folder, adapters) as program:
        wait_until(lambda: client.info().engine.running_sequences, 200, "the request")
        steps = client.info().engine.steps
        wait_until(lambda: client.info().engine.steps > steps + 10, what="its first tokens")
        program.stdin.write("\n")
        program.stdin.flush()
        found = result_of(program)
    first, second = found["spans"][0]
    assert [first["digest"], second["digest"]] == found["digests"]
    assert {first["adapter"], second["adapter"]} == {"policy"}
    assert (first["begin"], first["end"], second["end"]) == (0, second["begin"], 900)
    assert len(found["ids"]) == len(found["logprobs"]) == 900
    # The first span is of the first version alone.
    client.publish("check", path=adapters / "dora-0")
    (sample,) = client.generate(
        found["prompt"], adapter="check", seed=5, logprobs="raw", max_tokens=900, min_tokens=900,
        stop_token_ids=found["stop"],
    )  # fmt: skip
    end = first["end"]
    assert found["ids"][:end] == sample.token_ids.tolist()[:end]
    assert found["logprobs"][:end] == sample.logprobs.tolist()[:end]
    assert found["ids"] != sample.token_ids.tolist()
    (span,) = found["spans"][1]
    assert span["digest"] == found["digests"][1] and found["after"]
