"""What one tenant computed helps another one neither to an answer nor to knowledge of it."""

import pytest
from lib.server import Server, serve

PROMPT = list(range(11, 11 + 64))


@pytest.fixture(scope="module")
def server(zoo):
    adapters = {"a": zoo.adapter("llama2", "dora"), "b": zoo.adapter("llama2", "lora")}
    with serve(zoo.model("llama2"), adapters, {"engine.kv_bytes": 16 << 20}) as running:
        yield running


def ask(server: Server, prompt: list[int], salt: str, adapter: str = "") -> tuple[int, float]:
    """(cached tokens of the answer's usage, prompt tokens that were computed for it)."""
    before = server.metric("dorad_prompt_tokens_total", source="computed")
    (sample,) = server.wire.generate(
        prompt, salt=salt, adapter=adapter, max_tokens=2, ignore_eos=True, seed=1
    )
    computed = server.metric("dorad_prompt_tokens_total", source="computed") - before
    return sample.finish.usage.cached_prompt_tokens, computed


def test_a_probe_cannot_tell_whether_another_tenant_asked_the_same(server: Server) -> None:
    """A guess under another salt costs what a cold prompt costs: as much work, so as much time."""
    assert ask(server, PROMPT, "tenant-1") == (0, len(PROMPT))
    cached, computed = ask(server, PROMPT, "tenant-1")
    assert (cached, computed) == (len(PROMPT) - 1, 1), "the cache does work for its owner"
    never_asked = [token + 100 for token in PROMPT]
    for salt in ("", "tenant-2", "tenant-1 ", "Tenant-1"):
        assert ask(server, PROMPT, salt) == ask(server, never_asked, salt) == (0, len(PROMPT))


def test_adapters_share_no_prefixes_even_of_one_tenant(server: Server) -> None:
    prompt = [token + 60 for token in PROMPT]
    for adapter in ("", "a", "b"):
        assert ask(server, prompt, "tenant-3", adapter) == (0, len(prompt))
    for adapter in ("", "a", "b"):
        assert ask(server, prompt, "tenant-3", adapter)[0] == len(prompt) - 1
