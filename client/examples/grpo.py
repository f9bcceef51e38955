"""A small GRPO loop: PEFT trains a DoRA policy, dorad draws its samples.

Each step: dorad samples groups of answers with the active version of the adapter "policy"; they get
rewards; one optimizer step moves the adapter; it is published from memory as the next version and
activated. The log-probabilities of trainer and server are compared at every step.

    python client/examples/grpo.py [--model DIR] [--steps 12] [--target HOST:PORT]
                                   [--colocate SOCKET] [--device cuda] [--servers 3]

Without --target it runs a server of its own: build/dorad, or DORAD_BINARY. With --servers it runs
so many, as a fleet on Ray (the extra ray): in the cluster that RAY_ADDRESS names, or one of its
own. With --colocate both
share the server's device, which on a GPU is the GPU: the server reads the adapter out of this
process's memory, this process trains over the server's base weights, of which there is one copy,
and has the KV cache's memory while it trains. SOCKET is the server's server.shared_memory_socket.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Before torch: trainer and server take turns on the same cores. Threads that spin while they wait
# for work would take them from the other side.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import transformers
from accelerate import init_empty_weights
from peft import LoraConfig, PeftModel, get_peft_model

from dorad import (
    AdapterVersion,
    Answers,
    Client,
    Fleet,
    GenerateRequest,
    Sample,
    SharedTensors,
    local_server,
)
from dorad.train import BaseWeights, adopt_base, base_weights, patch

ROOT = Path(__file__).resolve().parents[2]
MODEL = ROOT / ".cache" / "models" / "SmolLM2-135M-Instruct"

NAME = "policy"
GROUP = 8  # answers to one prompt
MAX_TOKENS = 16
TEMPERATURE = 0.7
LEARNING_RATE = 5e-4
BETAS = (0.9, 0.95)
LINEARS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
# Above it, samples are not from the trained policy: a defect, not rounding.
MAX_MEAN_DIFFERENCE = {torch.float32: 0.005, torch.bfloat16: 0.1}

# Questions, and words of which an answer to the point has one
TASKS = [
    ("What is the capital of France?", ("paris",)),
    ("What do bees make?", ("honey", "wax")),
    ("Why is the sky blue?", ("light", "scatter", "blue")),
    ("What do plants need to grow?", ("water", "sun", "light", "soil")),
    ("What is the ocean full of?", ("water", "fish", "salt", "life")),
    ("Who wrote Romeo and Juliet?", ("shakespeare",)),
    ("What does a doctor do?", ("patient", "health", "treat", "sick", "medic")),
    ("What is snow made of?", ("ice", "water", "crystal")),
]


def reward(text: str, ended: bool, keywords: tuple[str, ...]) -> float:
    """In [0, 1]: about five words, ended by the model itself, with punctuation, to the point."""
    length = max(0.0, 1 - abs(len(text.split()) - 5) / 12) * (1.0 if ended else 0.5)
    punctuated = text.rstrip().endswith((".", "!", "?"))
    topical = any(word in text.lower() for word in keywords)
    return 0.7 * length + 0.15 * punctuated + 0.15 * topical


@dataclass
class Group:
    """The answers to one prompt."""

    prompt: list[int]
    samples: list[Sample]
    rewards: torch.Tensor

    def advantages(self) -> torch.Tensor:
        """How much better than the group each answer is, in standard deviations."""
        return (self.rewards - self.rewards.mean()) / (self.rewards.std() + 1e-4)


@dataclass
class Step:
    """The results of one step. Times are in seconds."""

    version: str  # that drew the samples
    reward: float
    sampling: float
    training: float
    publishing: float
    mean_difference: float  # of the log-probabilities of sampled tokens, trainer against server
    max_difference: float


# --- Sampling -------------------------------------------------------------------------------------


class Prompts:
    """The tasks as token ids, and answers as text."""

    def __init__(self, model: Path) -> None:
        self._tokenizer: Any = transformers.AutoTokenizer.from_pretrained(model)
        self.token_ids = [self._encode(question) for question, _ in TASKS]

    def _encode(self, question: str) -> list[int]:
        text = self._tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], add_generation_prompt=True, tokenize=False
        )
        return list(self._tokenizer.encode(text, add_special_tokens=False))

    def decode(self, sample: Sample) -> str:
        return str(self._tokenizer.decode(sample.token_ids.tolist(), skip_special_tokens=True))


def sample_groups(
    client: Client | Fleet,
    prompts: Prompts,
    version: AdapterVersion,
    seed: int,
    last: Answers | None = None,
) -> Iterator[Group]:
    """One group for each prompt, all of them in one batch of the server. `last` has the answers of
    the last step, if that had the same seed: they are guesses, which change the time alone."""
    requests = [
        GenerateRequest(
            token_ids,
            adapter=version.name,  # the active version: it must be the one just published
            n=GROUP,
            max_tokens=MAX_TOKENS,
            temperature=TEMPERATURE,
            logprobs="raw",
            seed=seed + index,
        )
        for index, token_ids in enumerate(prompts.token_ids)
    ]
    answers = client.generate_many(requests, answers=last)
    for request, samples, (_, keywords) in zip(requests, answers, TASKS, strict=True):
        for sample in samples:
            check_origin(sample, version)
        rewards = [reward(prompts.decode(s), s.finish_reason == "stop", keywords) for s in samples]
        yield Group(list(request.token_ids), samples, torch.tensor(rewards))


def check_origin(sample: Sample, version: AdapterVersion) -> None:
    """Raises unless exactly this version made every token, to the end."""
    origins = {(span.adapter, span.version, span.digest) for span in sample.spans}
    if origins != {(version.name, version.version, version.digest)}:
        raise RuntimeError(
            f"expected tokens of {version.label} {version.digest}, got {sample.spans}"
        )
    named = sum(span.end - span.begin for span in sample.spans)
    if named != len(sample.token_ids) or sample.finish_reason not in ("stop", "length"):
        raise RuntimeError(f"an answer is incomplete: {sample}")


# --- Training -------------------------------------------------------------------------------------


def make_base(model: Path, weights: BaseWeights | None) -> Any:
    if weights is None:
        # fp32 on both sides, over the same bf16 checkpoint. Widening bf16 is exact, so trainer and
        # server have the same weights and differ in the order of sums only. In bf16 each side
        # rounds intermediate results at other places, and that hides small defects.
        return transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    # The server's own weights are in bf16, for any compute dtype.
    config = transformers.AutoConfig.from_pretrained(model)
    with init_empty_weights(include_buffers=False):
        base = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    adopt_base(base, weights)
    return base


def make_policy(model: Path, weights: BaseWeights | None) -> PeftModel:
    base = make_base(model, weights)
    config = LoraConfig(
        r=16, lora_alpha=32, target_modules=LINEARS, use_dora=True, task_type="CAUSAL_LM"
    )
    # No dropout: the trained policy is the sampling policy.
    policy = get_peft_model(base, config).eval()
    patch(policy)  # PEFT would build B·A, as large as the base, in every forward.
    return policy


def answer_logits(policy: PeftModel, group: Group) -> torch.Tensor:
    """The logits that predict each token of the answers: [answers, longest answer, vocabulary]."""
    answers = [sample.token_ids.tolist() for sample in group.samples]
    longest = max(map(len, answers))
    # All rows begin with the same prompt, and tokens do not see what pads them on the right: no
    # attention mask is needed.
    rows = [group.prompt + answer + [0] * (longest - len(answer)) for answer in answers]
    ids = torch.tensor(rows, device=policy.device)
    over_bf16 = policy.get_input_embeddings().weight.dtype == torch.bfloat16
    with torch.autocast(policy.device.type, torch.bfloat16, enabled=over_bf16):
        logits: torch.Tensor = policy(input_ids=ids, logits_to_keep=longest + 1).logits
    return logits[:, :-1].float().cpu()


def padded(arrays: list[Any], dtype: torch.dtype) -> torch.Tensor:
    rows = [torch.as_tensor(array, dtype=dtype) for array in arrays]
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)


def train(policy: PeftModel, optimizer: torch.optim.Optimizer, groups: list[Group]) -> torch.Tensor:
    """One optimizer step. Returns |Δlogprob| of every sampled token, from before the step."""
    count = sum(len(sample.token_ids) for group in groups for sample in group.samples)
    differences = []
    for group in groups:
        tokens = padded([s.token_ids for s in group.samples], torch.int64)
        served = padded([s.logprobs for s in group.samples], torch.float32)
        sampled = padded([[True] * len(s.token_ids) for s in group.samples], torch.bool)
        logits = answer_logits(policy, group)
        raw = logits.detach().log_softmax(-1).gather(-1, tokens[..., None])[..., 0]
        differences.append((raw - served).abs()[sampled])

        # The policy is what the tokens were drawn from: the distribution at the sampler's
        # temperature. With one optimizer step a rollout it has not moved since: the ratio of GRPO
        # is 1, there is nothing to clip, and its gradient is what counts.
        logprobs = (logits / TEMPERATURE).log_softmax(-1).gather(-1, tokens[..., None])[..., 0]
        ratio = (logprobs - logprobs.detach()).exp()
        loss = -(group.advantages()[:, None] * ratio)[sampled].sum() / count
        loss.backward()
    torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return torch.cat(differences)


def publish(
    client: Client | Fleet, policy: PeftModel, shared: SharedTensors | None
) -> AdapterVersion:
    """Publishes and activates the policy as it is now."""
    if isinstance(client, Fleet):
        return client.publish(NAME, model=policy, keep_last=1)  # each server retires older ones
    if shared is None:
        return client.publish(NAME, model=policy)
    return client.publish_from_memory(NAME, model=policy, shared_memory=shared)


@contextmanager
def kv_memory(client: Client) -> Iterator[None]:
    """Has the memory of the server's KV cache, which the next version does not want filled."""
    client.sleep("kv")
    try:
        yield
    finally:
        client.wake("kv")


