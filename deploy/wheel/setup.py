"""Gives the wheel its platform and its torch; the rest is in pyproject.toml.

The platform is the oldest glibc with every symbol that the program and its libraries use.
DORAD_URL, the address of the repository, becomes the package's project URL.
"""

from __future__ import annotations

import os
import pathlib
import platform
import re
import subprocess

from setuptools import setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.dist import Distribution

HERE = pathlib.Path(__file__).resolve().parent
FILES = HERE / "src" / "dorad_server"


def newest(versions: str, name: str) -> tuple[int, ...]:
    """The newest version of the symbols of `name` in readelf's list."""
    found = re.findall(rf"Name: {name}_([\d.]+)", versions)
    return max(tuple(map(int, version.split("."))) for version in found)


def glibc() -> tuple[int, ...]:
    """The oldest glibc whose distributions have all that the program and its libraries need."""
    files = [FILES / "bin" / "dorad", *sorted((FILES / "lib").iterdir())]
    versions = subprocess.run(
        ["readelf", "--version-info", "--wide", *files], check=True, capture_output=True, text=True
    ).stdout
    # The C++ runtime is the host's, too. RHEL 9, the oldest with 2.34, has GLIBCXX_3.4.29.
    if newest(versions, "GLIBCXX") <= (3, 4, 29):
        return max(newest(versions, "GLIBC"), (2, 34))
    return tuple(map(int, platform.libc_ver()[1].split(".")))


class PlatformWheel(bdist_wheel):
    """Any Python 3, one platform: there is no extension module, but a program."""

    def get_tag(self) -> tuple[str, str, str]:
        major, minor, *_ = glibc()
        return "py3", "none", f"manylinux_{major}_{minor}_{platform.machine()}"


class PlatformDistribution(Distribution):
    def has_ext_modules(self) -> bool:
        return True


torch = re.search(r"^torch==\S+$", (HERE / "requirements.txt").read_text(), re.MULTILINE)
assert torch, "requirements.txt has no torch"
url = os.environ.get("DORAD_URL")
setup(
    cmdclass={"bdist_wheel": PlatformWheel},
    distclass=PlatformDistribution,
    install_requires=[torch[0]],
    project_urls={"Repository": url} if url else {},
)
