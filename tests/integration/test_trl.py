"""TRL's trainers over a dorad server: the policy that trains is the policy that samples."""

from contextlib import ExitStack

import dorad
import dorad.trl
import pytest
import torch
from dorad.trl import UnsupportedError, served
from lib import trl_runs
from lib.server import binary, serve
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM
from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer, SFTConfig, SFTTrainer
from trl.experimental.sdpo import SDPOConfig, SDPOTrainer

# fp32 on both sides, wherever the other tests run.
SETTINGS = {"model.device": "cpu"}


@pytest.fixture(scope="module")
def model(zoo):
    return zoo.model_with_tokenizer("llama2")


@pytest.fixture(scope="module")
def server(model):
    with serve(model, settings=SETTINGS) as server:
        yield server


@pytest.fixture
def client(server):
    with dorad.Client(server.grpc) as client:
        yield client


def grpo(server, policy, folder, **changes):
    return trl_runs.trainer(served(GRPOTrainer, server.grpc), GRPOConfig, policy, folder, **changes)


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("dora", {}),
        ("lora", {"vllm_mode": "server"}),
        ("dora", {"vllm_mode": "server", "top_p": 0.9}),
        ("lora", {"top_k": 20, "min_p": 0.02, "repetition_penalty": 1.3}),
    ],
    ids=["dora", "lora", "dora_top_p", "lora_top_k"],
)
def test_the_sampled_policy_is_the_trained_one(server, model, tmp_path, figures, kind, changes):
    policy = trl_runs.policy(model, **trl_runs.KINDS[kind])
    trainer = grpo(server, policy, tmp_path, **changes)
    recorder = trl_runs.Recorder(trainer)
    trainer.train()
    means = trl_runs.differences(trainer)
    figures.append(f"trl {kind} {changes}: sampling difference {max(means):.1e}")
    assert len(means) == 5 and 0 < max(means) < 1e-4
    assert max(trl_runs.logged(trainer, "sampling/sampling_logp_difference/max")) < 1e-2
    ratios = trl_runs.logged(trainer, "sampling/importance_sampling_ratio/mean")
    assert all(abs(ratio - 1) < 1e-3 for ratio in ratios)
    digests = set()
    for step, (at, version, requests, answers) in enumerate(recorder.calls):
        assert at == step
        assert [(request.n, request.adapter) for request in requests] == [(4, version.ref)] * 2
        origins = {span.ref for samples in answers for s in samples for span in s.spans}
        assert origins == {version.ref}
        digests.add(version.digest)
    assert len(digests) == 5, "a step did not change the adapter"


def test_a_skipped_synchronisation_shows(server, model, tmp_path):
    trainer = grpo(server, trl_runs.policy(model, use_dora=True), tmp_path)
    publish = trainer.vllm_generation.sync_weights

    def sometimes():
        if trainer.state.global_step != 3:
            publish()

    trainer.vllm_generation.sync_weights = sometimes
    trainer.train()
    means = trl_runs.differences(trainer)
    assert means[3] > 1e-3 and max(*means[:3], means[4]) < 1e-4


def test_rloo_samples_from_the_trained_policy(server, client, model, tmp_path):
    trainer = trl_runs.trainer(
        served(RLOOTrainer, server.grpc),
        RLOOConfig,
        trl_runs.policy(model, use_dora=True),
        tmp_path,
        max_steps=3,
    )
    generation, seen = trainer.vllm_generation, 0
    generate = generation.generate

    def compared(prompts, *arguments, **options):
        nonlocal seen
        _, completions, logprobs, _ = answer = generate(prompts, *arguments, **options)
        assert logprobs is None
        sequences = [[*p, *c] for p, c in zip(prompts, completions, strict=True)]
        ref = generation.version.ref
        scores = client.score(sequences, ref, temperature=trl_runs.TEMPERATURE)
        for prompt, completion, (row,) in zip(prompts, completions, scores, strict=True):
            ours = trl_runs.scored(trainer.model, prompt, completion)
            theirs = torch.from_numpy(row[len(prompt) :].copy())
            torch.testing.assert_close(theirs, ours, atol=1e-4, rtol=0)
            seen += len(completion)
        return answer

    generation.generate = compared
    trainer.train()
    assert seen > 100


