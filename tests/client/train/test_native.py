"""The calls of libdorad_train.so, with a library of the same interface that computes on the CPU."""

import contextlib
import logging
import subprocess
import types

import pytest
import torch
from dorad.train import _compose, _native

SOURCE = r"""
#include <stdint.h>
#include <string.h>

// Refuses what the interface does not allow: the codes tell the tests what was wrong.
static int check(const void* stream, int32_t type) {
  return stream != (void*)42 ? 901 : type != 0 ? 902 + type : 0;
}

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
"""


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    folder = tmp_path_factory.mktemp("native")
    (folder / "fake.c").write_text(SOURCE)
    target = folder / "libdorad_train.so"
    command = ["cc", "-std=c11", "-O1", "-shared", "-fPIC", "-o", target, folder / "fake.c"]
    subprocess.run(command, check=True)
    return target


@pytest.fixture
def on_cuda(path, monkeypatch):
    """The functions that are registered for CUDA, on CPU tensors and stream 42."""
    monkeypatch.setattr(_native, "library", _native.Library(path))
    monkeypatch.setattr(torch.cuda, "device", lambda _: contextlib.nullcontext())
    stream = types.SimpleNamespace(cuda_stream=42)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)


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


def test_the_environment_names_the_library(path, tmp_path, monkeypatch):
    monkeypatch.setenv(_native.VARIABLE, str(path))
    assert isinstance(_native._load(), _native.Library)
    monkeypatch.setenv(_native.VARIABLE, str(tmp_path / "absent.so"))
    with pytest.raises(OSError, match=r"absent\.so"):
        _native._load()


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
