"""Layers with windows hold the pages that their rows see, and no more."""

import dorad
from lib.server import serve, wait_until

PROMPT = [6 + i % 290 for i in range(100)]
ANSWER = 80


def pages_of_a_long_sequence(zoo, family: str, groups: int) -> tuple[int, int]:
    """Pages that a sequence holds when it stands still at about 150 tokens, and its tokens."""
    settings = {"engine.kv_bytes": 16 << 20, "engine.max_step_tokens": 16}
    with serve(zoo.model(family), settings=settings) as server, dorad.Client(server.grpc) as client:
        assert client.info().engine.kv_layer_groups == groups
        with client.limited_gpu_share(0.05):
            call = server.wire.stream(PROMPT, max_tokens=ANSWER, ignore_eos=True, bypass=True)
            tokens = len(PROMPT)
            for message in call:
                tokens += len(message.token_ids) // 4
                if tokens >= 150:
                    break
            client.pause("keep")
        held = server.metric("dorad_kv_pages_used")
        assert held == server.wire.info().engine.kv_pages_used
        client.resume()
        for _ in call:
            pass
        wait_until(lambda: server.metric("dorad_kv_pages_used") == 0, what="the pages to return")
        return int(held), tokens


def test_a_long_sequence_of_gemma_holds_few_pages(zoo) -> None:
    # One group of layers sees all positions, three see eight: of a page or two, and one ahead.
    held, tokens = pages_of_a_long_sequence(zoo, "gemma3_text", 4)
    whole = -(-tokens // 16)
    assert whole + 3 <= held <= whole + 1 + 3 * 3
    assert held < 0.55 * 4 * whole, "as many as without windows"


def test_a_model_with_windows_everywhere_holds_a_constant(zoo) -> None:
    held, _ = pages_of_a_long_sequence(zoo, "mistral", 1)
    assert 1 <= held <= 3


def test_a_model_without_windows_holds_all(zoo) -> None:
    held, tokens = pages_of_a_long_sequence(zoo, "llama2", 1)
    whole = -(-tokens // 16)
    assert whole <= held <= whole + 3
