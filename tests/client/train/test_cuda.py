"""dorad.train on a GPU, with the real libdorad_train.so; skipped where there is none."""

import pytest
import torch
from dorad.train import _native, compose, patch, tier
from lib.dora_training import Linears, adapted, assert_close, inputs, step

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


@pytest.fixture(autouse=True)
def library():
    assert _native.library is not None, "build libdorad_train.so first (make build)"


def operands(rows, out, dtype, seed=0):
    made = torch.Generator().manual_seed(seed)
    base, lora, grad = (torch.randn(rows, out, generator=made).to("cuda", dtype) for _ in range(3))
    g = 1 + 0.05 * torch.randn(out, generator=made).cuda()
    return base, lora, g, grad


def gradients(base, lora, g, grad):
    leaves = [tensor.detach().clone().requires_grad_() for tensor in (base, lora, g)]
    delta = compose(*leaves, 0.7)
    delta.backward(grad.to(delta.dtype))
    return [delta.detach(), *(leaf.grad for leaf in leaves)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(1, 64), (300, 333), (2048, 4096)])
def test_the_kernels_agree_with_fp64(dtype, shape):
    base, lora, g, grad = operands(*shape, dtype)
    with tier("fused"):
        got = gradients(base, lora, g, grad)
    exact = gradients(base.double(), lora.double(), g.double(), grad.double())
    for index, (ours, wanted) in enumerate(zip(got, exact, strict=True)):
        rounding = torch.finfo(dtype).eps if index < 3 else 4 * torch.finfo(dtype).eps
        torch.testing.assert_close(
            ours.double(), wanted, rtol=rounding, atol=rounding * float(wanted.abs().max())
        )


def test_the_sum_of_the_magnitude_is_the_same_each_time():
    base, lora, g, grad = operands(8192, 4096, torch.bfloat16)
    with tier("fused"):
        first = gradients(base, lora, g, grad)[3]
        for _ in range(100):
            assert torch.equal(gradients(base, lora, g, grad)[3], first)


@pytest.mark.parametrize("name", ["fused", "eager"])
def test_a_patched_model_is_peft_s(name):
    torch.manual_seed(0)
    model = adapted(Linears()).cuda()
    x = inputs(model.base_model.model).cuda()
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    try:
        wanted = step(model, x)
        patch(model)
        with tier(name):
            assert_close(step(model, x), wanted, 5e-5)
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


def test_streams_and_graphs_are_the_caller_s():
    base, lora, g, _ = operands(256, 4096, torch.bfloat16)
    with tier("fused"), torch.no_grad():
        wanted = compose(base, lora, g, 0.7)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = compose(base, lora, g, 0.7)
        captured.zero_()
        graph.replay()
        torch.cuda.synchronize()
    assert torch.equal(captured, wanted)
