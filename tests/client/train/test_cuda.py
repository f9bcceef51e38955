"""dorad.train on a GPU, with the real libdorad_train.so; skipped where there is none."""

import contextlib
import copy

import pytest
import torch
from dorad.train import _direct, _native, compose, explain, patch, tier, weight_norm
from lib.dora_training import Linears, adapted, assert_close, distance, inputs, step

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
    x = inputs(model.base_model.model).detach().cuda().requires_grad_()
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    try:
        wanted = step(model, x)
        patch(model)
        with tier(name):
            assert_close(step(model, x), wanted, 5e-5)
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


class Linear(torch.nn.Module):
    def __init__(self, width, out, bias):
        super().__init__()
        self.linear = torch.nn.Linear(width, out, bias=bias)

    def forward(self, x):
        return self.linear(x)


def whole(dtype, width, out, rank, bias, half_adapters):
    """A patched linear on the GPU, and PEFT's in fp64 of the same values."""
    torch.manual_seed(0)
    model = adapted(
        Linear(width, out, bias).to(dtype), r=rank, autocast_adapter_dtype=not half_adapters
    ).cuda()
    with torch.no_grad():  # or sums over many rows leave fp16's range
        model.base_model.model.linear.lora_B["default"].weight.mul_(rank**-0.5)
        model.base_model.model.linear.lora_A["default"].weight.mul_(width**-0.5)
    truth = copy.deepcopy(model).double()
    patch(model)
    return model, truth


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(1, 64, 64, 8), (70, 136, 200, 8), (512, 4096, 1024, 384)])
@pytest.mark.parametrize(
    ("dtype", "adapters"),
    [
        (torch.bfloat16, "bf16"),
        (torch.bfloat16, "fp32, autocast"),
        (torch.float16, "fp16"),
        (torch.float32, "fp32"),
    ],
)
def test_a_linear_as_one_function_agrees_with_fp64(dtype, adapters, shape, bias, monkeypatch):
    rows, width, out, rank = shape
    autocast = adapters.endswith("autocast")
    model, truth = whole(dtype, width, out, rank, bias, not autocast)
    assert set(explain_in(model, rows, autocast).values()) == {"fused_backward"}
    x = (
        (torch.randn(2, rows, width) * width**-0.5).cuda().to(dtype).requires_grad_()
    )  # fp16's range
    called = []
    backward = _native.Library.linears_backward
    monkeypatch.setattr(
        _native.Library, "linears_backward", lambda *given: called.append(1) or backward(*given)
    )
    context = torch.autocast("cuda", dtype) if autocast else None
    got = step(model, x, context=context)
    wanted = step(truth, x.detach().double().requires_grad_())
    assert called == [1]
    tolerance = {torch.float32: 2e-5, torch.float16: 6e-3, torch.bfloat16: 4e-2}[dtype]
    for name, gradient in wanted.gradients.items():
        assert distance(got.gradients[name].double(), gradient) < tolerance, name
    assert distance(got.output.double(), wanted.output) < tolerance / 2
    with torch.no_grad(), context or contextlib.nullcontext():
        assert torch.equal(model(x), got.output)


def explain_in(model, rows, autocast):
    with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
        return {name: why.tier for name, why in explain(model, rows).items()}


def test_a_linear_as_one_function_works_in_graphs_and_on_other_streams():
    model, _ = whole(torch.bfloat16, 4096, 1024, 384, True, True)
    x = torch.randn(64, 4096).cuda().bfloat16().requires_grad_()
    wanted = step(model, x)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        assert_close(step(model, x), wanted, 0)
        graph = torch.cuda.CUDAGraph()
        with torch.no_grad():
            model(x)
            stream.synchronize()
            with torch.cuda.graph(graph, stream=stream):
                captured = model(x)
    torch.cuda.synchronize()
    captured.zero_()
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(captured, wanted.output)


def factors(out, width, rank, dtype, transposed=False):
    made = torch.Generator().manual_seed(0)
    weight = 0.02 * torch.randn(out, width, generator=made)
    a = torch.randn(rank, width, generator=made) * width**-0.5
    b = 0.5 * torch.randn(out, rank, generator=made) * rank**-0.5
    weight = weight.cuda().bfloat16()
    if transposed:
        weight = weight.T.contiguous().T
    return weight, a.cuda().to(dtype), b.cuda().to(dtype)


def exact_norm(weight, a, b, scaling):
    return (weight.double() + scaling * b.double() @ a.double()).norm(dim=1)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.bfloat16, 2e-6), (torch.float16, 4e-6), (torch.float32, 2**-16)],
)
@pytest.mark.parametrize("shape", [(4096, 12288, 384), (1024, 4096, 384), (136, 200, 8)])
def test_direct_norms_are_the_dense_ones(shape, dtype, tolerance, transposed):
    weight, a, b = factors(*shape, dtype, transposed)
    for scaling in 2.0, -0.3:
        wanted = exact_norm(weight, a, b, scaling)
        norm = _direct.direct_norm(weight, a, b, scaling)
        torch.testing.assert_close(norm.double(), wanted, rtol=tolerance, atol=0)
        assert torch.equal(weight_norm(weight, a, b, scaling), norm)
        assert torch.equal(torch.ops.dorad.weight_norm(weight, a, b, scaling, 1 << 28), norm)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [(1000, 4096, 20), (130, 50257, 16)])
def test_norms_that_the_kernel_leaves_are_the_dense_ones(shape, dtype):
    weight, a, b = factors(*shape, dtype)
    for scaling in 2.0, -0.3:
        assert _direct.direct_norm(weight, a, b, scaling) is None
        wanted = exact_norm(weight, a, b, scaling)
        norm = weight_norm(weight, a, b, scaling)
        torch.testing.assert_close(norm.double(), wanted, rtol=3e-5, atol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [(1024, 4096, 384), (1000, 4096, 20)])
def test_a_step_does_not_wait_for_the_gpu(shape, dtype):
    weight, a, b = factors(*shape, dtype)
    base, lora, g, grad = operands(64, shape[0], torch.bfloat16)
    with tier("fused"):
        weight_norm(weight, a, b, 2.0)  # what is made once may wait
        gradients(base, lora, g, grad)
        torch.cuda.set_sync_debug_mode("error")
        try:
            weight_norm(weight, a, b, 2.0)
            gradients(base, lora, g, grad)
        finally:
            torch.cuda.set_sync_debug_mode("default")


def test_direct_calls_and_operators_give_the_same_bits():
    base, lora, g, grad = operands(300, 4096, torch.bfloat16)
    with tier("fused"):
        direct = gradients(base, lora, g, grad)
        compiled = torch.compile(compose, fullgraph=True, backend="aot_eager")
        leaves = [tensor.detach().clone().requires_grad_() for tensor in (base, lora, g)]
        delta = compiled(*leaves, 0.7)
        delta.backward(grad)
    for ours, theirs in zip(direct, [delta, *(leaf.grad for leaf in leaves)], strict=True):
        assert torch.equal(ours, theirs)


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


def test_a_captured_graph_makes_its_norms():
    weight, a, b = (tensor.float() for tensor in factors(1000, 4096, 20, torch.float32))
    wanted = weight_norm(weight, a, b, 2.0)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = weight_norm(weight, a, b, 2.0)
    others = [torch.full((1000,), float("nan"), device="cuda") for _ in range(50)]
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(captured, wanted) and len(others) == 50
