"""The calls of libdorad_train.so, with a library of the same interface that computes on the CPU."""

import contextlib
import copy
import itertools
import logging
import subprocess

import pytest
import torch
from dorad.train import (
    _compose,
    _direct,
    _native,
    _norm,
    _products,
    compose,
    patch,
    tier,
    weight_norm,
)
from lib.dora_training import Linears, adapted, assert_close, inputs, step
from torch.utils._python_dispatch import TorchDispatchMode

SOURCE = r"""
#include <math.h>
#include <stdint.h>
#include <string.h>

// Refuses what the interface does not allow: the codes tell the tests what was wrong.
static int check(const void* stream, int32_t type) {
  return stream != (void*)42 ? 901 : type != 0 ? 902 + type : 0;
}

int dorad_train_abi(void) { return ABI; }

int dorad_compose_forward(const void* base, const void* lora, const float* g, void* delta,
                          void* inner, int64_t rows, int64_t out, float scale, int32_t type,
                          void* stream) {
  if (check(stream, type)) return check(stream, type);
  const float *x = base, *y = lora;
  for (int64_t i = 0; i < rows * out; ++i) {
    ((float*)delta)[i] = (g[i % out] - 1) * x[i] + g[i % out] * (scale * y[i]);
    if (inner) ((float*)inner)[i] = x[i] + scale * y[i];
  }
  return 0;
}

int64_t dorad_compose_backward_workspace(int64_t rows, int64_t out) { return 100 * rows + out; }

int dorad_compose_backward(const void* grad, const void* inner, const float* g, void* d_base,
                           void* d_lora, float* d_g, void* workspace, int64_t workspace_bytes,
                           int64_t rows, int64_t out, float scale, int32_t type, void* stream) {
  if (check(stream, type)) return check(stream, type);
  if (!d_g != !inner) return 910;
  if (d_g && (!workspace || workspace_bytes != 100 * rows + out)) return 911;
  if (d_g) memset(workspace, 0xff, workspace_bytes), memset(d_g, 0, out * sizeof(float));
  const float *dy = grad, *in = inner;
  for (int64_t i = 0; i < rows * out; ++i) {
    if (d_base) ((float*)d_base)[i] = (g[i % out] - 1) * dy[i];
    if (d_lora) ((float*)d_lora)[i] = scale * g[i % out] * dy[i];
    if (d_g) d_g[i % out] += dy[i] * in[i];
  }
  return 0;
}

// Refuses other than the tests' function and handle. Sums in double.
static int check_linear(const void* gemm, const void* handle, const void* stream, int32_t type) {
  return gemm != (void*)7 || handle != (void*)8 ? 930 : check(stream, type);
}

static void multiply(int64_t m, int64_t n, int64_t k, double alpha, const float* left, int64_t lm,
                     int64_t lk, const float* right, int64_t rk, int64_t rn, int add, float* to) {
  for (int64_t i = 0; i < m * n; ++i) {
    double sum = 0;
    for (int64_t j = 0; j < k; ++j) {
      sum += (double)left[i / n * lm + j * lk] * right[j * rk + i % n * rn];
    }
    to[i] = (float)(alpha * sum + (add ? to[i] : 0));
  }
}

int64_t dorad_linear_factor_bytes(int64_t in, int64_t out, int64_t rank, int32_t type,
                                  int32_t factor_type, int32_t makes_norm) {
  return factor_type == type ? 0 : in + out + rank + makes_norm;
}

int64_t dorad_linear_forward_bytes(int64_t rows, int64_t in, int64_t out, int64_t rank,
                                   int32_t type, int32_t factor_type, int32_t makes_norm) {
  return 3 * rows + (makes_norm ? in + 2 * out + rank : 0) + type + factor_type;
}

static float* row_norms(const float* w, const float* a, const float* b, int64_t out, int64_t in,
                        int64_t rank, double scale, float* norm) {
  for (int64_t o = 0; o < out; ++o) {
    double sum = 0;
    for (int64_t i = 0; i < in; ++i) {
      double product = 0;
      for (int64_t r = 0; r < rank; ++r) product += (double)b[o * rank + r] * a[r * in + i];
      sum += pow(w[o * in + i] + scale * product, 2);
    }
    norm[o] = (float)sqrt(sum);
  }
  return norm;
}

int dorad_linear_forward(void* gemm, void* handle, const void* x, const void* w, const void* a,
                         const void* b, const void* m, const float* bias, float* norm, float* g,
                         void* h, void* inner, void* y, void* factors, void* workspace,
                         int64_t workspace_bytes, int64_t rows, int64_t in, int64_t out,
                         int64_t rank, double scale, float eps, int32_t type, int32_t factor_type,
                         int32_t m_type, void* stream) {
  if (check_linear(gemm, handle, stream, type)) return check_linear(gemm, handle, stream, type);
  if (factor_type != 0 || m_type != 0) return 931;
  if (workspace_bytes != dorad_linear_forward_bytes(rows, in, out, rank, 0, 0, !!m)) return 932;
  memset(workspace, 0xff, workspace_bytes);
  if (m) {
    row_norms(w, a, b, out, in, rank, scale, norm);
    for (int64_t o = 0; o < out; ++o) g[o] = ((float*)m)[o] / (norm[o] < eps ? eps : norm[o]);
  }
  multiply(rows, rank, in, scale, x, in, 1, a, 1, in, 0, h);
  multiply(rows, out, in, 1, x, in, 1, w, 1, in, 0, inner);
  multiply(rows, out, rank, 1, h, rank, 1, b, 1, rank, 1, inner);
  for (int64_t i = 0; i < rows * out; ++i) {
    ((float*)y)[i] = g[i % out] * ((float*)inner)[i] + (bias ? bias[i % out] : 0);
  }
  return 0;
}

int dorad_linear_backward(void* gemm, void* handle, const void* dy, const void* x, const void* w,
                          const void* a, const void* b, const float* norm, const float* g,
                          const void* h, const void* inner, void* d_inner, void* d_h, void* d_x,
                          void* d_a, void* d_b, void* d_m, void* factors, void* workspace,
                          int64_t workspace_bytes, int64_t rows, int64_t in, int64_t out,
                          int64_t rank, double scale, float eps, int32_t type, int32_t factor_type,
                          int32_t m_type, int32_t sum_type, void* stream) {
  if (check_linear(gemm, handle, stream, type)) return check_linear(gemm, handle, stream, type);
  if (factor_type != 0 || m_type != 0 || sum_type != 0) return 931;
  if (!x != !d_a || !h != !d_b || !inner != !d_m || !d_h != !(d_x || d_a)) return 932;
  if (!d_inner != !(d_x || d_a || d_b)) return 933;
  if (workspace_bytes != (d_m ? 100 * rows + out : 0)) return 911;
  if (d_m) memset(workspace, 0xff, workspace_bytes);
  for (int64_t o = 0; d_m && o < out; ++o) {
    double sum = 0;
    for (int64_t r = 0; r < rows; ++r) {
      sum += (double)((float*)dy)[r * out + o] * ((float*)inner)[r * out + o];
    }
    ((float*)d_m)[o] = (float)(sum / (norm[o] < eps ? eps : norm[o]));
  }
  for (int64_t i = 0; d_inner && i < rows * out; ++i) {
    ((float*)d_inner)[i] = g[i % out] * ((float*)dy)[i];
  }
  if (d_h) multiply(rows, rank, out, scale, d_inner, out, 1, b, rank, 1, 0, d_h);
  if (d_x) multiply(rows, in, out, 1, d_inner, out, 1, w, in, 1, 0, d_x);
  if (d_x) multiply(rows, in, rank, 1, d_h, rank, 1, a, in, 1, 1, d_x);
  if (d_a) multiply(rank, in, rows, 1, d_h, 1, rank, x, in, 1, 0, d_a);
  if (d_b) multiply(out, rank, rows, 1, d_inner, 1, out, h, rank, 1, 0, d_b);
  return 0;
}

static double widened(const void* values, int64_t i) {
  uint32_t bits = (uint32_t)((const uint16_t*)values)[i] << 16;
  float value;
  memcpy(&value, &bits, sizeof(value));
  return value;
}

static uint16_t rounded(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof(bits));
  return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

static float half(const void* values, int64_t i, int32_t type) {
  if (type == 0) return ((const float*)values)[i];
  if (type == 1) return (float)widened(values, i);
  return (float)((const _Float16*)values)[i];
}

int dorad_three_terms(const void* a, const void* b, void* to_a, void* to_b, int64_t out,
                      int64_t in, int64_t rank, int32_t type, void* stream) {
  if (stream != (void*)42) return 901;
  uint16_t *wide = to_a, *tall = to_b;
  for (int64_t i = 0; i < rank * in; ++i) {
    uint16_t high = rounded(half(a, i, type));
    wide[i] = wide[rank * in + i] = high;
    wide[2 * rank * in + i] = rounded(half(a, i, type) - (float)widened(&high, 0));
  }
  for (int64_t i = 0; i < out * rank; ++i) {
    uint16_t high = rounded(half(b, i, type));
    uint16_t* row = tall + i / rank * 3 * rank + i % rank;
    row[0] = rounded(half(b, i, type) - (float)widened(&high, 0));
    row[rank] = row[2 * rank] = high;
  }
  return 0;
}

int64_t dorad_direct_norm_workspace(int64_t out, int64_t in, int64_t rank) {
  return 4 * out + in + rank;
}

int dorad_direct_norm(const void* w, const void* a, const void* b, const float* base_sq,
                      float* norm, void* workspace, int64_t workspace_bytes, int64_t out,
                      int64_t in, int64_t rank, int64_t ldb, double scale, int32_t w_by_in,
                      void* stream) {
  if (stream != (void*)42) return 901;
  if (base_sq || ldb < rank || workspace_bytes != 4 * out + in + rank) return 920;
  if (((uintptr_t)w | (uintptr_t)a | (uintptr_t)b) % 16 || in % 8 || ldb % 8) return 921;
  if (w_by_in && out % 8) return 922;
  memset(workspace, 0xff, workspace_bytes);
  for (int64_t o = 0; o < out; ++o) {
    double sum = 0;
    for (int64_t i = 0; i < in; ++i) {
      double product = 0;
      for (int64_t r = 0; r < rank; ++r) {
        product += widened(b, o * ldb + r) * widened(a, r * in + i);
      }
      double t = widened(w, w_by_in ? i * out + o : o * in + i) + scale * product;
      sum += t * t;
    }
    norm[o] = (float)sqrt(sum);
  }
  return 0;
}
"""


