"""Builds the generated modules into the wheel; the rest is in pyproject.toml.

DORAD_URL, the address of the repository, becomes the package's project URL. Without it the package
has none.
"""

from __future__ import annotations

import os
import pathlib
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
    """Adds the proto files, which live outside client/, and what links lead to, to the archive."""

    def make_release_tree(self, base_dir: str, files: list[str]) -> None:
        super().make_release_tree(base_dir, files)
        target = pathlib.Path(base_dir) / "proto" / "dorad" / "v1"
        target.mkdir(parents=True, exist_ok=True)
        for path in generate.proto_files():
            shutil.copy2(path, target / path.name)
        for name in ("LICENSE", "VERSION"):
            path = pathlib.Path(base_dir) / name
            path.unlink(missing_ok=True)
            shutil.copy2((HERE / name).resolve(), path)


url = os.environ.get("DORAD_URL")
setup(
    cmdclass={"build_py": BuildPy, "sdist": Sdist},
    project_urls={"Repository": url} if url else {},
)
