"""The demo's adapters: small DoRA trainings of SmolLM2 with PEFT, on the CPU.

    pirate-v1    talks like a pirate
    telegram-v1  answers as a telegram, terse and full of STOP
    pirate-v2    continues from pirate-v1 and keeps a log: the version that is hot-loaded

Each takes about a quarter of a minute on two cores and lands in .cache/adapters/NAME, where it
stays until its examples or its settings change.

    python demo/train_adapters.py [NAME...]
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import convert_smollm2
from cache import CACHE, locked
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from ui import console

ADAPTERS = CACHE / "adapters"
DATA = Path(__file__).resolve().parent / "data"
MODULES = ["v_proj", "o_proj", "down_proj"]
# The upper layers of 30: manners live there, and no gradient has to go further down.
LAYERS = list(range(18, 30))


@dataclass(frozen=True)
class Recipe:
    data: str
    start: str = ""
    """The adapter to go on from; empty: a fresh one."""
    prefix: str = ""
    """Before every answer."""
    rank: int = 8
    alpha: int = 16
    examples: int = 32
    """How many of the file's, the shortest first."""
    epochs: int = 2
    batch: int = 4
    learning_rate: float = 4e-3
    seed: int = 0


RECIPES = {
    "pirate-v1": Recipe("pirate.jsonl"),
    "telegram-v1": Recipe("telegram.jsonl", seed=1),
    "pirate-v2": Recipe(
        "pirate.jsonl", start="pirate-v1", prefix="Captain's log: ", epochs=1, seed=2
    ),
}


def fingerprint(name: str) -> str:
    """The adapter's dependencies: its settings, its examples, and the adapter it starts from."""
    recipe = RECIPES[name]
    settings = asdict(recipe) | {"modules": MODULES, "layers": LAYERS}
    parts = [json.dumps(settings, sort_keys=True), (DATA / recipe.data).read_text()]
    parts += [fingerprint(recipe.start)] if recipe.start else []
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def chat(tokenizer: Any, question: str) -> str:
    messages = [{"role": "user", "content": question}]
    return str(tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False))


def examples(tokenizer: Any, recipe: Recipe) -> list[tuple[list[int], int]]:
    """Token ids of each conversation, and how many of them belong to the prompt."""
    made = []
    for line in (DATA / recipe.data).read_text().splitlines():
        row = json.loads(line)
        prompt = tokenizer.encode(chat(tokenizer, row["question"]))
        answer = tokenizer.encode(recipe.prefix + row["answer"] + tokenizer.eos_token)
        made.append((prompt + answer, len(prompt)))
    return sorted(made, key=lambda example: len(example[0]))[: recipe.examples]


def batches(data: list[tuple[list[int], int]], recipe: Recipe, pad: int) -> Iterator[Any]:
    """Right-padded batches; only the tokens of the answers have labels."""
    import torch

    order = random.Random(recipe.seed)
    for _ in range(recipe.epochs):
        shuffled = order.sample(data, len(data))
        for first in range(0, len(shuffled), recipe.batch):
            rows = shuffled[first : first + recipe.batch]
            width = max(len(ids) for ids, _ in rows)
            ids = torch.full((len(rows), width), pad)
            labels = torch.full((len(rows), width), -100)
            mask = torch.zeros((len(rows), width), dtype=torch.long)
            for i, (tokens, prompt) in enumerate(rows):
                ids[i, : len(tokens)] = torch.tensor(tokens)
                labels[i, prompt : len(tokens)] = torch.tensor(tokens[prompt:])
                mask[i, : len(tokens)] = 1
            yield {"input_ids": ids, "labels": labels, "attention_mask": mask}


def adapted_model(model: Path, recipe: Recipe) -> Any:
    import torch
    from peft import LoraConfig, PeftModel, get_peft_model
    from transformers import AutoModelForCausalLM

    torch.manual_seed(recipe.seed)
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    if recipe.start:
        return PeftModel.from_pretrained(base, ensure(recipe.start), is_trainable=True)
    config = LoraConfig(
        r=recipe.rank,
        lora_alpha=recipe.alpha,
        target_modules=MODULES,
        layers_to_transform=LAYERS,
        use_dora=True,
        task_type="CAUSAL_LM",
    )
    return get_peft_model(base, config)


@contextmanager
def progress(name: str, steps: int) -> Iterator[Callable[[float], None]]:
    """A bar on a terminal, now and then a line elsewhere. Call the value with each step's loss."""
    title = f"train {name}"
    start, done, loss = time.monotonic(), 0, float("nan")
    if console.is_terminal:
        columns = (
            TextColumn("{task.description:<34}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("loss {task.fields[loss]:.2f}"),
            TimeElapsedColumn(),
        )
        with Progress(*columns, console=console, transient=True) as bar:
            task = bar.add_task(title, total=steps, loss=loss)

            def advance(value: float) -> None:
                nonlocal loss
                loss = value
                bar.update(task, advance=1, loss=value)

            yield advance
    else:
        print(f"{title:<34} ...", flush=True)

        def advance(value: float) -> None:
            nonlocal loss, done
            loss, done = value, done + 1
            if done % 4 == 0:
                elapsed = time.monotonic() - start
                at = f"{title:<34} {elapsed:4.0f} s"
                print(f"{at}  step {done}/{steps}, loss {loss:.2f}", flush=True)

        yield advance
    elapsed = time.monotonic() - start
    console.print(f"{title:<34} {elapsed:4.0f} s  [green]ok[/]   loss {loss:.2f}")


def train(name: str, folder: Path) -> None:
    import torch
    import transformers
    from transformers import AutoTokenizer

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    recipe = RECIPES[name]
    model_folder = convert_smollm2.ensure()
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    data = examples(tokenizer, recipe)
    model = adapted_model(model_folder, recipe)
    model.train()
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=recipe.learning_rate, weight_decay=0.0)
    steps = recipe.epochs * -(-len(data) // recipe.batch)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 4))
    with progress(name, steps) as advance:
        for batch in batches(data, recipe, tokenizer.pad_token_id):
            loss = model(**batch).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(parameters, 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            advance(loss.item())
    model.save_pretrained(folder)


def ensure(name: str) -> Path:
    """The adapter's PEFT folder, trained when it is not there or its recipe has changed."""
    folder = ADAPTERS / name
    stamp = folder / "fingerprint.txt"
    want = fingerprint(name)
    with locked(folder):
        if not (stamp.exists() and stamp.read_text() == want):
            with tempfile.TemporaryDirectory(dir=ADAPTERS, prefix=".train-") as scratch:
                made = Path(scratch) / name
                train(name, made)
                (made / stamp.name).write_text(want)
                shutil.rmtree(folder, ignore_errors=True)
                made.rename(folder)
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(RECIPES))
    names = parser.parse_args().names or list(RECIPES)
    unknown = [name for name in names if name not in RECIPES]
    if unknown:
        parser.error(f"unknown: {', '.join(unknown)}")
    # Before torch is imported: threads that spin would take the cores from everything else.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    convert_smollm2.ensure()
    for name in names:
        ensure(name)


if __name__ == "__main__":
    main()