GEMM = 7  # what stands for the address of cublasGemmEx


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    folder = tmp_path_factory.mktemp("native")
    (folder / "fake.c").write_text(SOURCE)
    target = folder / "libdorad_train.so"
    build(folder / "fake.c", target, _native._ABI)
    return target


def build(source, target, abi):
    command = ["cc", "-std=c11", "-O1", "-shared", "-fPIC", f"-DABI={abi}", "-o", target]
    subprocess.run([*command, source, "-lm"], check=True)


@pytest.fixture
def on_cuda(path, monkeypatch):
    """The functions for CUDA, on CPU tensors and stream 42; returns the devices switched to."""
    monkeypatch.setattr(_native, "library", _native.Library(path, GEMM))
    switched = []
    monkeypatch.setattr(
        torch.cuda, "device", lambda device: switched.append(device) or contextlib.nullcontext()
    )
    monkeypatch.setattr(torch.cuda, "current_device", lambda: torch.device("cpu").index)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda _: 42, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentBlasHandle", lambda: 8, raising=False)
    return switched


@pytest.fixture
def everywhere(on_cuda, monkeypatch):
    """The same in the place of the CPU's kernels, so that tiers, operators and layers call it."""
    monkeypatch.setattr(_compose, "_compose_cpu", _compose._compose_cuda)
    monkeypatch.setattr(_compose, "_compose_backward_cpu", _compose._compose_backward_cuda)


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


