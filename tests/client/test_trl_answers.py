"""dorad.trl with `answers`: the seeds of prompts that come again, and their drafts."""

from types import SimpleNamespace

import dorad
import grpc
import numpy as np
import pytest
from dorad.trl import served
from dorad.trl._generation import Generation, Server
from fake_server.errors import fail
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

MAX_N = 3
LENGTH = 4
A, B = [3, 4], [5, 6, 7]


def policy():
    sizes = dict(hidden_size=24, intermediate_size=40, num_hidden_layers=2, vocab_size=50)
    base = LlamaForCausalLM(LlamaConfig(num_attention_heads=2, num_key_value_heads=2, **sizes))
    return get_peft_model(base, LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM"))


@pytest.fixture
def generation(server, monkeypatch):
    """Of a trainer at step 1, with `answers`."""
    monkeypatch.setattr(Generation, "_check", lambda self, info: None)  # It has no such model.
    made = []

    def make(answers, seed=42):
        model = policy().train()
        trainer = SimpleNamespace(
            args=SimpleNamespace(seed=seed),
            state=SimpleNamespace(global_step=1),
            model=model,
            model_wrapped=model,
            processing_class=SimpleNamespace(eos_token_id=None),
        )
        accelerator = SimpleNamespace(is_main_process=True, process_index=0)
        at = Server(server.target, f"policy-{len(made)}", answers=answers)
        it = Generation(
            trainer, at, model, accelerator, None, max_completion_length=LENGTH, temperature=0.7
        )
        it._max_n = MAX_N
        it.trainer = trainer
        made.append(it)
        return it

    yield make
    for each in made:
        each.close()


def drawn(server, generation, prompts, step=None):
    """The completions, and by prompt the requests: seeds, and their drafts."""
    if step is not None:
        generation.trainer.state.global_step = step
        generation.sync_weights()
    server.generate_calls.clear()
    completions = generation.generate(prompts, None, 1)[1]
    found = {}
    for call in server.generate_calls:
        drafts = [np.frombuffer(d.token_ids, "<i4").tolist() for d in call.drafts]
        prompt = tuple(np.frombuffer(call.prompt_token_ids, "<i4").tolist())
        found.setdefault(prompt, {})[call.sampling.seed] = drafts
    return completions, found


def seeds(found):
    return {prompt: set(requests) for prompt, requests in found.items()}


def test_a_prompt_that_comes_again_has_its_seeds_and_its_last_answers(server, generation):
    trained = generation(dorad.Answers())
    # B is two requests of at most MAX_N samples.
    completions, first = drawn(server, trained, [A, B, B, B, B, A])
    assert len(first[tuple(A)]) == 1 and len(first[tuple(B)]) == 2
    assert not any(drafts for requests in first.values() for drafts in requests.values())
    again, second = drawn(server, trained, [B, B, A, A, B, B], 2)
    assert seeds(second) == seeds(first) and len(set.union(*seeds(first).values())) == 3
    assert list(second[tuple(A)].values()) == [[completions[0], completions[5]]]
    drafts = [draft for each in second[tuple(B)].values() for draft in each]
    assert sorted(drafts) == sorted(completions[1:5])
    # What comes is what comes without: this server knows no seeds.
    assert again == drawn(server, generation(None), [B, B, A, A, B, B])[0]


def test_without_answers_nothing_is_kept_and_each_step_has_its_own_seeds(server, generation):
    trained = generation(None)
    _, first = drawn(server, trained, [A, B])
    _, second = drawn(server, trained, [A, B], 2)
    assert not any(drafts for requests in second.values() for drafts in requests.values())
    assert not set.union(*seeds(first).values()) & set.union(*seeds(second).values())
    # They are the places' in the batch.
    _, turned = drawn(server, generation(None), [B, A])
    assert seeds(turned)[tuple(B)] == seeds(first)[tuple(A)]


def test_further_requests_of_one_step_have_further_seeds(server, generation):
    trained = generation(dorad.Answers())
    one, two = (seeds(drawn(server, trained, [A])[1])[tuple(A)] for _ in range(2))
    assert one != two
    # In the next step also, whichever prompts are beside it.
    again = [seeds(drawn(server, trained, [B, A], step)[1])[tuple(A)] for step in (2, None)]
    assert again == [one, two]


def test_evaluation_and_the_trainers_seed_have_their_own(server, generation):
    trained, other = generation(dorad.Answers()), generation(dorad.Answers(), seed=43)
    training = seeds(drawn(server, trained, [A])[1])[tuple(A)]
    assert seeds(drawn(server, other, [A])[1])[tuple(A)] != training
    trained.trainer.model.eval()
    evaluated = [seeds(drawn(server, trained, [A], step)[1])[tuple(A)] for step in (1, 2)]
    assert evaluated[0] == evaluated[1] != training


def test_a_batch_that_is_sampled_again_has_the_same_seeds(server, generation):
    trained = generation(dorad.Answers())
    _, first = drawn(server, trained, [A, A])
    server.refuse_generate.append(
        lambda context: fail(
            context, grpc.StatusCode.NOT_FOUND, "ADAPTER_NOT_FOUND", "it has restarted"
        )
    )
    _, second = drawn(server, trained, [A, A], 2)
    assert seeds(second) == seeds(first)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_an_asynchronous_trainer_takes_none(server):
    from trl.experimental.async_grpo import AsyncGRPOTrainer

    with pytest.raises(ValueError, match="answers: AsyncGRPOTrainer generates in another process"):
        served(AsyncGRPOTrainer, server.target, answers=dorad.Answers())