def test_a_resumed_run_equals_the_whole_one(server, model, tmp_path):
    changes = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2}
    whole = grpo(server, trl_runs.policy(model, use_dora=True), tmp_path, **changes)
    recorder = trl_runs.Recorder(whole)
    whole.train()
    rest = grpo(server, trl_runs.policy(model, use_dora=True), tmp_path, **changes)
    resumed = trl_runs.Recorder(rest)
    rest.train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-2"))
    calls = recorder.tokens()
    assert resumed.tokens() == calls[2:]
    assert calls[0] != calls[2], "the same prompts got the same samples at another step"


def test_evaluation_does_not_change_what_training_samples(server, model, tmp_path):
    runs = []
    for changes in {}, {"eval_strategy": "steps", "eval_steps": 1, "num_generations_eval": 2}:
        trainer = grpo(server, trl_runs.policy(model), tmp_path, max_steps=3, **changes)
        recorder = trl_runs.Recorder(trainer)
        trainer.train()
        calls = zip(recorder.calls, recorder.tokens(), strict=True)
        runs.append([tokens for (_, _, requests, _), tokens in calls if requests[0].n == 4])
        assert (len(recorder.calls) > 3) == bool(changes)
    assert len(runs[0]) == 3 and runs[0] == runs[1]


def test_answers_of_the_last_epoch_save_time_and_leave_no_trace(server, model, tmp_path):
    runs = []
    for answers in dorad.Answers(max_bytes=0), dorad.Answers():  # The first one keeps nothing.
        trainer = trl_runs.trainer(
            served(GRPOTrainer, server.grpc, answers=answers),
            GRPOConfig,
            trl_runs.policy(model, use_dora=True),
            tmp_path,
            max_steps=3,
        )
        trainer.train_dataset = trainer.train_dataset.select(range(2))  # Each step is an epoch.
        recorder = trl_runs.Recorder(trainer)
        trainer.train()
        accepted = [
            sum(sample.usage.accepted_draft_tokens for samples in call[3] for sample in samples)
            for call in recorder.calls
        ]
        assert max(trl_runs.differences(trainer)) < 1e-4
        runs.append((recorder.tokens(), accepted))
    assert runs[0][0] == runs[1][0]
    assert runs[0][1] == [0, 0, 0]
    assert runs[1][1][0] == 0 and min(runs[1][1][1:]) > 8


def test_any_prompts_in_any_order_get_their_own_samples(server, client, model, tmp_path):
    trainer = grpo(server, trl_runs.policy(model, use_dora=True), tmp_path)
    a, b, c = [5, 6, 7], [8, 9], [5, 6, 7, 8]
    recorder = trl_runs.Recorder(trainer)
    prompts = [a, b, a, c, b, a]
    _, tokens, logprobs, ids = trainer.vllm_generation.generate(prompts, None, 1)
    ((_, _, requests, _),) = recorder.calls
    assert [(list(r.token_ids), r.n) for r in requests] == [(a, 3), (b, 2), (c, 1)]
    assert ids == [[[token] for token in row] for row in tokens]
    for prompt, row, values in zip(prompts, tokens, logprobs, strict=True):
        ours = trl_runs.scored(trainer.model, prompt, row)
        torch.testing.assert_close(torch.tensor(values)[:, 0], ours, atol=1e-4, rtol=0)
    assert len({tuple(tokens[i]) for i in (0, 2, 5)}) == 3, "equal prompts got one sample"
    again = trainer.vllm_generation.generate(prompts, None, 1)[1]
    assert again != tokens, "a second call of a step repeats the first"


def test_samples_end_with_the_trainers_tokens_only(zoo, tmp_path):
    folder = zoo.model_with_tokenizer("llama3")  # Its own end-of-sequence tokens are 2 and 5.
    policy = trl_runs.policy(folder)
    policy.generation_config.eos_token_id = [7, 8, 9]
    with serve(folder, settings=SETTINGS) as server:
        trainer = grpo(server, policy, tmp_path, temperature=3.0, max_completion_length=120)
        _, tokens, _, _ = trainer.vllm_generation.generate([[10, 11]] * 40, None, 40)
    ends = {row[-1] for row in tokens if len(row) < 120}
    assert len(ends) > 1 and ends <= {2, 7, 8, 9}  # 2 is the tokenizer's.
    inner = {token for row in tokens for token in row[:-1]}
    assert 5 in inner and not inner & {2, 7, 8, 9}


