"""dorad.train's norm of W + s·B·A against the dense one."""

import pytest
import torch
from dorad.train import _norm, weight_norm


def matrices(out=70, width=200, rank=9, dtype=torch.float32, seed=0):
    made = torch.Generator().manual_seed(seed)
    shapes = (out, width), (rank, width), (out, rank)
    return [torch.randn(shape, generator=made, dtype=torch.float64).to(dtype) for shape in shapes]


def dense(weight, a, b, scaling):
    return (weight.double() + scaling * b.double() @ a.double()).norm(dim=1)


@pytest.mark.parametrize("scaling", [0.0, 0.37, -1.5, 64.0])
@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [
        (torch.float64, 1e-13),
        (torch.float32, 2e-6),
        (torch.bfloat16, 2e-6),
        (torch.float16, 2e-6),
    ],
)
def test_is_the_dense_norm(dtype, tolerance, scaling):
    weight, a, b = matrices(dtype=dtype)
    norm = weight_norm(weight, a, b, scaling)
    assert norm.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    torch.testing.assert_close(norm.double(), dense(weight, a, b, scaling), rtol=tolerance, atol=0)


def test_accumulates_in_fp32_under_autocast_and_for_half_precision_weights():
    weight, a, b = matrices(width=4096, dtype=torch.bfloat16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        norm = weight_norm(weight, a.float(), b.float(), 0.5)
    torch.testing.assert_close(norm.double(), dense(weight, a, b, 0.5), rtol=2e-6, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_any_budget_gives_the_same_norms(dtype):
    weight, a, b = matrices(dtype=dtype)
    whole = weight_norm(weight, a, b, 0.8)
    for chunk_bytes in (1, 70 * 4 * 64, 70 * 4 * 130, 70 * 4 * 200):
        parts = weight_norm(weight, a, b, 0.8, chunk_bytes=chunk_bytes)
        torch.testing.assert_close(parts, whole, rtol=1e-6, atol=0)


@pytest.mark.parametrize("stored", ["by rows", "by columns"])
@pytest.mark.parametrize(
    ("chunk_bytes", "heights"), [(1, [1] * 70), (200 * 4 * 30, [30, 30, 10]), (1 << 28, [70])]
)
def test_blocks_are_rows_as_stored_within_the_budget(monkeypatch, chunk_bytes, heights, stored):
    seen = []
    block = _norm._block

    def spy(rows, *others):
        seen.append(len(rows))
        return block(rows, *others)

    monkeypatch.setattr(_norm, "_block", spy)
    weight, a, b = matrices()
    if stored == "by columns":
        weight, a, b = weight.T, b.T, a.T  # [200, 70], as of an embedding
    norm = weight_norm(weight, a, b, 0.8, chunk_bytes=chunk_bytes)
    assert seen == heights
    torch.testing.assert_close(norm.double(), dense(weight, a, b, 0.8), rtol=2e-6, atol=0)


def test_the_environment_sets_the_budget(monkeypatch):
    monkeypatch.setenv(_norm.CHUNK_VARIABLE, "3")
    assert _norm.default_chunk_bytes() == 3 << 20
    for wrong in ("0", "-1", "much"):
        monkeypatch.setenv(_norm.CHUNK_VARIABLE, wrong)
        with pytest.raises(ValueError, match=_norm.CHUNK_VARIABLE):
            _norm.default_chunk_bytes()


def test_scaling_of_zero_does_not_look_at_the_factors():
    weight, a, b = matrices()
    a.fill_(float("nan"))
    torch.testing.assert_close(weight_norm(weight, a, b, 0.0), weight.norm(dim=1))


@pytest.mark.parametrize("stored", ["by rows", "by columns"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("left", [1e-1, 1e-2, 1e-3, 1e-4, 1e-5])
def test_rows_that_nearly_cancel_keep_their_norms(left, dtype, stored):
    """B·A ≈ -(1 - c)·W in every third row: its norm is as exact as its elements."""
    weight, a, b = matrices(rank=200, dtype=torch.float64)
    product = 0.7 * b @ a
    weight[::3] = -product[::3] / (1 - left)
    weight, a, b = (tensor.to(dtype) for tensor in (weight, a, b))
    if dtype == torch.bfloat16:
        a, b = a.float(), b.float()  # W is the rounded one: what cancels is the rest of it.
    if stored == "by columns":
        weight = weight.T.contiguous().T
    wanted = dense(weight, a, b, 0.7)
    got = weight_norm(weight, a, b, 0.7).double()
    slack = torch.finfo(torch.promote_types(dtype, torch.float32)).eps
    assert ((got - wanted).abs() <= (20 + 20 / left) * slack * wanted).all()


def test_rows_that_cancel_are_never_nan():
    _, a, b = matrices(out=500)
    for size in 1.0, 1e-3, 1e3:
        norm = weight_norm(-size * b @ a, a, b, size)
        assert (norm >= 0).all()
        assert (norm <= 1e-6 * (size * b @ a).norm(dim=1)).all()


def test_nan_and_infinity_stay_in_their_rows():
    weight, a, b = matrices()
    weight[3, 5], b[8, 1] = float("nan"), float("inf")
    norm = weight_norm(weight, a, b, 0.5)
    assert norm[3].isnan() and not norm[8].isfinite()
    others = [row for row in range(70) if row not in (3, 8)]
    assert norm[others].isfinite().all()


def test_takes_a_transposed_view():
    weight, a, b = matrices()
    stored = weight.T.contiguous()
    torch.testing.assert_close(weight_norm(stored.T, a, b, 0.5), weight_norm(weight, a, b, 0.5))


def test_refuses_factors_that_do_not_fit():
    weight, a, b = matrices()
    for wrong in ((weight, a[:, 1:], b), (weight, a, b[1:]), (weight, a[1:], b), (weight[0], a, b)):
        with pytest.raises(ValueError, match="must be"):
            weight_norm(*wrong, 1.0)


def test_result_is_detached():
    weight, a, b = (tensor.requires_grad_() for tensor in matrices())
    assert not weight_norm(weight, a, b, 0.5).requires_grad


def test_every_write_to_the_weight_counts():
    """Also those that torch does not count, as when PEFT merges an adapter."""
    weight, a, b = matrices()
    weight = torch.nn.Parameter(weight, requires_grad=False)
    weight_norm(weight, a, b, 0.5)
    weight.data.mul_(2)
    got = weight_norm(weight, a, b, 0.5)
    torch.testing.assert_close(got.double(), dense(weight, a, b, 0.5), rtol=2e-6, atol=0)


def test_meta_tensors_have_a_norm_of_the_right_shape():
    weight, a, b = (tensor.to("meta") for tensor in matrices(dtype=torch.bfloat16))
    norm = weight_norm(weight, a, b, 0.5)
    assert norm.is_meta and norm.shape == (70,) and norm.dtype == torch.float32


def test_operator_is_well_formed():
    for dtype in (torch.float32, torch.bfloat16):
        for scaling in (0.0, 0.5):
            arguments = (*matrices(dtype=dtype), scaling, 1 << 20)
            torch.library.opcheck(torch.ops.dorad.weight_norm.default, arguments)
