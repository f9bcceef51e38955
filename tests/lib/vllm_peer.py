"""vLLM as a peer: its engine in this process, a model folder without weights (they are random), and
LoRA adapters with random ones. Imported only by the process that runs it."""

import argparse
import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

# Before vLLM is imported.
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from make_random_model import Shape, write_adapter
from vllm import LLM, SamplingParams
from vllm.lora.request import LoRARequest

from lib import vllm_images

SHORT, LONG = 32, 256  # tokens out; a decode step is the difference over the tokens between
REPEATS = 3
RANKS = (8, 16, 32, 64, 128, 256, 320, 512)  # what max_lora_rank may be


def load(
    shape: Shape, folder: Path, loras: int, rank: int, images: bool = False, **settings: Any
) -> tuple[LLM, list]:
    """An engine with random weights, and so many LoRA adapters for it, [None] for 0. images: its
    prompts may have one."""
    adapters: list[LoRARequest | None] = []
    if loras:
        most = next((most for most in RANKS if most >= rank), None)
        if most is None:
            raise ValueError(f"vLLM takes ranks up to {RANKS[-1]}, not {rank}")
        for i in range(loras):
            path = folder / f"lora-{i}"
            write_adapter(shape, rank, path, seed=i, dora=False)
            adapters.append(LoRARequest(f"adapter-{i}", i + 1, str(path)))
        settings |= dict(enable_lora=True, max_loras=loras, max_lora_rank=most)
    (folder / "vllm").mkdir(exist_ok=True)
    (folder / "vllm" / "config.json").write_text(json.dumps(shape.whole()))
    if shape.tower is not None:
        settings["limit_mm_per_prompt"] = {"image": int(images), "video": 0}
        settings["mm_processor_cache_gb"] = 0
        # FlashInfer may be missing.
        settings["additional_config"] = {"gdn_prefill_backend": "triton"}
    if images:
        vllm_images.write_processor(shape, folder / "vllm")
    llm = LLM(
        model=str(folder / "vllm"),
        load_format="dummy",
        skip_tokenizer_init=not images,
        dtype="bfloat16",
        seed=0,
        **settings,
    )
    return llm, adapters or [None]


class Engine:
    def __init__(self, peer: str, options: argparse.Namespace, folder: Path) -> None:
        # vLLM has Qwen3.5 as a whole only.
        whole = options.images > 0 or options.shape.startswith("qwen3.5")
        self.shape = Shape.read(options.shape, options.layers, tower=whole)
        self.prompt = max(options.context - (SHORT + LONG) // 2, 1)
        tokens = max(self.prompt + LONG, options.prefill + 1, 2048) + 16
        self.llm, (self.adapter,) = load(
            self.shape,
            folder,
            1 if peer == "vllm-lora" else 0,
            options.rank,
            images=options.images > 0,
            max_model_len=tokens,
            max_num_seqs=max(1, options.images, *options.batch),
            max_num_batched_tokens=max(8192, tokens),
            enable_prefix_caching=False,
            # Each batch has a graph of its own size; more would only take longer to start.
            compilation_config={"cudagraph_capture_sizes": sorted({1, *options.batch})}
            | ({} if options.vllm_compiles else {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}),
        )
        self.random = torch.Generator().manual_seed(1)
        self.processed: list[dict[str, Any]] = []
        self.images = 0

    def generate(self, rows: int, prompt: int, tokens: int) -> float:
        """Seconds."""
        size = (rows, prompt)
        ids = torch.randint(10, self.shape.config["vocab_size"], size, generator=self.random)
        sampling = SamplingParams(
            temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False
        )
        begin = time.perf_counter()
        answers = self.llm.generate(
            [{"prompt_token_ids": row} for row in ids.tolist()],
            sampling,
            use_tqdm=False,
            lora_request=self.adapter,
        )
        seconds = time.perf_counter() - begin
        assert all(len(answer.outputs[0].token_ids) == tokens for answer in answers)
        return seconds

    def decode(self, batch: int) -> float:
        self.generate(batch, self.prompt, 4)  # compiles, and loads the adapter
        short, long = (
            statistics.median(self.generate(batch, self.prompt, tokens) for _ in range(REPEATS))
            for tokens in (SHORT, LONG)
        )
        return 1e3 * (long - short) / (LONG - SHORT)

    def first_tokens(self, images: int) -> float:
        """Seconds until so many prompts of an image each have theirs, from processed pixels on."""
        if not self.processed:
            prompts = [vllm_images.prompt(self.shape, seed) for seed in range(8)]
            self.processed = list(self.llm.renderer.render_cmpl(prompts))
        inputs = []
        for _ in range(images):
            # By its hash vLLM knows an image again: this is a new one.
            self.images += 1
            image = dict(self.processed[self.images % len(self.processed)])
            inputs.append(image | {"mm_hashes": {"image": [f"image-{self.images}"]}})
        sampling = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, detokenize=False)
        engine, answers = self.llm.llm_engine, 0
        begin = time.perf_counter()
        for i, image in enumerate(inputs):
            engine.add_request(f"{self.images}-{i}", image, sampling, lora_request=self.adapter)
        while engine.has_unfinished_requests():
            answers += len(engine.step())
        assert answers == images
        return time.perf_counter() - begin

    def one_image(self) -> float:
        return 1e3 * statistics.median([self.first_tokens(1) for _ in range(9)][2:])

    def many_images(self, images: int) -> float:
        """Milliseconds for each."""
        return 1e3 * statistics.median(self.first_tokens(images) for _ in range(3)) / images

    def prefill(self, tokens: int) -> float:
        times = [self.generate(1, tokens, 1) for _ in range(REPEATS + 2)]
        return 1e3 * statistics.median(times[2:])


def measure(peer: str, options: argparse.Namespace, report) -> None:
    with tempfile.TemporaryDirectory(prefix="dorad-vllm-") as folder:
        engine = Engine(peer, options, Path(folder))
        for batch in options.batch:
            report.attempt(("decode", batch), lambda batch=batch: engine.decode(batch))
        if options.prefill:
            report.attempt(("prefill", options.prefill), lambda: engine.prefill(options.prefill))
        if options.images:
            report.attempt(("image", 1), engine.one_image)
            report.attempt(("images", options.images), lambda: engine.many_images(options.images))
