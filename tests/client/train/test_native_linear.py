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


OUTS, RANKS, SCALINGS = (10, 6, 300), (3, 5, 2), (0.7, 1.5, 0.25)


def linears(count=1, rows=7, width=12, with_bias=True):
    """x, the layers and gradients of their outputs."""
    made = torch.Generator().manual_seed(0)

    def randn(*shape):
        return torch.randn(shape, generator=made)

    x = randn(rows, width)
    layers = [
        _products.Layer(
            randn(out, width),
            randn(out) if with_bias else None,
            randn(rank, width),
            randn(out, rank),
            randn(out),
            scaling,
        )
        for out, rank, scaling in list(zip(OUTS, RANKS, SCALINGS, strict=True))[:count]
    ]
    return x, layers, [randn(rows, len(layer.weight)) for layer in layers]


def on_cuda_layer(layer):
    return _products.Layer(*map(on_cuda_tensor, layer[:-1]), layer.scaling)


def scales_of(layers):
    starts = _products.places_of(layers, 0).columns
    scales = torch.zeros(2, starts[-1])
    for layer, start in zip(layers, starts, strict=False):
        weight, _, a, b, magnitude, scaling = layer
        norm = weight_norm(weight, a, b, scaling)
        scales[:, start : start + len(norm)] = torch.stack([norm, magnitude / norm])
    return scales


def forward(x, layers, *, keep_inner=True, makes_norm=False):
    """(ys, the other results)."""
    scales = None if makes_norm else scales_of([_products.Layer(*layer) for layer in layers])
    ys = [torch.empty(len(x), len(layer.weight)) for layer in layers]
    return ys, _products.forward(x, layers, scales, ys, keep_inner=keep_inner)


def parts_of(layers, rows, made):
    """The parts of the results that say something, by name."""
    places = _products.places_of(layers, rows)
    parts = {"h": places.h_of(made.kept)}
    for i, layer in enumerate(layers):
        out, column, inner = len(layer.weight), places.columns[i], places.inner[i]
        parts[f"scales {i}"] = made.scales[:, column : column + out]
        if len(made.kept) > places.inner[0]:
            parts[f"inner {i}"] = made.kept[inner : inner + rows * out]
    return parts


def assert_alike(got, wanted):
    torch.testing.assert_close(torch.Tensor(got), torch.Tensor(wanted), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("makes_norm", [False, True])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("keep_inner", [False, True])
def test_a_call_s_forward_is_the_cpu_s(on_cuda, makes_norm, with_bias, keep_inner, count):
    x, layers, _ = linears(count, with_bias=with_bias)
    ys, wanted = forward(x, layers, keep_inner=keep_inner)
    given = list(map(on_cuda_layer, layers))
    ours, got = forward(on_cuda_tensor(x), given, keep_inner=keep_inner, makes_norm=makes_norm)
    for mine, theirs in zip(ours, ys, strict=True):
        assert_alike(mine, theirs)
    expected, parts = (parts_of(layers, len(x), made) for made in (wanted, got))
    assert parts.keys() == expected.keys() and ("inner 0" in parts) == keep_inner
    for name, part in parts.items():
        assert_alike(part, expected[name])


def test_layers_of_a_call_have_the_results_that_they_have_alone():
    x, layers, grads = linears(3)
    ys, made = forward(x, layers)
    wanted = [_products.Wanted(True, True, True)] * 3
    d_x, found = _products.backward(grads, x, layers, made, True, wanted)
    sum_x = torch.zeros_like(x)
    for i, layer in enumerate(layers):
        (y,), alone = forward(x, [layer])
        assert_alike(y, ys[i])
        part, (gradients,) = _products.backward([grads[i]], x, [layer], alone, True, wanted[:1])
        sum_x += part
        for got, theirs in zip(found[i], gradients, strict=True):
            assert_alike(got, theirs)
    assert_alike(d_x, sum_x)


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("wants", list(itertools.product([False, True], repeat=4))[1:])
def test_a_call_s_backward_is_the_cpu_s(on_cuda, wants, count):
    x, layers, grads = linears(count)
    _, made = forward(x, layers)
    made.scales[0, 3] = 0
    wanted = [_products.Wanted(*wants[1:])] * count
    theirs = _products.backward(grads, x, layers, made, wants[0], wanted)
    ours = _products.backward(
        list(map(on_cuda_tensor, grads)),
        on_cuda_tensor(x),
        list(map(on_cuda_layer, layers)),
        _products.Forward(*map(on_cuda_tensor, made)),
        wants[0],
        wanted,
    )
    assert (ours[0] is not None) == wants[0]
    if wants[0]:
        assert_alike(ours[0], theirs[0])
    for got, expected in zip(ours[1], theirs[1], strict=True):
        assert [part is not None for part in got] == list(wants[1:])
        for part, other in zip(got, expected, strict=True):
            if other is not None:
                assert_alike(part, other)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_linears_of_no_rows_have_gradients_of_zero(on_cuda, device):
    x, layers, grads = linears(2, rows=0)
    if device == "cuda":
        x, *grads = map(on_cuda_tensor, (x, *grads))
        layers = list(map(on_cuda_layer, layers))
    ys, made = forward(x, layers)
    assert [tuple(y.shape) for y in ys] == [(0, 10), (0, 6)]
    wanted = [_products.Wanted(True, True, True)] * 2
    d_x, found = _products.backward(grads, x, layers, made, True, wanted)
    shapes = [tuple(each.shape) for each in (d_x, *found[0], *found[1])]
    assert shapes == [(0, 12), (3, 12), (10, 3), (10,), (5, 12), (6, 5), (6,)]
    assert not any(each.any() for each in (*found[0], *found[1]))


def test_linears_take_tensors_in_any_layout(on_cuda):
    x, (layer,), (grad,) = linears()
    (y,), made = forward(x, [layer])
    wide = torch.zeros(10, 9)
    wide[:, 3:6] = layer.b
    strided = layer._replace(
        weight=layer.weight.T.contiguous().T, a=layer.a.T.contiguous().T, b=wide[:, 3:6]
    )
    given = _products.Layer(
        *(tensor.as_subclass(OnCuda) for tensor in strided[:-1]), strided.scaling
    )
    there = x.T.contiguous().T.as_subclass(OnCuda)
    (got,), _ = forward(there, [given])
    assert_alike(got, y)
    wanted = [_products.Wanted(True, True, True)]
    d_x, (gradients,) = _products.backward([grad], x, [layer], made, True, wanted)
    grad = grad.T.contiguous().T.as_subclass(OnCuda)
    ours, (others,) = _products.backward([grad], there, [given], made, True, wanted)
    for part, other in zip((ours, *others), (d_x, *gradients), strict=True):
        assert_alike(part, other)


def test_the_kernels_make_the_norms_that_their_fast_path_takes(on_cuda):
    weight, a, b = map(on_cuda_tensor, factors(torch.bfloat16))
    magnitude = torch.rand(24).bfloat16()

    def makes(weight, a, b, magnitude, scaling):
        return _products.makes_norm(_products.Layer(weight, None, a, b, magnitude, scaling))

    assert makes(weight, a, b, magnitude, 0.37)
    assert makes(weight, a.float(), b.float(), magnitude.float(), 0.37)
    assert not makes(weight, a, b, magnitude.double(), 0.37)
    for case in unfit().values():
        weight, a, b = (tensor.as_subclass(OnCuda) for tensor in case[:3])
        assert not makes(weight, a, b, magnitude, case[3])
