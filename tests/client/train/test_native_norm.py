"""The norm of libdorad_train.so, by the library that computes on the CPU."""

import pytest
import torch
from dorad.train import _direct, _native, _norm, patch, tier
from lib.dora_training import Linears, adapted, assert_close, inputs, step
from lib.train_library import factors, unfit


def exact_norm(weight, a, b, scaling):
    return (weight.double() + scaling * b.double() @ a.double()).norm(dim=1)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(
    ("a_dtype", "b_dtype", "tolerance"),
    [
        (torch.bfloat16, torch.bfloat16, 1e-7),
        (torch.float16, torch.float16, 2e-6),
        (torch.float32, torch.float32, 2**-16),
        (torch.bfloat16, torch.float32, 2**-16),
    ],
)
def test_norm_is_the_dense_one(on_cuda, a_dtype, b_dtype, tolerance, transposed):
    weight, a, b = factors()
    a, b = a.to(a_dtype), b.to(b_dtype)
    if transposed:
        weight = weight.T.contiguous().T
    for scaling in 0.37, -1.5, 64.0:
        norm = _direct.direct_norm(weight, a, b, scaling)
        wanted = exact_norm(weight, a, b, scaling)
        torch.testing.assert_close(norm.double(), wanted, rtol=tolerance, atol=0)


def test_norm_of_fp32_factors_needs_their_second_terms(on_cuda):
    """What the test above allows is far from what bf16 factors alone would give."""
    weight, a, b = factors()
    rounded = _direct.direct_norm(weight, a.bfloat16(), b.bfloat16(), 1.0).double()
    wanted = exact_norm(weight, a, b, 1.0)
    assert ((rounded - wanted).abs() / wanted).max() > 2**-12


def test_norm_takes_factors_that_are_not_contiguous(on_cuda):
    for dtype in torch.bfloat16, torch.float32:
        weight, a, b = factors(dtype)
        wanted = _direct.direct_norm(weight, a, b, 0.5)
        views = a.T.contiguous().T, b.T.contiguous().T
        assert torch.equal(_direct.direct_norm(weight, *views, 0.5), wanted)


def test_layers_of_both_layouts_take_the_librarys_norms(everywhere, monkeypatch):
    torch.manual_seed(0)
    model = adapted(Linears().bfloat16(), r=8)  # adapters in fp32
    x = inputs(model.base_model.model, torch.bfloat16)
    patch(model)
    layouts = []
    take = _native.Library.norm

    def spy(library, *arguments):
        layouts.append(arguments[-1])
        take(library, *arguments)

    monkeypatch.setattr(_native.Library, "norm", spy)
    with tier("fused"):
        wanted = step(model, x)
        assert layouts == []
        monkeypatch.setattr(_norm, "_weight_norm", lambda *given: _direct.direct_norm(*given[:4]))
        got = step(model, x)
    assert layouts == [False, True, False]
    assert_close(got, wanted, 2**-7)


@pytest.mark.parametrize("why", unfit())
def test_norm_leaves_what_the_fast_path_does_not_take(on_cuda, why):
    assert _direct.direct_norm(*unfit()[why]) is None


def test_norm_without_a_library_is_torch_s(monkeypatch):
    monkeypatch.setattr(_native, "library", None)
    assert _direct.direct_norm(*factors(torch.bfloat16), 1.0) is None


def test_norm_reports_the_librarys_errors(on_cuda, monkeypatch):
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda _: 1)
    with pytest.raises(RuntimeError, match="dorad_direct_norm failed with cudaError_t 901"):
        _direct.direct_norm(*factors(torch.bfloat16), 1.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_two_bf16_terms_hold_16_bits_of_a_factor(dtype):
    _, a, _ = factors(dtype)
    terms = _direct.half_terms(a)
    assert [term.dtype for term in terms] == [torch.bfloat16] * (
        1 if dtype == terms[0].dtype else 2
    )
    left = (a.double() - sum(term.double() for term in terms)).abs()
    assert (left <= 2**-17 * a.double().abs()).all()


@pytest.mark.parametrize("a_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("b_dtype", [torch.float32, torch.bfloat16])
def test_half_factors_hold_16_bits_of_the_product(a_dtype, b_dtype):
    """What torch multiplies on CUDA where the library does not take the norm."""
    _, a, b = factors()
    a, b = a.to(a_dtype), b.to(b_dtype)
    left, right = _norm._half_factors(b, a)
    assert left.dtype == right.dtype == torch.bfloat16
    wanted = b.double() @ a.double()
    bound = 2**-15 * (b.double().abs() @ a.double().abs())
    assert ((left.double() @ right.double() - wanted).abs() <= bound).all()
