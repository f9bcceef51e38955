"""Arguments of the wrong kind: the error names the argument, and nothing has left the process."""

import array
import collections

import dorad
import dorad.aio
import numpy as np
import pytest
from dorad._packing import pack_ids

TENSORS = {"w": np.ones((2, 2), np.float32)}
VERSION = dorad.AdapterVersion("a", 2, "0f" * 32, state="ready", active=True, kind="lora")

CALLS = [
    (lambda c: c.generate("hello"), TypeError, "token_ids must be token ids, not text"),
    (lambda c: c.generate(b"hello"), TypeError, "token_ids must be token ids, not text"),
    (lambda c: c.generate(5), TypeError, "token_ids must be a list or array of integers, not 5"),
    (lambda c: c.generate(np.int64(5)), TypeError, "token_ids must be a list or array"),
    (lambda c: c.generate(None), TypeError, "token_ids must be a list or array .*, not None"),
    (lambda c: c.generate({1: 2}), TypeError, "token_ids must be a list or array .*, not dict"),
    (lambda c: c.generate(iter([1])), TypeError, "token_ids must be a list or array"),
    (lambda c: c.generate(["a"]), TypeError, "token_ids must be integers, not text"),
    (lambda c: c.generate([1, None]), TypeError, "token_ids must be integers"),
    (lambda c: c.generate([[1, 2], [3]]), ValueError, "token_ids must have one dimension"),
    (lambda c: c.generate([1], n="3"), TypeError, "n must be an integer .*, not '3'"),
    (lambda c: c.generate([1], n=-1), ValueError, "n must be an integer from 0 .*, not -1"),
    (lambda c: c.generate([1], max_tokens=2.5), TypeError, "max_tokens must be an integer"),
    (lambda c: c.generate([1], temperature="hot"), TypeError, "temperature must be a number"),
    (lambda c: c.generate([1], seed=2**64), ValueError, r"seed must be an integer .*2\^64 - 1"),
    (lambda c: c.generate([1], ignore_eos="no"), TypeError, "ignore_eos must be True or False"),
    (lambda c: c.generate([1], stop_token_ids=5), TypeError, "stop_token_ids must be a list"),
    (lambda c: c.generate([1], presence_penalty="x"), TypeError, "presence_penalty must be a num"),
    (lambda c: c.generate([1], logit_bias=[1]), TypeError, "logit_bias must map token ids to numb"),
    (lambda c: c.generate([1], logit_bias={1: "x"}), TypeError, "logit_bias must map token ids"),
    (lambda c: c.generate([1], logit_bias={"a": 1.0}), TypeError, "logit_bias must be integers"),
    (lambda c: c.generate([1], allowed_token_ids=[]), ValueError, "allowed_token_ids must hold at"),
    (
        lambda c: c.generate([1], allowed_token_ids="a"),
        TypeError,
        "allowed_token_ids must be token",
    ),
    (lambda c: c.generate([1], bad_words="word"), TypeError, "bad_words must be a list of lists"),
    (lambda c: c.generate([1], bad_words=["word"]), TypeError, r"bad_words\[0\] must be token ids"),
    (lambda c: c.generate([1], bad_words=[5]), TypeError, r"bad_words\[0\] must be a list"),
    (lambda c: c.generate([1], top_logprobs="3"), TypeError, "top_logprobs must be an integer"),
    (lambda c: c.generate([1], top_logprobs=-3), ValueError, "top_logprobs must be 0 or more"),
    (lambda c: c.generate([1], request_id=5), TypeError, "request_id must be text, not 5"),
    (lambda c: c.generate([1], adapter=VERSION), TypeError, r"adapter must be text.*its ref"),
    (lambda c: c.generate([1], timeout="5"), TypeError, "timeout must be a number of seconds"),
    (lambda c: c.generate([1], retry_for="5"), TypeError, "retry_for must be a number of seconds"),
    (lambda c: list(c.stream("hello")), TypeError, "not text"),
    (lambda c: c.generate_many("hello"), TypeError, "requests must be a list of prompts"),
    (lambda c: c.generate_many(5), TypeError, "requests must be a list of prompts, not 5"),
    (lambda c: c.generate_many([1, 2]), TypeError, r"requests\[0\] must be a list or array"),
    (
        lambda c: c.generate_many([[1], "b"]),
        TypeError,
        r"requests\[1\] must be token ids, not text",
    ),
    (
        lambda c: c.generate_many([[1], dorad.GenerateRequest("b")]),
        TypeError,
        r"requests\[1\] must be token ids, not text",
    ),
    (lambda c: c.generate_many([[1]], concurrency="4"), TypeError, "concurrency must be an int"),
    (lambda c: c.score("hello"), TypeError, "sequences must be a list"),
    (lambda c: c.score([1, 2]), TypeError, r"sequences\[0\] must be a list or array"),
    (lambda c: c.score([[1]], adapters=5), TypeError, "adapters must be a list of names, not 5"),
    (lambda c: c.score([[1]], adapters=[5]), TypeError, "each of adapters must be text, not 5"),
    (lambda c: c.activate(5), TypeError, "named by text"),
    (lambda c: c.retire(VERSION), TypeError, "its ref"),
    (lambda c: c.adapter(5), TypeError, "adapter must be text, not 5"),
    (lambda c: c.publish(5, tensors=TENSORS, config={}), TypeError, "name must be text, not 5"),
    (
        lambda c: c.publish("a", tensors=TENSORS, config={}, keep_last="2"),
        TypeError,
        "keep_last must be an integer",
    ),
    (lambda c: c.abort(5), TypeError, "request_ids must be a list of ids, not 5"),
    (lambda c: c.pause(adapter=5), TypeError, "adapter must be text, not 5"),
]


