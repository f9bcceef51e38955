"""A linear as one function of libdorad_train.so, by the library that computes on the CPU."""

import itertools

import pytest
import torch
from dorad.train import _products, weight_norm
from lib.train_library import factors, unfit


class OnCuda(torch.Tensor):
    """A CPU tensor that says that it is on a GPU."""

    is_cuda = True


def on_cuda_tensor(tensor):
    return None if tensor is None else tensor.detach().clone().as_subclass(OnCuda)


def linear(rows=7, width=12, out=10, rank=3):
    """x, weight, bias, a, b, magnitude and a gradient of y."""
    made = torch.Generator().manual_seed(0)
    shapes = (rows, width), (out, width), (out,), (rank, width), (out, rank), (out,), (rows, out)
    return [torch.randn(shape, generator=made) for shape in shapes]


def scale_of(weight, a, b, magnitude, scaling=0.7):
    norm = weight_norm(weight, a, b, scaling)
    return lambda: (norm, magnitude / norm)


def forward(x, weight, bias, a, b, magnitude, *, keep_inner=True, makes_norm=False):
    """(y, h, inner, scales)."""
    scale = None if makes_norm else scale_of(weight, a, b, magnitude)
    y = torch.empty(len(x), len(weight))
    made = _products.forward(x, weight, bias, a, b, magnitude, 0.7, scale, y, keep_inner=keep_inner)
    assert (made.inner.data_ptr() == y.data_ptr()) == (not keep_inner) or not len(x)
    return y, *made


@pytest.mark.parametrize("makes_norm", [False, True])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("keep_inner", [False, True])
def test_a_linear_s_forward_is_the_cpu_s(on_cuda, makes_norm, with_bias, keep_inner):
    x, weight, bias, a, b, magnitude, _ = linear()
    given = x, weight, bias if with_bias else None, a, b, magnitude
    wanted = forward(*given, keep_inner=keep_inner)
    given = [on_cuda_tensor(tensor) for tensor in given]
    got = forward(*given, keep_inner=keep_inner, makes_norm=makes_norm)
    for ours, theirs in zip(got, wanted, strict=True):
        torch.testing.assert_close(torch.Tensor(ours), torch.Tensor(theirs), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("wanted", list(itertools.product([False, True], repeat=4))[1:])
def test_a_linear_s_backward_is_the_cpu_s(on_cuda, wanted):
    x, weight, _, a, b, magnitude, grad = linear()
    _, h, inner, scales = forward(x, weight, None, a, b, magnitude)
    scales[0, 3] = 0
    tensors = grad, x, weight, a, b, scales, h, inner
    rest = 0.7, torch.float32, _products.Wanted(*wanted)
    theirs = _products.backward(*tensors, *rest)
    ours = _products.backward(*map(on_cuda_tensor, tensors), *rest)
    assert [part is not None for part in ours] == list(wanted)
    for got, expected in zip(ours, theirs, strict=True):
        if expected is not None:
            torch.testing.assert_close(torch.Tensor(got), expected)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_linear_of_no_rows_has_gradients_of_zero(on_cuda, device):
    given = linear(rows=0)
    if device == "cuda":
        given = [on_cuda_tensor(tensor) for tensor in given]
    x, weight, bias, a, b, magnitude, grad = given
    y, h, inner, scales = forward(x, weight, bias, a, b, magnitude)
    assert y.shape == (0, 10)
    gradients = _products.backward(
        *(grad, x, weight, a, b, scales, h, inner),
        0.7,
        torch.float32,
        _products.Wanted(True, True, True, True),
    )
    assert [tuple(each.shape) for each in gradients] == [(0, 12), (3, 12), (10, 3), (10,)]
    assert not any(each.any() for each in gradients)


def test_a_linear_takes_tensors_in_any_layout(on_cuda):
    x, weight, bias, a, b, magnitude, grad = linear()
    wanted = forward(x, weight, bias, a, b, magnitude)
    wide = torch.zeros(10, 9)
    wide[:, 3:6] = b
    given = [tensor.T.contiguous().T for tensor in (x, weight)]
    others = [a.T.contiguous().T, wide[:, 3:6], magnitude]
    given = [tensor.as_subclass(OnCuda) for tensor in (*given, bias, *others)]
    torch.testing.assert_close(torch.Tensor(forward(*given)[0]), wanted[0])

    rest = 0.7, torch.float32, _products.Wanted(True, True, True, True)
    kept = wanted[3], *wanted[1:3]
    expected = _products.backward(grad, x, weight, a, b, *kept, *rest)
    x, weight, _, a, b, _ = given
    grad = grad.T.contiguous().T.as_subclass(OnCuda)
    for ours, theirs in zip(
        _products.backward(grad, x, weight, a, b, *kept, *rest), expected, strict=True
    ):
        torch.testing.assert_close(torch.Tensor(ours), theirs)


def test_the_kernels_make_the_norms_that_their_fast_path_takes(on_cuda):
    weight, a, b = map(on_cuda_tensor, factors(torch.bfloat16))
    magnitude = torch.rand(24).bfloat16()
    assert _products.makes_norm(weight, a, b, magnitude, 0.37)
    assert _products.makes_norm(weight, a.float(), b.float(), magnitude.float(), 0.37)
    assert not _products.makes_norm(weight, a, b, magnitude.double(), 0.37)
    for case in unfit().values():
        weight, a, b = (tensor.as_subclass(OnCuda) for tensor in case[:3])
        assert not _products.makes_norm(weight, a, b, magnitude, case[3])
