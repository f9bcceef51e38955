"""Tenants take turns: one tenant's crowd of samples does not make another tenant's call wait."""

from concurrent.futures import ThreadPoolExecutor

import dorad
import pytest
from lib.server import serve, wait_until
from lib.tokens import write_tokens

PROMPT = list(range(10, 60))
PLACES = 8
SAMPLES = 128


@pytest.fixture
def server(zoo, tmp_path):
    tokens = tmp_path / "tokens.yaml"
    names = {"crowd": ("crowd", ["infer"]), "honest": ("honest", ["infer"])}
    write_tokens(tokens, names, {"crowd": {}, "honest": {}})
    settings = {"security.tokens_file": tokens, "engine.max_running_sequences": PLACES}
    with serve(zoo.model("slow"), settings=settings) as running:
        yield running


def test_a_crowd_of_samples_does_not_delay_another_tenants_call(server) -> None:
    """Counted in sequences that have not begun: in the order of arrival there would be none."""

    def client(name: str) -> dorad.Client:
        return dorad.Client(server.grpc, token=f"{name}-token", retry_for=0, timeout=120)

    def waiting() -> float:
        return server.metric("dorad_engine_waiting_sequences")

    with client("crowd") as crowd, client("honest") as honest:
        with ThreadPoolExecutor(4) as pool:
            calls = [
                pool.submit(
                    crowd.generate,
                    PROMPT,
                    n=SAMPLES,
                    max_tokens=100,
                    ignore_eos=True,
                    request_id=f"crowd-{number}",
                )
                for number in range(4)
            ]
            wait_until(lambda: waiting() > 3 * SAMPLES, what="the crowd")
            answers = [
                honest.generate(PROMPT, max_tokens=10, ignore_eos=True, seed=seed)
                for seed in range(3)
            ]
            left = waiting()
            crowd.abort([f"crowd-{number}" for number in range(4)])
            for call in calls:
                call.exception(60)
        assert left > 2 * SAMPLES
        # The neighbours change no bit.
        alone = [
            honest.generate(PROMPT, max_tokens=10, ignore_eos=True, seed=seed) for seed in range(3)
        ]
        for answer, quiet in zip(answers, alone, strict=True):
            assert answer[0].token_ids.tolist() == quiet[0].token_ids.tolist()