@pytest.mark.parametrize(("call", "error", "words"), CALLS)
def test_a_wrong_argument_is_named_before_anything_is_sent(server, client, call, error, words):
    with pytest.raises(error, match=words):
        call(client)
    assert not (server.generate_calls or server.publish_begins or server.aborts)
    assert not (server.pause_modes or server.events)


@pytest.mark.parametrize(
    "prompts", [range(1, 4), (1, 2, 3), array.array("i", [1, 2, 3]), collections.deque([1, 2, 3])]
)
def test_any_sequence_of_integers_is_a_prompt(prompts):
    assert pack_ids(prompts) == pack_ids([1, 2, 3])


TARGETS = [
    ("http://127.0.0.1:50051", ValueError, 'is a URL: give "127.0.0.1:50051"$'),
    ("https://gpu1:50051/", ValueError, 'is a URL: give "gpu1:50051", and ca_file'),
    ("localhost", ValueError, 'no port: give "localhost:50051"'),
    ("localhost:", ValueError, 'no port: give "localhost:50051"'),
    ("gpu1.example.org", ValueError, 'no port: give "gpu1.example.org:50051"'),
    ("::1", ValueError, r'no port: give "\[::1\]:50051"'),
    ("[::1]", ValueError, r'no port: give "\[::1\]:50051"'),
    ("dns:///gpu1", ValueError, 'no port: give "gpu1:50051"'),
    ("dns:gpu1", ValueError, 'no port: give "gpu1:50051"'),
    ("127.0.0.1:99999", ValueError, r"not in \[1, 65535\]"),
    ("127.0.0.1:0", ValueError, r"not in \[1, 65535\]"),
    ("/run/dorad.sock", ValueError, '"unix:/run/dorad.sock"'),
    ("", ValueError, "empty"),
    (" 127.0.0.1:50051", ValueError, "spaces"),
    (50051, TypeError, "is text such as"),
    (None, TypeError, "is text such as"),
]


@pytest.mark.parametrize(("target", "error", "words"), TARGETS)
def test_what_is_no_address_is_refused_with_the_address_that_was_meant(target, error, words):
    with pytest.raises(error, match=words):
        dorad.Client(target)
    if target:
        with pytest.raises(error, match=words):
            dorad.Client("127.0.0.1:1", admin_target=target)
    with pytest.raises(error, match=words):
        dorad.RolloutPool([target])


@pytest.mark.parametrize(
    "target",
    [
        "gpu1:50051", "[::1]:50051", "unix:/run/x.sock", "unix-abstract:x", "dns:///gpu1:50051",
        "dns://10.0.0.53/gpu1:50051", "ipv4:127.0.0.1:1,127.0.0.2:1", "ipv6:[::1]:1", "gpu1:https",
    ],
)  # fmt: skip
def test_addresses_of_grpc_are_taken_as_they_are(target):
    with dorad.Client(target) as client:
        assert client.target == target


def test_a_pool_wants_a_list_of_addresses():
    with pytest.raises(TypeError, match="targets must be a list of addresses, not 'gpu1:50051'"):
        dorad.RolloutPool("gpu1:50051")
    with pytest.raises(TypeError, match="targets must be a list of addresses, not 5"):
        dorad.RolloutPool(5)


@pytest.mark.parametrize("timeout", ["5", b"5", [5]])
def test_a_clients_own_times_are_numbers(timeout):
    with (
        dorad.Client("127.0.0.1:1", timeout=timeout) as client,
        pytest.raises(TypeError, match="timeout must be a number of seconds"),
    ):
        client.info()
    with pytest.raises(TypeError, match="retry_for must be a number of seconds"):
        dorad.Client("127.0.0.1:1", retry_for=timeout)


def refusal(message, *violations):
    return dorad.InvalidArgument(
        message,
        code="INVALID_ARGUMENT",
        reason="PROMPT_EMPTY",
        violations=[dorad.Violation(*violation) for violation in violations],
    )


def test_a_violation_is_printed_once():
    """The server's message has the first violations, too."""
    one = ("n", "0 is not in [1, 128]", "N_OUT_OF_RANGE")
    two = ("top_p", "2 is not in [0, 1]", "TOP_P_OUT_OF_RANGE")
    error = refusal("GenerateRequest: n: 0 is not in [1, 128]", one)
    assert str(error) == "INVALID_ARGUMENT (PROMPT_EMPTY): GenerateRequest: n: 0 is not in [1, 128]"
    error = refusal("GenerateRequest: n: 0 is not in [1, 128]; top_p: 2 is not in [0, 1]", one, two)
    assert str(error).splitlines() == [
        "INVALID_ARGUMENT (PROMPT_EMPTY): GenerateRequest: 2 problems",
        "  - n: 0 is not in [1, 128] [N_OUT_OF_RANGE]",
        "  - top_p: 2 is not in [0, 1] [TOP_P_OUT_OF_RANGE]",
    ]
    assert error.message.endswith("top_p: 2 is not in [0, 1]")
    assert str(refusal("two problems", one, two)).count("0 is not in") == 1
