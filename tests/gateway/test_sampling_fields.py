"""Fields that change logits, compared with the gRPC client's arguments of the same names."""

IDS = [1, 40, 77, 120, 33]
SAMPLED = {"max_tokens": 24, "temperature": 1.0, "seed": 11, "ignore_eos": True}
CHANGES = {
    "presence_penalty": 0.5,
    "frequency_penalty": 1.5,
    "repetition_penalty": 1.25,
    "allowed_token_ids": list(range(30, 60)),
}


def tokens(http, base, **fields):
    body = {"model": base, "prompt": IDS, "return_token_ids": True, **SAMPLED, **fields}
    answer = http.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["token_ids"]


def test_changes_of_logits_reach_the_server(http, base, grpc_client):
    words = [[31, 32], [33]]
    (sample,) = grpc_client.generate(
        IDS, **SAMPLED, **CHANGES, logit_bias={40: 2.5}, bad_words=words
    )
    served = tokens(http, base, **CHANGES, logit_bias={"40": 2.5}, bad_words_token_ids=words)
    assert served == sample.token_ids.tolist()
    assert set(served) <= set(range(30, 60)) - {33}
    (plain,) = grpc_client.generate(IDS, **SAMPLED, allowed_token_ids=list(range(30, 60)))
    assert served != plain.token_ids.tolist()


def test_a_bias_decides(http, base):
    assert tokens(http, base, logit_bias={"77": 100}, max_tokens=3) == [77, 77, 77]


def test_bad_words_are_tokenized(http, base, text):
    free = tokens(http, base, temperature=0)
    word = next(w for w in map(text.token, free) if w.strip() and w.isascii() and w.isprintable())
    (banned,) = {i for i in free if text.token(i) == word}
    assert text.encode(word, special_tokens=False) == [banned]
    assert banned not in tokens(http, base, temperature=0, bad_words=[word])


def test_the_inference_protocol_and_chats_have_them(http, base):
    allowed = {"allowed_token_ids": [50, 51], "max_tokens": 6, "ignore_eos": True}
    answer = http.post(
        f"/v2/models/{base}/generate", json={"input_ids": IDS, "parameters": allowed}
    )
    assert answer.status_code == 200, answer.text
    chat = {"messages": [{"role": "user", "content": "x"}], "return_token_ids": True, **allowed}
    answer = http.post("/v1/chat/completions", json={"model": base, **chat})
    assert answer.status_code == 200, answer.text
    assert set(answer.json()["choices"][0]["token_ids"]) <= {50, 51}
