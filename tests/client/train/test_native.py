"""Finding libdorad_train.so, and refusing another version of it."""

import logging

import pytest
from dorad.train import _native
from lib.train_library import GEMM, build


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