def test_the_example_trains(zoo, tmp_path, monkeypatch):
    model = zoo.model_with_tokenizer("llama3")
    example = trl_runs.example(monkeypatch)
    monkeypatch.setattr(example.grpo, "GROUP", 2)
    with serve(model, settings=SETTINGS) as server:
        trainer = example.make_trainer(model, 2, server.grpc, tmp_path)
        trainer.train()
    assert len(trl_runs.logged(trainer, "reward")) == 2
    assert 0 < max(trl_runs.differences(trainer)) < 1e-4


# --- Versions and servers -------------------------------------------------------------------------


def test_training_ends_with_the_last_policy_published_and_the_others_retired(
    server, client, model, tmp_path
):
    trainer = grpo(server, trl_runs.policy(model, use_dora=True), tmp_path, max_steps=2)
    trainer.train()
    name = trainer.vllm_generation.version.name
    versions = client.adapters(name)
    last = client.publish("again", model=trainer.model)
    assert versions[-1].digest == last.digest and versions[-1].active
    assert [v.state for v in versions[:-1]] == ["gone"] * (len(versions) - 1)


def test_trainers_that_share_a_name_leave_each_other_their_versions(
    server, client, model, tmp_path
):
    make = served(GRPOTrainer, server.grpc, adapter="shared")
    first, second = (
        trl_runs.trainer(make, GRPOConfig, trl_runs.policy(model, seed), tmp_path)
        for seed in (1, 2)
    )
    second.vllm_generation.sync_weights()
    states = {v.version: v.state for v in client.adapters("shared")}
    assert states[first.vllm_generation.version.version] == "ready"
    assert states[second.vllm_generation.version.version] == "ready"
    first.vllm_generation.generate([[5, 6]], None, 1)


def test_a_restarted_server_gets_the_version_again(model, tmp_path):
    settings = SETTINGS | {"server.grpc_listen": f"unix:{tmp_path}/dorad.sock"}
    with serve(model, settings=settings) as server:
        trainer = grpo(server, trl_runs.policy(model, use_dora=True), tmp_path, max_steps=3)
        generation = trainer.vllm_generation
        generate = generation.generate

        def after_a_restart(*arguments, **options):
            if trainer.state.global_step == 1:
                server.stop()
                restarted.enter_context(serve(model, settings=settings))
            return generate(*arguments, **options)

        generation.generate = after_a_restart
        with ExitStack() as restarted:
            trainer.train()
            # Published again for the second step, then for the third, then at the end.
            assert [v.version for v in generation.client.adapters(generation.version.name)] == [
                1,
                2,
                3,
            ]
    assert len(trl_runs.differences(trainer)) == 3 and max(trl_runs.differences(trainer)) < 1e-4


def test_tokens_of_another_version_stop_the_training(server, client, model, tmp_path):
    trainer = grpo(server, trl_runs.policy(model), tmp_path, max_steps=1)
    other = client.publish("other", model=trl_runs.policy(model, 5))
    generate_many = trainer.vllm_generation.client.generate_many

    def meddle(requests, **options):
        for request in requests:
            request.adapter = other.ref
        return generate_many(requests, **options)

    trainer.vllm_generation.client.generate_many = meddle
    with pytest.raises(dorad.UnexpectedVersion, match=r"expected \d+ tokens of trl-.*'other'"):
        trainer.train()


def test_without_an_address_the_trainer_runs_a_server_of_its_own(model, tmp_path, monkeypatch):
    monkeypatch.setenv("DORAD_BINARY", str(binary()))
    make = served(GRPOTrainer, settings={"engine.kv_bytes": "64MiB"})
    trainer = trl_runs.trainer(
        make, GRPOConfig, trl_runs.policy(model, use_dora=True), tmp_path, max_steps=2
    )
    trainer.train()
    assert max(trl_runs.differences(trainer)) < 1e-4
    generation = trainer.vllm_generation
    info = generation.client.info()
    assert info.shared_memory_socket and info.model.compute_dtype == "fp32"
    target = generation.client.target
    generation.close()
    with dorad.Client(target, retry_for=0) as client, pytest.raises(dorad.Unavailable):
        client.info()


