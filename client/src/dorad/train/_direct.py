"""The norm of DoRA by libdorad_train.so: one product B·A on tensor cores that is never stored.

Each tile of it is added to W, squared and summed, so that nothing cancels and ‖W‖² is not needed.
"""

from __future__ import annotations

import torch

from dorad.train import _native

# Of fp32, two bf16 terms have 16 bits; fp16 has 11.
_FACTORS = {torch.bfloat16, torch.float16, torch.float32}
_ALIGNMENT = 16  # bytes, 8 elements: for addresses and rows in the kernel's fast path


def direct_norm(
    weight: torch.Tensor, a: torch.Tensor, b: torch.Tensor, scaling: float
) -> torch.Tensor | None:
    """‖weight + scaling·b @ a‖ by rows, [out] in fp32; None outside of the fast path.

    Factors in bf16 are used as they are, others as two bf16 terms each: b @ a is then exact to
    2^-16 of |b| @ |a|.
    """
    if not takes(weight, a, b, scaling):
        return None
    exact = a.dtype == b.dtype == torch.bfloat16
    a, b = (a.contiguous(), b.contiguous()) if exact else _stacked(a, b)
    if not aligned(a, b):
        return None
    assert _native.library is not None
    norm = torch.empty(weight.shape[0], dtype=torch.float32, device=weight.device)
    _native.library.norm(weight, a, b, norm, scaling, not weight.is_contiguous())
    return norm


def takes(weight: torch.Tensor, a: torch.Tensor, b: torch.Tensor, scaling: float) -> bool:
    """Whether the fast path supports this norm, except for the addresses of factors.

    It supports `weight` in bf16, [out, in] or a transposed view of [in, out].
    """
    if scaling == 0 or weight.dtype != torch.bfloat16:
        return False
    if _native.why_missing(weight.device) is not None:
        return False
    if a.dtype not in _FACTORS or b.dtype not in _FACTORS:
        return False
    if not weight.device == a.device == b.device:
        return False  # for torch to refuse
    (rank, width), out = a.shape, b.shape[0]
    exact = a.dtype == b.dtype == torch.bfloat16
    if not 0 < (rank if exact else 3 * rank) <= _native.MOST_RANK or (rank | width) % 8 != 0:
        return False
    if not weight.is_contiguous() and (out % 8 != 0 or not weight.T.is_contiguous()):
        return False
    return out > 0 and width > 0 and weight.data_ptr() % _ALIGNMENT == 0


def aligned(*tensors: torch.Tensor) -> bool:
    """Whether the fast path supports these contiguous factors' addresses."""
    return all(tensor.data_ptr() % _ALIGNMENT == 0 for tensor in tensors)


def _stacked(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """bf16 matrices of three times the rank, whose product is b @ a to within 2^-16."""
    dtype = torch.promote_types(a.dtype, b.dtype)
    a, b = a.to(dtype).contiguous(), b.to(dtype).contiguous()
    (rank, width), out = a.shape, b.shape[0]
    wide = a.new_empty(3 * rank, width, dtype=torch.bfloat16)
    tall = b.new_empty(out, 3 * rank, dtype=torch.bfloat16)
    assert _native.library is not None
    _native.library.three_terms(a, b, wide, tall)
    return wide, tall


def half_terms(factor: torch.Tensor) -> list[torch.Tensor]:
    """bf16 tensors whose sum is `factor`, to 2^-16 of each element."""
    high = factor.to(torch.bfloat16)
    if high.dtype == factor.dtype:
        return [high]
    return [high, (factor - high).to(torch.bfloat16)]
