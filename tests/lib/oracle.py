"""The oracle: transformers + PEFT, read from the same folders as the server reads."""

import copy
import functools
import warnings
from pathlib import Path

import numpy as np
import torch
from peft import PeftModel
from transformers import AutoConfig

from lib.tiny_models import model_class

# Weights of a model of which several adapters are kept in memory.
SMALL = 10_000_000


class Oracle:
    """Log-probabilities of one model under any adapter. fp32 with eager attention by default."""

    def __init__(self, model_dir: Path, dtype: torch.dtype = torch.float32) -> None:
        self.dtype = dtype
        config = AutoConfig.from_pretrained(model_dir)
        self.base = (
            model_class(config)
            .from_pretrained(model_dir, dtype=dtype, attn_implementation="eager")
            .eval()
        )

    def load(self, adapter_dir: Path | None) -> torch.nn.Module:
        """The model with one adapter, unmerged; the base model for None. Not to be changed."""
        if adapter_dir is None:
            return self.base
        is_small = sum(weight.numel() for weight in self.base.parameters()) < SMALL
        load = _with_adapter if is_small else _with_adapter.__wrapped__
        return load(self, adapter_dir)

    def next_logprobs(
        self, adapter_dir: Path | None, sequences: list[list[int]]
    ) -> list[np.ndarray]:
        """For each sequence [T, V] in fp32: row t is the distribution of the token after t."""
        model = self.load(adapter_dir)
        with torch.inference_mode():
            return [
                torch.log_softmax(model(torch.tensor([ids])).logits[0].float(), dim=-1).numpy()
                for ids in sequences
            ]

    def image_logprobs(
        self, adapter_dir: Path | None, inputs: dict[str, torch.Tensor]
    ) -> np.ndarray:
        """As next_logprobs, of one prompt with images: a processor's result (lib.pictures)."""
        model = self.load(adapter_dir)
        with torch.inference_mode():
            logits = model(**inputs, use_cache=False).logits[0].float()
        return torch.log_softmax(logits, dim=-1).numpy()

    def greedy(self, adapter_dir: Path | None, prompt: list[int], tokens: int) -> list[int]:
        """Greedy continuation of exactly `tokens` tokens, without stopping."""
        model = self.load(adapter_dir)
        ids, cache, result = torch.tensor([prompt]), None, []
        with torch.inference_mode():
            for _ in range(tokens):
                output = model(ids, past_key_values=cache, use_cache=True)
                cache = output.past_key_values
                ids = output.logits[:, -1:].argmax(dim=-1)
                result.append(int(ids))
        return result


@functools.lru_cache(maxsize=32)
def _with_adapter(oracle: Oracle, adapter_dir: Path) -> torch.nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = PeftModel.from_pretrained(copy.deepcopy(oracle.base), adapter_dir)
    # PEFT keeps fp16 and bf16 adapters in fp32; under a bf16 base its own default applies.
    return model.eval()


def compare(ours: np.ndarray, oracle: np.ndarray) -> tuple[float, float]:
    """The smallest cosine over rows, and the largest difference of a log-probability."""
    assert ours.shape == oracle.shape, (ours.shape, oracle.shape)
    a, b = ours.astype(np.float64), oracle.astype(np.float64)
    norms = np.linalg.norm(a, axis=-1) * np.linalg.norm(b, axis=-1)
    cosine = (a * b).sum(axis=-1) / norms
    return float(cosine.min()), float(np.abs(a - b).max())
