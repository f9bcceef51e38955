"""dorad.train's norm of W + s·B·A against the dense one."""

import gc

import pytest
import torch
from dorad.train import _norm, clear_cache, weight_norm


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


@pytest.mark.parametrize(
    ("chunk_bytes", "widths"),
    [(1, [64, 64, 64, 8]), (70 * 4 * 130, [128, 72]), (1 << 28, [200])],
)
def test_chunks_are_multiples_of_64_columns_within_the_budget(chunk_bytes, widths):
    chunks = _norm._chunks(torch.empty(70, 200), torch.float32, chunk_bytes)
    assert [end - begin for begin, end in chunks] == widths
    assert chunks[0][0] == 0 and chunks[-1][1] == 200


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


def test_rows_that_cancel_are_never_nan():
    _, a, b = matrices(out=500)
    for size in 1.0, 1e-3, 1e3:
        norm = weight_norm(-size * b @ a, a, b, size)
        assert (norm >= 0).all()
        assert (norm <= 1e-2 * (size * b @ a).norm(dim=1)).all()


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


class TestKeptSquares:
    @pytest.fixture(autouse=True)
    def counted(self, monkeypatch):
        clear_cache()
        self.computed = 0
        compute = _norm._sum_of_squares

        def count(*arguments):
            self.computed += 1
            return compute(*arguments)

        monkeypatch.setattr(_norm, "_sum_of_squares", count)
        yield
        clear_cache()

    def check(self, weight, a, b):
        got = weight_norm(weight, a, b, 0.5, cache=True)
        torch.testing.assert_close(got.double(), dense(weight, a, b, 0.5), rtol=2e-6, atol=0)

    def test_serve_every_adapter_of_an_unchanged_weight(self):
        weight, a, b = matrices()
        for factor in 1, 2, 3:
            self.check(weight, a * factor, b)
        self.check(weight.detach(), a, b)  # another object, the same memory
        assert self.computed == 1

    def test_are_not_used_unless_asked_for(self):
        weight, a, b = matrices()
        for _ in range(2):
            weight_norm(weight, a, b, 0.5)
        assert self.computed == 2

    def test_follow_a_change_in_place(self):
        weight, a, b = matrices()
        self.check(weight, a, b)
        weight[7].mul_(3)
        self.check(weight, a, b)
        assert self.computed == 2

    def test_follow_new_memory_under_the_same_parameter(self):
        weight, a, b = matrices()
        weight = torch.nn.Parameter(weight, requires_grad=False)
        for factor in 2.0, 3.0, 0.5:
            self.check(weight, a, b)
            weight.data = weight.data * factor  # the old memory may be taken again at once
        self.check(weight, a, b)
        assert self.computed == 4

    def test_tell_views_apart(self):
        weight, a, b = matrices(out=200, width=200)
        self.check(weight, a, b)
        self.check(weight.T, a, b)
        self.check(weight[::2], a, b[::2])
        self.check(weight[1::2], a, b[1::2])
        assert self.computed == 4

    def test_are_as_exact_as_the_factors(self):
        """An fp32 weight serves adapters in fp32 and in fp64."""
        weight, a, b = matrices()
        self.check(weight, a, b)
        exact = weight_norm(weight, a.double(), b.double(), 0.5, cache=True)
        torch.testing.assert_close(exact, dense(weight, a, b, 0.5), rtol=1e-14, atol=0)
        self.check(weight, a, b)
        assert self.computed == 2

    def test_forget_what_clear_cache_is_for(self):
        weight, a, b = matrices()
        self.check(weight, a, b)
        weight.data.mul_(2)  # not counted by torch
        clear_cache()
        self.check(weight, a, b)

    def test_go_with_their_weights(self):
        for seed in range(5):
            self.check(*matrices(seed=seed))
            gc.collect()
        assert len(_norm.squares) == 1  # the last one, until the next is kept

    def test_of_inference_tensors_are_not_kept(self):
        with torch.inference_mode():
            weight, a, b = matrices()
            self.check(weight, a, b)
            weight.mul_(2)
            self.check(weight, a, b)


def test_meta_tensors_have_a_norm_of_the_right_shape():
    weight, a, b = (tensor.to("meta") for tensor in matrices(dtype=torch.bfloat16))
    norm = weight_norm(weight, a, b, 0.5)
    assert norm.is_meta and norm.shape == (70,) and norm.dtype == torch.float32


def test_operator_is_well_formed():
    for dtype in (torch.float32, torch.bfloat16):
        for scaling in (0.0, 0.5):
            arguments = (*matrices(dtype=dtype), scaling, 1 << 20, True)
            torch.library.opcheck(torch.ops.dorad.weight_norm.default, arguments)