def run(
    client: Client | Fleet,
    model: Path,
    steps: int,
    seed: int = 0,
    shared: SharedTensors | None = None,
    weights: BaseWeights | None = None,
    same_seeds: bool = False,
) -> list[Step]:
    """The loop. Prints a line for each step."""
    torch.manual_seed(seed)
    prompts, policy = Prompts(model), make_policy(model, weights)
    most = MAX_MEAN_DIFFERENCE[torch.float32 if weights is None else torch.bfloat16]
    trained = [p for p in policy.parameters() if p.requires_grad]
    optimizer = torch.optim.Adam(trained, lr=LEARNING_RATE, betas=BETAS)
    version = publish(client, policy, shared)
    last = Answers() if same_seeds else None
    print("step  version     reward  sampling  training  publish  |Δlogprob| mean      max")
    done: list[Step] = []
    for number in range(1, steps + 1):
        began = time.monotonic()
        seeds = 1000 * (1000 * seed + (0 if same_seeds else number))  # the first prompt's
        groups = list(sample_groups(client, prompts, version, seeds, last))
        sampled = time.monotonic()
        colocated = client if weights is not None and isinstance(client, Client) else None
        with kv_memory(colocated) if colocated else nullcontext():
            differences = train(policy, optimizer, groups)
        updated = time.monotonic()
        following = publish(client, policy, shared)
        published = time.monotonic()
        step = Step(
            version=version.label,
            reward=float(torch.cat([group.rewards for group in groups]).mean()),
            sampling=sampled - began,
            training=updated - sampled,
            publishing=published - updated,
            mean_difference=float(differences.mean()),
            max_difference=float(differences.max()),
        )
        print(
            f"{number:>4}  {step.version:<10}  {step.reward:>6.3f}  {step.sampling:>6.2f} s"
            f"  {step.training:>6.2f} s  {step.publishing:>5.2f} s"
            f"  {step.mean_difference:>15.1e}  {step.max_difference:>7.1e}",
            flush=True,
        )
        if not step.mean_difference < most:
            raise RuntimeError(f"trainer and server disagree: {step.mean_difference} a token")
        if isinstance(client, Client):
            client.retire(version.ref)  # frees its memory; no request uses it any more
        done.append(step)
        version = following
    return done


