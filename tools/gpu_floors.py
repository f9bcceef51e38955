#!/usr/bin/env python3
"""Prints the floors of decode steps and prefill by GPU, and how many adapters fit, as the tables of
docs/guides/gpu.md.

    python tools/gpu_floors.py [SHAPE...]       shapes of tools/model_shapes.json

A floor is what must move over the memory's bandwidth, or what must be multiplied over the tensor
cores' rate, whichever takes longer: of projections, and of attention, added up. Weights, factors
and KV are bf16. Bandwidths are those of the paper's table of GPUs, rates those of the vendor's data
sheets (dense bf16 with fp32 sums). Needs Python's standard library only.
"""

import argparse
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

RANK = 384
CONTEXT = 656  # of a row of a decode step
DECODE_ROWS = (1, 32, 128)
PROMPT = 4096
KV_TOKENS = 32768  # that memory is kept for beside adapters
USABLE = 0.9  # of the memory
BF16 = 2


@dataclass(frozen=True)
class Gpu:
    name: str
    target: str
    memory: float  # bytes
    bandwidth: float  # bytes a second
    rate: float  # operations a second


GPUS = (
    Gpu("L40S", "sm_89", 48e9, 0.86e12, 362e12),
    Gpu("A100 80 GB", "sm_80", 80e9, 2.04e12, 312e12),
    Gpu("RTX 6000 PRO", "sm_120", 96e9, 1.60e12, 500e12),
    Gpu("H200", "sm_90a", 141e9, 4.80e12, 989e12),
    Gpu("B200", "sm_100", 192e9, 7.70e12, 2250e12),
    Gpu("B300", "sm_103", 268e9, 7.70e12, 2250e12),
)


@dataclass(frozen=True)
class Model:
    """A dense decoder's text part, in elements unless a name says otherwise."""

    layers: int
    linears: tuple[tuple[int, int], ...]  # of a layer: in and out features
    head: int
    embedding: int  # 0 if it is the head
    kv: int  # of a token
    query: int  # of all heads of a layer

    @staticmethod
    def of(shape: dict[str, Any]) -> "Model":
        hidden, inter = shape["hidden_size"], shape["intermediate_size"]
        query = shape["num_attention_heads"] * shape["head_dim"]
        kv = shape["num_key_value_heads"] * shape["head_dim"]
        vocabulary = shape["vocab_size"] * hidden
        return Model(
            layers=shape["num_hidden_layers"],
            linears=(
                (hidden, query),
                (hidden, kv),
                (hidden, kv),
                (query, hidden),
                (hidden, inter),
                (hidden, inter),
                (inter, hidden),
            ),
            head=vocabulary,
            embedding=0 if shape["tie_word_embeddings"] else vocabulary,
            kv=2 * kv * shape["num_hidden_layers"],
            query=query,
        )

    @property
    def weights(self) -> int:
        return self.layers * sum(i * o for i, o in self.linears)

    @property
    def factors(self) -> int:
        return self.layers * RANK * sum(i + o for i, o in self.linears)

    @property
    def adapter_bytes(self) -> int:
        magnitudes = 4 * self.layers * sum(o for _, o in self.linears)
        return BF16 * self.factors + magnitudes

    def decode_ms(self, gpu: Gpu, rows: int) -> float:
        read = BF16 * (self.weights + self.head) + self.adapter_bytes
        multiplied = 2 * rows * (self.weights + self.factors + self.head)
        cache = BF16 * self.kv * rows * CONTEXT
        attended = 4 * rows * CONTEXT * self.query * self.layers
        return 1e3 * (
            max(read / gpu.bandwidth, multiplied / gpu.rate)
            + max(cache / gpu.bandwidth, attended / gpu.rate)
        )

    def prefill_ms(self, gpu: Gpu) -> float:
        multiplied = 2 * PROMPT * (self.weights + self.factors)
        attended = 4 * PROMPT * PROMPT // 2 * self.query * self.layers
        return 1e3 * (multiplied + attended) / gpu.rate

    def adapters(self, gpu: Gpu) -> int | None:
        """That fit beside the weights and the KV cache; None: these do not fit by themselves."""
        room = USABLE * gpu.memory - BF16 * (
            self.weights + self.head + self.embedding + self.kv * KV_TOKENS
        )
        return None if room < 0 else int(room // self.adapter_bytes)


def rows_of(model: Model) -> Iterator[list[str]]:
    yield [
        "GPU",
        "target",
        "TB/s",
        "TFLOP/s",
        *(f"{rows} row{'s' * (rows > 1)}" for rows in DECODE_ROWS),
        f"prefill {PROMPT:,}",
        f"adapters of r = {RANK}",
    ]
    for gpu in GPUS:
        adapters = model.adapters(gpu)
        fits = adapters is not None
        yield [
            gpu.name,
            gpu.target,
            f"{gpu.bandwidth / 1e12:.2f}",
            f"{gpu.rate / 1e12:.0f}",
            *(f"{model.decode_ms(gpu, rows):.1f}" if fits else "–" for rows in DECODE_ROWS),
            f"{model.prefill_ms(gpu):.0f}" if fits else "–",
            str(adapters) if fits else "does not fit",
        ]


def table(rows: Iterator[list[str]]) -> str:
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([lines[0], "|" + "---|" * lines[0].count(" | ") + "---|", *lines[1:]])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("shapes", nargs="*", default=["qwen3-8b", "qwen3-vl-32b"])
    shapes = json.loads((Path(__file__).parent / "model_shapes.json").read_text())
    for name in parser.parse_args().shapes:
        model = Model.of(shapes[name])
        print(f"{name}: weights {BF16 * model.weights / 1e9:.1f} GB in layers,", end=" ")
        print(f"an adapter {model.adapter_bytes / 1e9:.2f} GB\n\n{table(rows_of(model))}\n")


if __name__ == "__main__":
    main()