def test_sleep_mode_leaves_the_device_to_the_trainer(server, model, tmp_path, monkeypatch):
    trainer = grpo(
        server, trl_runs.policy(model), tmp_path, max_steps=2, vllm_enable_sleep_mode=True
    )
    asleep = []
    monkeypatch.setattr(
        trainer,
        "training_step",
        lambda *a, _step=trainer.training_step, **k: (
            _step(*a, **k),
            asleep.append(trainer.vllm_generation.client.info().engine.sleeping),
        )[0],
    )
    trainer.train()
    trainer.vllm_generation.client.wake()
    assert [sorted(tags) for tags in asleep] == [["kv", "weights"]] * 2
    assert max(trl_runs.differences(trainer)) < 1e-4


# --- Refusals, before training --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"use_vllm": False}, "set use_vllm=True"),
        ({"vllm_structured_outputs_regex": "a*"}, "vllm_structured_outputs_regex"),
        ({"vllm_server_base_url": "http://127.0.0.1:8000"}, "vllm_server_base_url"),
        ({"vllm_tensor_parallel_size": 2}, "vllm_tensor_parallel_size=2"),
        ({"vllm_max_model_length": 4096}, "exceeds the server's context of 192"),
        ({"generation_kwargs": {"stop": ["x"], "n": 2}}, r"'n'\].*\n.*'stop'"),
    ],
)
def test_refuses_settings_by_name(server, model, tmp_path, changes, words):
    with pytest.raises(UnsupportedError, match=words):
        grpo(server, trl_runs.policy(model), tmp_path, **changes)


def test_refuses_a_model_without_an_adapter(server, model, tmp_path):
    with pytest.raises(UnsupportedError, match="give the trainer a peft_config"):
        grpo(server, AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32), tmp_path)


@pytest.mark.parametrize(
    "changes",
    [
        {"modules_to_save": ["lm_head"]},
        {"bias": "all"},
        {"lora_bias": True},
        {"init_lora_weights": "pissa"},
        {"trainable_token_indices": [5, 6]},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_refuses_an_adapter_that_cannot_be_served(server, client, zoo, tmp_path, changes):
    folder = zoo.model("llama_bias") if "bias" in changes else zoo.model_with_tokenizer("llama2")
    config = LoraConfig(r=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM", **changes)
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    before = {v.ref for v in client.adapters() if v.state == "ready"}
    with pytest.raises((UnsupportedError, dorad.InvalidArgument)):
        trl_runs.trainer(
            served(GRPOTrainer, server.grpc),
            GRPOConfig,
            get_peft_model(base, config),
            tmp_path,
            processing=zoo.model_with_tokenizer("llama2"),
        )
    assert {v.ref for v in client.adapters() if v.state == "ready"} <= before


def test_refuses_a_teacher_behind_the_server(server, model, tmp_path):
    arguments = trl_runs.arguments(tmp_path, num_generations=4, use_teacher_server=True)
    with pytest.raises(UnsupportedError, match="use_teacher_server"):
        served(SDPOTrainer, server.grpc)(
            model=trl_runs.policy(model),
            reward_funcs=trl_runs.reward,
            args=SDPOConfig(**arguments, vllm_mode="server", teacher_model_kind="live"),
            train_dataset=trl_runs.dataset(),
            processing_class=trl_runs.tokenizer(model),
        )


def test_refuses_the_server_of_another_model(zoo, server, tmp_path):
    other = zoo.model_with_tokenizer("llama3")
    with pytest.raises(UnsupportedError, match=r"the server's model .* is another one"):
        grpo(server, trl_runs.policy(other), tmp_path)


def test_refuses_a_trainer_that_does_not_generate(server, model, tmp_path):
    make = served(SFTTrainer, server.grpc)
    with pytest.raises(UnsupportedError, match="SFTTrainer does not generate"):
        make(
            model=trl_runs.policy(model),
            args=SFTConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False),
        )


def test_warns_of_dropout_and_of_rounding(server, model, tmp_path, caplog):
    grpo(server, trl_runs.policy(model, lora_dropout=0.05), tmp_path, bf16=True)
    said = "\n".join(record.message for record in caplog.records if record.name == "dorad.trl")
    assert "drops out (0.05)" in said and "token_truncate" in said
    caplog.clear()
    grpo(server, trl_runs.policy(model), tmp_path)
    assert not [record for record in caplog.records if record.name == "dorad.trl"]
