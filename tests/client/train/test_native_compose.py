"""The composition of libdorad_train.so, by the library that computes on the CPU."""

import contextlib
import copy

import pytest
import torch
from dorad.train import _compose, _norm, compose, patch, tier, weight_norm
from lib.dora_training import Linears, adapted, assert_close, inputs, step
from lib.train_library import factors
from torch.utils._python_dispatch import TorchDispatchMode


class Watch(TorchDispatchMode):
    """Sees which of our operators the dispatcher runs."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace == "dorad":
            self.seen.append(function.overloadpacket._qualified_op_name.removeprefix("dorad::"))
        return function(*args, **(kwargs or {}))


def operands():
    torch.manual_seed(0)
    return torch.randn(7, 12), torch.randn(7, 12), 0.5 + torch.rand(12)


@pytest.mark.parametrize("want_inner", [True, False])
def test_forward_is_the_cpu_operators(on_cuda, want_inner):
    base, lora, g = operands()
    got = _compose._compose_cuda(base, lora.T.contiguous().T, g, 0.7, want_inner)
    wanted = torch.ops.dorad.compose(base, lora, g, 0.7, want_inner)
    torch.testing.assert_close(got, wanted)


def test_forward_of_mixed_dtypes_is_in_the_wider_one(on_cuda):
    base, lora, g = operands()
    base = base.bfloat16()
    got = _compose._compose_cuda(base, lora, g, 0.7, True)
    assert [tensor.dtype for tensor in got] == [torch.float32] * 2
    torch.testing.assert_close(got, torch.ops.dorad.compose(base, lora, g, 0.7, True))


@pytest.mark.parametrize(
    "wanted", [(True, True, True), (False, False, True), (True, False, False), (False, True, False)]
)
def test_backward_is_the_cpu_operators(on_cuda, wanted):
    grad, inner, g = operands()
    got = _compose._compose_backward_cuda(grad, inner, g, 0.7, *wanted)
    assert [part.numel() > 0 for part in got] == list(wanted)
    torch.testing.assert_close(got, torch.ops.dorad.compose_backward(grad, inner, g, 0.7, *wanted))


def test_nothing_is_launched_for_no_rows(on_cuda):
    empty, g = torch.empty(0, 12), torch.rand(12)
    delta, inner = _compose._compose_cuda(empty, empty, g, 0.7, True)
    assert delta.shape == inner.shape == (0, 12)
    _, _, d_g = _compose._compose_backward_cuda(empty, empty, g, 0.7, True, True, True)
    assert torch.equal(d_g, torch.zeros(12))


@pytest.mark.parametrize(("dtype", "code"), [(torch.bfloat16, 903), (torch.float16, 904)])
def test_the_librarys_errors_and_types(on_cuda, dtype, code):
    base, lora, g = operands()
    with pytest.raises(RuntimeError, match=f"dorad_compose_forward failed with cudaError_t {code}"):
        _compose._compose_cuda(base.to(dtype), lora.to(dtype), g, 0.7, True)
    with pytest.raises(RuntimeError, match=f"compose_backward failed with cudaError_t {code}"):
        arguments = base.to(dtype), lora.to(dtype), g
        _compose._compose_backward_cuda(*arguments, 0.7, True, True, True)


def test_a_device_that_is_current_is_not_switched_to(on_cuda, monkeypatch):
    base, lora, g = operands()
    _compose._compose_cuda(base, lora, g, 0.7, True)
    assert on_cuda == []
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    _compose._compose_cuda(base, lora, g, 0.7, True)
    assert on_cuda == [torch.device("cpu")]


def composed(arguments, context):
    leaves = [tensor.detach().clone().requires_grad_() for tensor in arguments]
    with tier("fused"), context:
        delta = compose(*leaves, 0.7)
        delta.backward(torch.linspace(-1, 1, delta.numel()).view(delta.shape))
    return [delta.detach(), *(leaf.grad for leaf in leaves)]


@pytest.mark.parametrize("kernels", ["on the CPU", "of the library"])
@pytest.mark.parametrize("shape", [(7, 12), (2, 3, 12), (12,)])
def test_direct_calls_and_operators_give_the_same_bits(request, kernels, shape):
    if kernels == "of the library":
        request.getfixturevalue("everywhere")
    torch.manual_seed(0)
    arguments = torch.randn(shape), torch.randn(shape), 0.5 + torch.rand(shape[-1])
    direct = composed(arguments, contextlib.nullcontext())
    watch = Watch()
    through = composed(arguments, watch)
    assert watch.seen == ["compose", "compose_backward"]
    for ours, theirs in zip(direct, through, strict=True):
        assert torch.equal(ours, theirs)


def test_direct_calls_do_not_meet_the_dispatcher(everywhere, monkeypatch):
    def refuse(*_):
        raise AssertionError("an operator was called")

    weight, a, b = factors()
    for module in _compose, _norm:
        monkeypatch.setattr(module, "_operator", refuse)
    monkeypatch.setattr(_compose, "_backward_operator", refuse)
    composed(operands(), contextlib.nullcontext())
    with tier("fused"), torch.no_grad():
        compose(*operands(), 0.7)
    weight_norm(weight, a, b, 0.5)
    with pytest.raises(AssertionError, match="an operator was called"), Watch():
        weight_norm(weight, a, b, 0.5)


def test_second_derivatives_are_refused(everywhere):
    base, lora, g = (tensor.requires_grad_() for tensor in operands())
    with tier("fused"):
        delta = compose(base, lora, g, 0.7)
    (d_lora,) = torch.autograd.grad(delta.square().sum(), lora, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        d_lora.sum().backward()


def test_layers_train_with_the_librarys_compose(everywhere):
    torch.manual_seed(0)
    model = adapted(Linears())
    x = inputs(model.base_model.model)
    twin = copy.deepcopy(model)
    wanted = step(twin, x)
    patch(model)
    with tier("fused"):
        assert_close(step(model, x), wanted, 2e-5)
