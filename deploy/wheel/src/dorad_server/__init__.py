"""The server `dorad`: `main` starts the program of this package with the libraries of the torch in
the same environment. The program takes the process over, so signals and exit codes are its own.

docs/guides/deployment.md in the repository says what the package contains.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import pathlib
import subprocess
import sys
from collections.abc import Mapping

_HERE = pathlib.Path(__file__).resolve().parent
_PROGRAM = _HERE / "bin" / "dorad"
_EX_CONFIG = 78  # A service manager does not restart it (deploy/systemd).

# The threads of libgomp would spin while they wait; the server has a thread team of its own.
_DEFAULTS = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}


class EnvironmentProblem(Exception):
    """The server cannot start in this environment; the text says why and what helps."""


def main() -> None:
    """Entry point of `dorad`. Replaces this process with the server."""
    try:
        environment = server_environment(os.environ)
    except EnvironmentProblem as problem:
        print(f"dorad: {problem}", file=sys.stderr)
        sys.exit(_EX_CONFIG)
    sys.stdout.flush()
    os.execve(_PROGRAM, [os.fspath(_PROGRAM), *sys.argv[1:]], environment)


def server_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment for the program: its libraries, then those of torch, then the caller's.

    Raises EnvironmentProblem when torch is missing or another version, or a library is not found.
    """
    torch = _torch()
    path = [str(_HERE / "lib"), str(torch.locate_file("torch/lib")), *_nvidia_folders()]
    path += filter(None, [environment.get("LD_LIBRARY_PATH")])
    result = _DEFAULTS | dict(environment) | {"LD_LIBRARY_PATH": ":".join(path)}
    missing = _missing_libraries(result)
    if missing:
        raise EnvironmentProblem(
            f"{', '.join(missing)} not found, neither with torch {torch.version} in {sys.prefix} "
            f"nor on this host: a server with CUDA needs a torch with the same CUDA"
        )
    return result


def _torch() -> importlib.metadata.Distribution:
    """The installed torch. Raises EnvironmentProblem unless it is the one of our metadata."""
    requirements = importlib.metadata.requires("dorad-server") or []
    (wanted,) = (r.removeprefix("torch==") for r in requirements if r.startswith("torch=="))
    try:
        torch = importlib.metadata.distribution("torch")
        found = torch.version
    except importlib.metadata.PackageNotFoundError:
        torch, found = None, "none"
    # A local version such as 2.11.0+cu130 is a build of 2.11.0.
    if torch is None or found.partition("+")[0] != wanted:
        raise EnvironmentProblem(
            f"torch {wanted} is needed, {sys.prefix} has {found}: "
            f"run `{sys.executable} -m pip install torch=={wanted}`"
        )
    return torch


def _nvidia_folders() -> list[str]:
    """The folders with libraries of NVIDIA's packages, on which torch's wheel depends."""
    spec = importlib.util.find_spec("nvidia")
    roots = (spec.submodule_search_locations if spec else None) or []
    return [str(folder) for root in roots for folder in sorted(pathlib.Path(root).glob("*/lib"))]


def _missing_libraries(environment: dict[str, str]) -> list[str]:
    """The libraries that the loader would not find. It lists them without starting the program."""
    traced = subprocess.run(
        [_PROGRAM],
        env=environment | {"LD_TRACE_LOADED_OBJECTS": "1"},
        capture_output=True,
        text=True,
    )
    lines = [line.split() for line in traced.stdout.splitlines()]
    return [line[0] for line in lines if line[1:] == ["=>", "not", "found"]]
