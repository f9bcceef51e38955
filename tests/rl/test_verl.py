"""verl: registry, replica, worker and clients of the package over Ray, against the server."""

import numpy as np
import pytest
import torch
from lib.server import ROOT

PROMPT = [1, 40, 77, 120, 33]
TEMPERATURE = 0.7
ADAPTERS = {1: "dora-0", 2: "dora-1", 3: "lora-0"}


@pytest.fixture(scope="module")
def found(folder, adapters, drive, result_of):
    with drive("verl", folder, adapters) as program:
        return result_of(program)


@pytest.fixture(scope="module")
def models(zoo, adapters):
    """By verl's step."""
    return {step: zoo.oracle("slow").load(adapters / name) for step, name in ADAPTERS.items()}


@pytest.fixture
def errors(models):
    """Differences of each token's log-probability from PEFT's at the temperature, by step."""

    def of(answer):
        ids = torch.tensor([PROMPT + answer["tokens"]])
        found = {}
        for step, model in models.items():
            with torch.inference_mode():
                rows = torch.log_softmax(model(ids).logits[0].float() / TEMPERATURE, dim=-1)
            own = rows[:-1].gather(1, ids[0, 1:, None])[len(PROMPT) - 1 :, 0].numpy()
            found[step] = np.abs(own - np.array(answer["logprobs"]))
        return found

    return of


def check_is_of(step, answers, errors):
    for answer in answers:
        assert answer["steps"] == answer["oldest"] == step
        worst = {other: rows.max() for other, rows in errors(answer).items()}
        assert worst.pop(step) < 1e-4 and min(worst.values()) > 1e-2


def test_each_update_publishes_the_policy_that_answers(found, errors, figures):
    check_is_of(1, found["first"], errors)
    check_is_of(2, found["second"], errors)
    check_is_of(3, [*found["third"], found["after"]], errors)
    samples = found["first"] + found["second"] + found["third"]
    assert {(s["reason"], len(s["tokens"])) for s in samples} == {("completed", 24)}
    assert len({tuple(s["tokens"]) for s in samples}) == len(samples) == 12
    worst = max(errors(s)[s["steps"]].max() for s in samples)
    figures.append(f"verl: {len(samples)} samples, max |Δlogprob| {worst:.1e}")


def test_greedy_answers_are_pefts(found, zoo, adapters):
    greedy = found["greedy"]
    assert greedy["tokens"] == zoo.oracle("slow").greedy(adapters / "dora-0", PROMPT, 8)
    assert max(greedy["logprobs"]) < 0


def test_nothing_is_generated_before_the_first_update(found):
    assert "no policy has been published" in found["early"]


def test_a_sleeping_replica_gives_back_its_memory_and_holds_requests(found, errors):
    assert set(found["sleeping"]) == {"weights", "kv"} and found["awake"] == []
    assert found["waits"] is True
    # It came before the update.
    check_is_of(1, [found["waited"]], errors)


def test_an_aborted_request_has_its_tokens_so_far(found, errors):
    aborted = found["aborted"]
    assert aborted["reason"] == "aborted" and aborted["steps"] == 2
    assert 0 < len(aborted["tokens"]) == len(aborted["logprobs"]) < 600
    assert errors(aborted)[2].max() < 1e-4


def test_a_request_aborted_before_its_first_token_has_none(found):
    assert found["early_abort"]["reason"] == "aborted" and found["early_abort"]["tokens"] == []


def test_requests_wait_for_the_update_after_an_abort(found, errors):
    check_is_of(3, [found["held"]], errors)


def test_an_aborted_request_goes_on_with_the_next_policy(found, errors):
    resumed = found["resumed"]
    assert (resumed["oldest"], resumed["steps"], len(resumed["tokens"])) == (2, 3, 600)
    before, after = (errors(resumed)[step] < 1e-4 for step in (2, 3))
    # Some tokens are of one version, all further ones of the next.
    switch = int(np.argmin(before))
    assert 0 < switch < 600 and before[:switch].all() and after[switch:].all()


def test_a_replica_that_leaves_refuses_requests(found):
    assert found["rejected"]["reason"] == "aborted" and found["rejected"]["tokens"] == []


def test_seeds_of_full_determinism_repeat_a_groups_samples(found):
    assert found["drawn"] == found["redrawn"]
    assert len({tuple(tokens) for tokens in found["drawn"]}) == 4


def test_settings_are_refused_all_at_once_on_both_sides(found):
    for text in found["settings"]:
        for name in ("tensor_model_parallel_size=2", "lora_rank=0", "'nccl'", "quantization=fp8"):
            assert name in text


def test_other_roles_than_a_workers_own_server_are_refused(found):
    assert "reward model" in found["roles"][0] and "whole weights" in found["roles"][1]


def test_requests_for_more_than_text_are_refused(found):
    assert "guided_json" in found["parameter"]
    assert "images" in found["image"]


def test_another_base_and_merged_weights_are_refused(found):
    assert "model.embed_tokens.weight: differs from the server's base model" in found["base"]
    assert "merged" in found["merged"]


def test_an_adapter_that_the_server_refuses_is_not_served(found):
    assert "the factors have rank 8, the configuration says 5" in found["adapter"]


def test_the_examples_new_adapter_is_dora_and_servable(folder, client, monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(ROOT / "client" / "examples")
    import verl_grpo

    verl_grpo.make_adapter(str(folder), tmp_path / "made", rank=4)
    made = client.publish("made", path=tmp_path / "made")
    assert (made.state, made.kind, made.max_rank) == ("ready", "dora", 4)


def test_verls_training_computes_the_servers_logprobs_and_notices_a_missing_update(
    folder, adapters, drive, result_of, figures, tmp_path
):
    with drive("verl_train", folder, adapters, tmp_path) as program:
        steps = result_of(program, 600)
    assert [step["training/global_step"] for step in steps] == [1, 2, 3, 4]
    assert all(step["actor/grad_norm"] > 0 for step in steps)
    assert all(step["training/off_policy/trajectory_staleness/max"] == 0 for step in steps)
    differences = [step["rollout_corr/log_ppl_abs_diff"] for step in steps]
    figures.append(f"verl: differences of the mean logprob {differences}")
    assert max(differences[:3]) < 1e-5 and differences[3] > 1e-3


def test_the_server_ends_with_its_actor(found):
    assert found["ended"] is True
