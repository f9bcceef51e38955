"""Builds the generated modules into the wheel; the rest is in pyproject.toml."""

from __future__ import annotations

import importlib.metadata
import pathlib
import re
import shutil
import sys

from setuptools import setup
from setuptools.command.build_py import build_py
from setuptools.command.sdist import sdist

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

import generate  # noqa: E402  (lies beside this file, outside the package)


class BuildPy(build_py):
    """Generates modules: into src/ for an editable install, else into the build folder."""

    def run(self) -> None:
        super().run()
        generate.generate(HERE / "src" if self.editable_mode else pathlib.Path(self.build_lib))


class Sdist(sdist):
    """Adds the proto files, which live outside client/, to the source archive."""

    def make_release_tree(self, base_dir: str, files: list[str]) -> None:
        super().make_release_tree(base_dir, files)
        target = pathlib.Path(base_dir) / "proto" / "dorad" / "v1"
        target.mkdir(parents=True, exist_ok=True)
        for path in generate.proto_files():
            shutil.copy2(path, target / path.name)


def runtime_requirements() -> list[str]:
    """Bounds of protobuf and grpcio follow the generator: its output checks them at import."""
    bounds = {}
    for requirement in importlib.metadata.requires("grpcio-tools") or []:
        match = re.match(r"^(protobuf|grpcio)\b(?!.*extra ==)", requirement)
        if match:
            bounds[match.group(1)] = requirement
    return [
        bounds["grpcio"],
        bounds["protobuf"],
        "grpcio-health-checking>=1.60",
        "googleapis-common-protos>=1.63",
        "numpy>=1.26",
    ]


setup(
    cmdclass={"build_py": BuildPy, "sdist": Sdist},
    install_requires=runtime_requirements(),
)
