"""dorad.train's compose, (g - 1)·base + g·s·lora, in every tier."""

import pytest
import torch
from dorad.train import _compose, compose, tier

TIERS = ["eager", "fused"]


def operands(rows=33, out=20, dtype=torch.float32, lora_dtype=None, seed=0, spread=0.3):
    made = torch.Generator().manual_seed(seed)
    base, lora = (torch.randn(rows, out, generator=made, dtype=torch.float64) for _ in range(2))
    g = 1 + spread * (2 * torch.rand(out, generator=made, dtype=torch.float64) - 1)
    base, lora = base.to(dtype), lora.to(lora_dtype or dtype)
    return (
        base,
        lora,
        g.to(torch.float64 if torch.float64 in (dtype, lora_dtype) else torch.float32),
    )


def exact(base, lora, g, scaling):
    base, lora, g = base.double(), lora.double(), g.double()
    return (g - 1) * base + g * (scaling * lora)


@pytest.mark.parametrize("name", TIERS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_rounds_once(name, dtype):
    base, lora, g = operands(dtype=dtype)
    with tier(name):
        got = compose(base, lora, g, 0.75)
    wanted = exact(base, lora, g, 0.75)
    # Half a unit in the last place of the output, and the fp32 operations before it.
    slack = 4 * torch.finfo(g.dtype).eps * (base.double().abs() + lora.double().abs())
    rounding = torch.finfo(dtype).eps / 2 * wanted.abs() * 1.01 if dtype != g.dtype else 0
    assert got.dtype == dtype
    assert ((got.double() - wanted).abs() <= rounding + slack).all()


@pytest.mark.parametrize("name", TIERS)
def test_keeps_a_scale_that_half_precision_would_lose(name):
    base, lora, g = operands(dtype=torch.bfloat16, spread=1e-3)
    lora.zero_()
    with tier(name):
        got = compose(base, lora, g, 1.0)
    assert (g.bfloat16() == 1).any() and (got != 0).all()
    torch.testing.assert_close(got.double(), exact(base, lora, g, 1.0), rtol=2**-8, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_tiers_agree_bit_for_bit_forward(dtype):
    base, lora, g = operands(rows=1000, out=300, dtype=dtype)  # of two chunks
    with tier("eager"):
        eager = compose(base, lora, g, 0.7)
    with tier("fused"):
        assert torch.equal(compose(base, lora, g, 0.7), eager)


def gradients(arguments, name, scaling=0.7):
    leaves = [tensor.detach().clone().requires_grad_() for tensor in arguments]
    with tier(name):
        delta = compose(*leaves, scaling)
    grad = torch.linspace(-1, 1, delta.numel()).view(delta.shape).to(delta.dtype)
    delta.backward(grad)
    return [leaf.grad for leaf in leaves]


@pytest.mark.parametrize("name", TIERS)
def test_gradients_are_exact_in_fp64(name):
    base, lora, g = (t.requires_grad_() for t in operands(rows=4, out=3, dtype=torch.float64))
    with tier(name):
        assert torch.autograd.gradcheck(lambda *x: compose(*x, 0.7), (base, lora, g))


@pytest.mark.parametrize(
    ("dtype", "lora_dtype"),
    [
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.bfloat16),
        (torch.bfloat16, torch.float32),
        (torch.float32, torch.bfloat16),
    ],
)
def test_tiers_agree_on_gradients_bit_for_bit_but_for_the_sum(dtype, lora_dtype):
    arguments = operands(rows=1000, out=300, dtype=dtype, lora_dtype=lora_dtype)  # of two chunks
    *fused, d_g = gradients(arguments, "fused")
    *eager, eager_d_g = gradients(arguments, "eager")
    assert [grad.dtype for grad in fused] == [dtype, lora_dtype]
    for got, wanted in zip(fused, eager, strict=True):
        assert torch.equal(got, wanted)
    scale = eager_d_g.abs().max().item()
    torch.testing.assert_close(d_g, eager_d_g, rtol=1e-6, atol=1e-6 * scale)


@pytest.mark.parametrize("name", TIERS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_gradients_are_near_those_in_fp64(dtype, name):
    arguments = operands(rows=1000, out=300, dtype=dtype)
    wanted = gradients([tensor.double() for tensor in arguments], "eager")
    for got, exact_gradient in zip(gradients(arguments, name), wanted, strict=True):
        far = (got.double() - exact_gradient).norm() / exact_gradient.norm()
        assert far < torch.finfo(dtype).eps


def test_magnitude_gradient_is_the_same_every_time():
    arguments = operands(rows=5000, out=64)
    first = gradients(arguments, "fused")
    for _ in range(3):
        for got, wanted in zip(gradients(arguments, "fused"), first, strict=True):
            assert torch.equal(got, wanted)


@pytest.mark.parametrize("wanted", [(1, 0, 0), (0, 1, 0), (0, 0, 1), (1, 1, 0), (0, 1, 1)])
def test_gives_only_the_gradients_asked_for(wanted):
    arguments = operands()
    every = gradients(arguments, "fused")
    leaves = [t.clone().requires_grad_(bool(w)) for t, w in zip(arguments, wanted, strict=True)]
    with tier("fused"):
        delta = compose(*leaves, 0.7)
    delta.backward(torch.linspace(-1, 1, delta.numel()).view(delta.shape))
    for leaf, asked, grad in zip(leaves, wanted, every, strict=True):
        assert torch.equal(leaf.grad, grad) if asked else leaf.grad is None


def saved_shapes(arguments, name):
    shapes = []
    with (
        tier(name),
        torch.autograd.graph.saved_tensors_hooks(
            lambda tensor: shapes.append(tuple(tensor.shape)) or tensor, lambda tensor: tensor
        ),
    ):
        compose(*arguments, 0.7)
    return sorted(shapes)


def test_saves_one_activation_and_none_for_a_frozen_magnitude():
    base, lora, g = operands()
    base.requires_grad_(), lora.requires_grad_()
    for name in TIERS:
        assert saved_shapes((base, lora, g.detach()), name) == [(20,)]
        g.requires_grad_()
        assert saved_shapes((base, lora, g), name) == [(20,), (33, 20)]


def test_makes_nothing_for_the_backward_when_nothing_needs_one(monkeypatch):
    base, lora, g = operands()
    asked = []
    outputs = _compose._outputs

    def spy(base, lora, want_inner):
        asked.append(want_inner)
        return outputs(base, lora, want_inner)

    monkeypatch.setattr(_compose, "_outputs", spy)
    g.requires_grad_()
    with tier("fused"):
        compose(base, lora, g, 0.7)
        with torch.no_grad():
            compose(base, lora, g, 0.7)
    assert asked == [True, False]


@pytest.mark.parametrize("name", TIERS)
@pytest.mark.parametrize("shape", [(0, 8), (3, 0), (2, 0, 8), (2, 3, 4, 8), (8,)])
def test_takes_any_shape(name, shape):
    base, lora = torch.randn(shape), torch.randn(shape, requires_grad=True)
    g = torch.rand(shape[-1]).requires_grad_()
    with tier(name):
        delta = compose(base, lora, g, 2.0)
    delta.sum().backward()
    assert delta.shape == base.shape
    torch.testing.assert_close(delta, exact(base, lora, g, 2.0).float())


def test_takes_tensors_that_are_not_contiguous():
    base, lora, g = operands(rows=6, out=10)
    with tier("fused"):
        got = compose(base.T.contiguous().T, lora[:, ::1].T.contiguous().T, g, 0.7)
        assert torch.equal(got, compose(base, lora, g, 0.7))


def test_refuses_what_does_not_fit():
    base, lora, g = operands()
    for wrong in (
        (base, lora[1:], g),
        (base, lora, g[1:]),
        (base, lora, g.double()),
        (base, lora.to("meta"), g),
        (base, lora, g.to("meta")),
    ):
        with pytest.raises(ValueError, match=r"base is|g is"):
            compose(*wrong, 1.0)


@pytest.mark.parametrize("grad", [(True, True, True), (False, True, False)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_operators_are_well_formed(dtype, grad):
    arguments = [t.requires_grad_(w) for t, w in zip(operands(dtype=dtype), grad, strict=True)]
    torch.library.opcheck(torch.ops.dorad.compose.default, (*arguments, 0.7, grad[2]))
    base, lora, g = (tensor.detach() for tensor in arguments)
    torch.library.opcheck(torch.ops.dorad.compose_backward.default, (base, lora, g, 0.7, *grad))


@pytest.mark.parametrize("name", TIERS)
def test_second_derivatives_are_refused_rather_than_wrong(name):
    leaves = [t.requires_grad_() for t in operands(dtype=torch.float64)]
    with tier(name):
        delta = compose(*leaves, 0.7)
    (first,) = torch.autograd.grad(delta.square().sum(), leaves[2], create_graph=True)
    with pytest.raises(RuntimeError):
        torch.autograd.grad(first.sum(), leaves[0])


@pytest.mark.parametrize("name", TIERS)
def test_torch_func_transforms_it(name):
    base, lora, g = operands(rows=4, out=6, dtype=torch.float64)
    exactly = torch.func.grad(lambda g: exact(base, lora, g, 0.7).square().sum())(g)
    twice = torch.func.hessian(lambda g: exact(base, lora, g, 0.7).square().sum())(g)
    with tier(name):
        got = torch.func.grad(lambda g: compose(base, lora, g, 0.7).square().sum())(g)
        got_twice = torch.func.hessian(lambda g: compose(base, lora, g, 0.7).square().sum())(g)
    torch.testing.assert_close(got, exactly)
    torch.testing.assert_close(got_twice, twice)