# --- The program ----------------------------------------------------------------------------------


def settings(device: str) -> dict[str, object]:
    """Of servers of its own."""
    values: dict[str, object] = {"model.device": device}
    return values | ({"model.compute_dtype": "fp32"} if device == "cpu" else {})


PROGRAM = os.environ.get("DORAD_BINARY", ROOT / "build" / "dorad")


@contextmanager
def own_server(model: Path, device: str, socket: str) -> Iterator[Client]:
    """A server that runs as long as the block."""
    values = settings(device) | {"server.shared_memory_socket": socket}
    with local_server(model, values, program=PROGRAM) as target, Client(target) as client:
        yield client


@contextmanager
def own_fleet(model: Path, device: str, servers: int) -> Iterator[Fleet]:
    """A fleet on Ray that runs as long as the block."""
    import dorad.ray

    gpus = 0 if device == "cpu" else 1
    values = {"security.allow_insecure": True} | settings(device)
    fleet = dorad.ray.Fleet("grpo", model=model, settings=values, program=PROGRAM, gpus=gpus)
    try:
        fleet.scale(servers)
        yield fleet
    finally:
        fleet.shutdown()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, default=MODEL, help="the base, for both sides")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--target", help="a running server of the same model, computing in fp32")
    parser.add_argument(
        "--colocate", default="", help="the shared-memory socket of a server beside it"
    )
    parser.add_argument("--device", default="cpu", help="of a server of its own: cpu or cuda")
    parser.add_argument("--servers", type=int, default=0, help="of its own, as a fleet on Ray")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--same-seeds",
        action="store_true",
        help="sample each prompt with one seed at all steps: its last answers are drafts, so"
        " sampling is faster, but the learner sees nearly the same answers again and explores less",
    )
    options = parser.parse_args()
    if options.servers and (options.target or options.colocate):
        parser.error("--servers is for servers of its own, which share no GPU with the trainer")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # and so end the server, too
    transformers.utils.logging.disable_progress_bar()  # of loading
    began = time.monotonic()
    where: AbstractContextManager[Client | Fleet]
    if options.target:
        where = Client(options.target)
    elif options.servers:
        where = own_fleet(options.model, options.device, options.servers)
    else:
        where = own_server(options.model, options.device, options.colocate)
    memory = SharedTensors(options.colocate) if options.colocate else nullcontext()
    with where as client, memory as shared:
        weights = None
        if options.colocate and isinstance(client, Client):
            weights = base_weights(client)
        steps = run(
            client,
            options.model,
            options.steps,
            options.seed,
            shared,
            weights,
            options.same_seeds,
        )
    elapsed = time.monotonic() - began
    print(f"\nMean reward of {len(TASKS)} prompts x {GROUP} answers; {elapsed:.0f} s in all")
    for number, step in enumerate(steps, 1):
        print(f"{number:>4}  {step.reward:.3f}  {'#' * round(60 * step.reward)}")


if __name__ == "__main__":
    main()
