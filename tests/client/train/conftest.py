"""The CPU's library in the place of libdorad_train.so."""

import contextlib

import pytest
import torch
from dorad.train import _compose, _native
from lib.train_library import GEMM, build


@pytest.fixture(scope="session")
def library_path(tmp_path_factory):
    target = tmp_path_factory.mktemp("native") / "libdorad_train.so"
    build(target, _native._ABI)
    return target


@pytest.fixture
def on_cuda(library_path, monkeypatch):
    """The functions for CUDA, on CPU tensors and stream 42; returns the devices switched to."""
    monkeypatch.setattr(_native, "library", _native.Library(library_path, GEMM))
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
