"""Finding libdorad_train.so, and refusing another version of it."""

import logging

import pytest
import torch
from dorad.train import _direct, _native, _tiers
from lib.train_library import GEMM, build, factors


def test_the_environment_names_the_library(library_path, tmp_path, monkeypatch):
    monkeypatch.setenv(_native.VARIABLE, str(library_path))
    assert isinstance(_native._load(), _native.Library)
    monkeypatch.setenv(_native.VARIABLE, str(tmp_path / "absent.so"))
    with pytest.raises(OSError, match=r"absent\.so"):
        _native._load()


def test_a_library_of_another_version_is_refused(tmp_path):
    build(tmp_path / "old.so", _native._ABI - 1)
    with pytest.raises(OSError, match="has the interface"):
        _native.Library(tmp_path / "old.so", GEMM)


def test_without_a_library_it_says_so(tmp_path, monkeypatch, caplog):
    monkeypatch.delenv(_native.VARIABLE, raising=False)
    monkeypatch.setattr(_native, "__file__", str(tmp_path / "_native.py"))
    with caplog.at_level(logging.WARNING, "dorad.train"):
        assert _native._load() is None
    assert "libdorad_train.so" in caplog.text and _native.VARIABLE in caplog.text


def test_a_library_beside_the_package_is_found(library_path, tmp_path, monkeypatch):
    monkeypatch.delenv(_native.VARIABLE, raising=False)
    monkeypatch.setattr(_native, "__file__", str(tmp_path / "_native.py"))
    (tmp_path / library_path.name).write_bytes(library_path.read_bytes())
    assert isinstance(_native._load(), _native.Library)


def test_the_library_of_the_server_package_is_found(library_path, tmp_path, monkeypatch):
    monkeypatch.delenv(_native.VARIABLE, raising=False)
    monkeypatch.setattr(_native, "__file__", str(tmp_path / "_native.py"))
    target = tmp_path / "dorad_server" / "lib" / library_path.name
    target.parent.mkdir(parents=True)
    target.write_bytes(library_path.read_bytes())
    (tmp_path / "dorad_server" / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    assert isinstance(_native._load(), _native.Library)


def test_a_gpu_that_the_library_has_no_code_for_is_plain_torch(
    on_cuda, tmp_path, monkeypatch, caplog
):
    """With one line in the log, instead of cudaError_t 209 from every forward."""
    build(tmp_path / "other.so", _native._ABI, other_device=True)
    monkeypatch.setattr(_native, "library", _native.Library(tmp_path / "other.so", GEMM))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 6))
    device = torch.device("cuda", 0)
    chosen = []
    with caplog.at_level(logging.WARNING, "dorad.train"):
        for rows in 1, 4096:
            for training in False, True:
                chosen.append(
                    _tiers.choose(
                        rows, 4096, device=device, dtype=torch.bfloat16, training=training
                    )
                )
        assert "no code" in _tiers.why_eager(device, torch.float16)
    assert {why.tier for why in chosen} == {"eager"}
    (reason,) = {why.reason for why in chosen}
    assert reason == "libdorad_train.so has no code for GPUs of compute capability 8.6"
    (record,) = caplog.records
    assert reason in record.message and "209" in record.message


def test_norms_do_not_need_code_for_the_gpu(on_cuda, tmp_path, monkeypatch):
    build(tmp_path / "other.so", _native._ABI, other_device=True)
    operands = (*factors(torch.bfloat16), 1.0)
    assert _direct.direct_norm(*operands) is not None
    monkeypatch.setattr(_native, "library", _native.Library(tmp_path / "other.so", GEMM))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 6))
    assert _direct.direct_norm(*operands) is None


@pytest.mark.skipif(
    torch.cuda.is_available(),
    reason="torch.compile asks for a GPU, which the fixture pretends",
)
def test_compiled_code_takes_what_a_device_has_for_a_constant(on_cuda):
    @torch.compile(fullgraph=True, backend="aot_eager")
    def double(x):
        return 2 * x if _native.why_missing(x.device) is None else x

    assert torch.equal(double(torch.ones(2)), torch.full((2,), 2.0))
