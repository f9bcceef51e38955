"""A library with the interface of libdorad_train.so that computes on the CPU; factors for it."""

import subprocess
from pathlib import Path

import torch

SOURCE = Path(__file__).with_suffix(".c")
GEMM = 7  # What stands for the address of cublasGemmEx.


def build(target, abi, *, other_device=False):
    """With `other_device` it has no code for any GPU."""
    defines = [f"-DABI={abi}", f"-DOTHER_DEVICE={int(other_device)}"]
    command = ["cc", "-std=c11", "-O1", "-shared", "-fPIC", *defines, "-o", target]
    subprocess.run([*command, SOURCE, "-lm"], check=True)


def factors(dtype=torch.float32, out=24, width=40, rank=8):
    made = torch.Generator().manual_seed(0)
    weight, a, b = (
        torch.randn(shape, generator=made) for shape in ((out, width), (rank, width), (out, rank))
    )
    return weight.bfloat16(), a.to(dtype), b.to(dtype)


def unfit():
    weight, a, b = factors(torch.bfloat16)
    wide = factors(torch.bfloat16, rank=4104)
    return {
        "weights in fp32": (weight.float(), a, b, 1.0),
        "factors in fp64": (weight, a.double(), b.double(), 1.0),
        "factors elsewhere": (weight, a, b.to("meta"), 1.0),
        "no scaling": (weight, a, b, 0.0),
        "odd ranks": (weight, a[:4], b[:, :4], 1.0),
        "odd widths": (weight[:, :36].contiguous(), a[:, :36], b, 1.0),
        "odd transposed outputs": (weight[:20].T.contiguous().T, a, b[:20], 1.0),
        "strided rows": (weight[::2], a, b[::2], 1.0),
        "odd addresses": (weight.flatten()[4:-36].view(23, 40), a, b[1:], 1.0),
        "ranks above the most": (*wide, 1.0),
        "three times the rank above the most": (*factors(torch.float32, rank=1368), 1.0),
        "no outputs": (weight[:0], a, b[:0], 1.0),
    }
