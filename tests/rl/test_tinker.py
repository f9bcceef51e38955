"""Tinker's cookbook: its own token completer over dorad.tinker."""

from dorad.text import ModelText

IDS = [1, 40, 77, 120, 33]


def test_the_cookbooks_completer_samples_from_the_adapter(
    server, client, folder, adapters, drive, result_of
):
    client.publish("policy", path=adapters / "dora-0", activate=True)
    with drive("tinker", server.grpc, folder) as program:
        found = result_of(program)
    assert [len(tokens) for tokens, _, _ in found["completed"]] == [5, 12]
    assert {reason for _, _, reason in found["completed"]} == {"length"}
    samples = client.generate(
        IDS, adapter="policy", n=3, max_tokens=24, temperature=0.7, seed=3, ignore_eos=True,
        logprobs="raw",
    )  # fmt: skip
    expected = [[s.token_ids.tolist(), s.logprobs.tolist(), "length"] for s in samples]
    assert found["whole"] == expected
    scores = client.score([IDS], "policy")[0, 0].tolist()
    assert found["scored"] == [None, *scores[1:]] and found["prompt"] == scores[1:]
    tokens = expected[0][0]
    ended, logprobs, reason = found["ended"]
    assert ended == tokens[: tokens.index(tokens[7]) + 1] and reason == "stop"
    assert logprobs == expected[0][1][: len(ended)]
    cut, logprobs, reason = found["cut"][0]
    assert cut == tokens[: len(cut)] and logprobs == expected[0][1][: len(cut)]
    assert len(cut) <= found["piece_end"] and reason == "stop"
    said = ModelText(folder).decode(cut, skip_special_tokens=False)
    assert found["piece"] in said and found["piece"] not in ModelText(folder).decode(
        cut[:-1], skip_special_tokens=False
    )
    assert [text.split()[0] for text in found["refused"]] == ["dorad.tinker", "stop"]
