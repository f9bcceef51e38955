"""Base weights quantised by bitsandbytes (QDoRA), which are dequantised a part at a time."""

from __future__ import annotations

import importlib
import math
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from dorad.train._norm import CHUNK_BYTES, weight_norm

LAYERS = {
    "peft.tuners.lora.bnb.Linear4bit": ("bitsandbytes.nn.modules.Linear4bit", "Params4bit"),
    "peft.tuners.lora.bnb.Linear8bitLt": ("bitsandbytes.nn.modules.Linear8bitLt", "Int8Params"),
}
"""PEFT's LoRA layers over quantised weights: the only base layer and parameter of each."""

# No part has more of the rows: even a small matrix never exists whole.
_PARTS = 8
_PACKED_ROWS = 32  # of bitsandbytes' layout for CPUs with AVX512-BF16


class QuantisedWeight:
    """A matrix [out, in] in 4 or 8 bits, as bitsandbytes' layer has it. Holds references only."""

    def __init__(self, base_layer: Any) -> None:
        self._weight = base_layer.weight
        self._state: Any = self._weight.quant_state if _is_4bit(base_layer) else None
        if self._state is not None:
            self.shape = torch.Size(self._state.shape)
            self.dtype: torch.dtype = self._state.dtype
        else:
            self.shape = self._weight.shape
            self.dtype = torch.float32
            # bitsandbytes moves it from the parameter to the layer in the first forward.
            scales = base_layer.state.SCB
            self._scales = self._weight.SCB if scales is None else scales

    def norm(self, a: torch.Tensor, b: torch.Tensor, scaling: float) -> torch.Tensor:
        """‖W + scaling·b @ a‖ of each row, [out], in fp32, or fp64 with fp64 factors; detached."""
        norms = [weight_norm(part, a, b[rows], scaling) for rows, part in self.parts()]
        return torch.cat(norms)

    def parts(self) -> Iterator[tuple[slice, torch.Tensor]]:
        """Consecutive rows of the dequantised matrix, at most an eighth of it at a time."""
        out, width = self.shape
        step = self._aligned(min(CHUNK_BYTES // (4 * width), -(-out // _PARTS)))
        absmax = None if self._state is None else self._absmax()
        for begin in range(0, out, step):
            end = min(begin + step, out)
            yield slice(begin, end), self._rows(begin, end, absmax)

    def _aligned(self, rows: int) -> int:
        """The next number of rows whose end is a block's end."""
        multiple = 1
        if self._state is not None:
            block: int = self._state.blocksize
            multiple = (
                _PACKED_ROWS if self._is_packed() else block // math.gcd(block, self.shape[1])
            )
        return max(1, -(-rows // multiple)) * multiple

    def _is_packed(self) -> bool:
        """In evaluation on some CPUs bitsandbytes changes the weight's layout, for good."""
        return bool(getattr(self._state, "packing_format_for_cpu", False))

    def _absmax(self) -> torch.Tensor:
        """The scale of each block, [blocks] in fp32; packed, [in / block, out]."""
        scales: torch.Tensor = self._state.absmax
        if self._state.nested:
            scales = _bnb().dequantize_blockwise(scales, self._state.state2) + self._state.offset
        return scales.float()

    def _rows(self, begin: int, end: int, absmax: torch.Tensor | None) -> torch.Tensor:
        data = self._weight.data
        rows: torch.Tensor
        if absmax is None:
            rows = _bnb().int8_vectorwise_dequant(
                data[begin:end], self._scales[begin:end].to(data.device)
            )
        elif self._is_packed():
            rows = self._packed_rows(begin, end, absmax)
        else:
            width, block = self.shape[1], self._state.blocksize
            first, last = begin * width, end * width
            # Some kernels are wrong where blocks do not end with the rows.
            by_block = width % block != 0 and last % block == 0
            values = self._dequantised(first, last, absmax, block if by_block else width)
            rows = values.view(-1, width)
        return rows

    def _dequantised(self, first: int, last: int, absmax: torch.Tensor, width: int) -> torch.Tensor:
        """Values from a block's first one on, as a matrix of this width."""
        bnb = _bnb()
        block = self._state.blocksize
        part = bnb.QuantState(
            absmax[first // block : -(-last // block)],
            shape=torch.Size(((last - first) // width, width)),
            dtype=self.dtype,
            blocksize=block,
            quant_type=self._state.quant_type,
        )
        codes = self._weight.data.reshape(-1).view(torch.uint8)[first // 2 : -(-last // 2)]
        values: torch.Tensor = bnb.dequantize_4bit(codes.unsqueeze(1), part)
        return values

    def is_computed_right(self) -> bool:
        """Whether bitsandbytes itself dequantises this matrix right.

        Its kernels for CPUs with AVX-512 (0.50) do not where the width is a multiple of 16 but not
        of the block.
        """
        if self._state is None or self._is_packed() or self.shape[1] % self._state.blocksize == 0:
            return True
        rows = min(self._aligned(1), self.shape[0])
        absmax, width = self._absmax(), self.shape[1]
        theirs = self._dequantised(0, rows * width, absmax, width)
        return torch.equal(theirs, self._rows(0, rows, absmax))

    def _packed_rows(self, begin: int, end: int, absmax: torch.Tensor) -> torch.Tensor:
        """Of 32 rows, a byte has a value of one of the first 16 and one of the last 16."""
        packed = self._weight.data[begin:end].reshape(-1, self.shape[1] // 2, _PACKED_ROWS)
        codes = torch.cat([packed & 15, packed >> 4], dim=-1)
        codes = codes.view(*packed.shape, 2).transpose(1, 2).reshape(end - begin, self.shape[1])
        scales = absmax[:, begin:end].T.repeat_interleave(self._state.blocksize, dim=1)
        rows: torch.Tensor = self._state.code[codes.int()] * scales
        return rows

    def product(self, x: torch.Tensor) -> torch.Tensor:
        """x @ Wᵀ in x's dtype, or autocast's, with the gradient of x.

        W is dequantised again in the backward.
        """
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        result: torch.Tensor = _Product.apply(x, self)  # type: ignore[no-untyped-call]
        return result


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: QuantisedWeight) -> torch.Tensor:
        ctx.weight = weight
        y = x.new_empty(*x.shape[:-1], weight.shape[0])
        for rows, part in weight.parts():
            y[..., rows] = F.linear(x, part.to(x.dtype))
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        d_x = grad.new_zeros(*grad.shape[:-1], ctx.weight.shape[1])
        for rows, part in ctx.weight.parts():
            d_x += grad[..., rows] @ part.to(grad.dtype)
        return d_x, None


def quantised(base_layer: Any) -> QuantisedWeight | None:
    """The weight of one of bitsandbytes' layers, else None."""
    if type(getattr(base_layer, "weight", None)).__name__ in ("Params4bit", "Int8Params"):
        return QuantisedWeight(base_layer)
    return None


def unready(base_layer: Any) -> str | None:
    """The reason why the weight of one of `LAYERS` cannot be dequantised, if any."""
    weight = base_layer.weight
    if _is_4bit(base_layer):
        is_ready = weight.quant_state is not None
    else:
        is_ready = weight.dtype == torch.int8 and not weight.has_fp16_weights
    if not is_ready:
        return f"its base weight, in {weight.dtype}, is not quantised yet"
    if not QuantisedWeight(base_layer).is_computed_right():
        return f"bitsandbytes dequantises its {base_layer.in_features} columns wrongly here"
    return None


def _bnb() -> Any:
    return importlib.import_module("bitsandbytes.functional")


def _is_4bit(base_layer: Any) -> bool:
    return type(base_layer.weight).__name__ == "Params4bit"