# --- Around the dispatcher ------------------------------------------------------------------------


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


# --- The norm -------------------------------------------------------------------------------------


def factors(dtype=torch.float32, out=24, width=40, rank=8):
    made = torch.Generator().manual_seed(0)
    weight, a, b = (
        torch.randn(shape, generator=made) for shape in ((out, width), (rank, width), (out, rank))
    )
    return weight.bfloat16(), a.to(dtype), b.to(dtype)


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


# --- A linear as one function ---------------------------------------------------------------------


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


# --- Finding the library --------------------------------------------------------------------------


def test_the_environment_names_the_library(path, tmp_path, monkeypatch):
    monkeypatch.setenv(_native.VARIABLE, str(path))
    assert isinstance(_native._load(), _native.Library)
    monkeypatch.setenv(_native.VARIABLE, str(tmp_path / "absent.so"))
    with pytest.raises(OSError, match=r"absent\.so"):
        _native._load()


def test_a_library_of_another_version_is_refused(tmp_path):
    (tmp_path / "fake.c").write_text(SOURCE)
    build(tmp_path / "fake.c", tmp_path / "old.so", _native._ABI - 1)
    with pytest.raises(OSError, match="has the interface"):
        _native.Library(tmp_path / "old.so", GEMM)


def test_without_a_library_it_says_so(tmp_path, monkeypatch, caplog):
    monkeypatch.delenv(_native.VARIABLE, raising=False)
    monkeypatch.setattr(_native, "__file__", str(tmp_path / "_native.py"))
    with caplog.at_level(logging.WARNING, "dorad.train"):
        assert _native._load() is None
    assert "libdorad_train.so" in caplog.text and _native.VARIABLE in caplog.text


def test_a_library_beside_the_package_is_found(path, tmp_path, monkeypatch):
    monkeypatch.delenv(_native.VARIABLE, raising=False)
    monkeypatch.setattr(_native, "__file__", str(tmp_path / "_native.py"))
    (tmp_path / path.name).write_bytes(path.read_bytes())
    assert isinstance(_native._load(), _native.Library)
