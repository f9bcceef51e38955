"""Generates modules: the protobuf and gRPC ones of `dorad.v1` and the gateway, with type stubs, the
synchronous client (sync_source.py) and the version.

Run by hand for a source checkout (the output lies beside the sources and is ignored by git), and by
setup.py when a wheel is built. Needs protoc and grpc_python_plugin, Debian's protobuf-compiler and
protobuf-compiler-grpc; type stubs (.pyi) need mypy-protobuf as well.

A module of protoc 26 or later refuses runtimes that are older, or two major versions newer, than
itself. Those of Debian's protoc (3.21) work with every runtime from protobuf 4.21 on.

    python client/generate.py [--out DIR]
"""

from __future__ import annotations

import argparse
import pathlib
import shutil
import subprocess
import sys

import sync_source

HERE = pathlib.Path(__file__).resolve().parent


def proto_root() -> pathlib.Path:
    """The folder with dorad/v1/*.proto: the repository's, or the copy inside a source archive."""
    for root in (HERE / "proto", HERE.parent / "proto"):
        if (root / "dorad" / "v1").is_dir():
            return root
    raise FileNotFoundError(f"no dorad/v1/*.proto in {HERE / 'proto'} or {HERE.parent / 'proto'}")


def proto_files() -> list[pathlib.Path]:
    return sorted((proto_root() / "dorad" / "v1").glob("*.proto"))


def _sources() -> dict[pathlib.Path, pathlib.PurePath]:
    """Each proto file, with its path below its root, which is where its modules go."""
    found = {path: path.relative_to(proto_root()) for path in proto_files()}
    ours = HERE / "proto"  # Only for the client, not part of the server's contract.
    return found | {
        p: p.relative_to(ours) for p in sorted((ours / "dorad/gateway").glob("*.proto"))
    }


def _program(name: str) -> str | None:
    """Path of protoc or a plugin: beside this interpreter (no activation needed), else on PATH."""
    beside = pathlib.Path(sys.executable).parent / name
    return str(beside) if beside.exists() else shutil.which(name)


def generate(out: pathlib.Path, *, if_stale: bool = False) -> None:
    """Writes all modules under `out`. Raises RuntimeError with protoc's words."""
    out.mkdir(parents=True, exist_ok=True)
    sync_source.generate(HERE / "src/dorad/_aio", out / "dorad/_sync")
    version = (HERE / "VERSION").read_text().strip()
    text = f'"""Generated from the file VERSION."""\n\n__version__ = "{version}"\n'
    (out / "dorad/_version.py").write_text(text)
    if not (if_stale and _is_fresh(out)):
        _run_protoc(out)


def _run_protoc(out: pathlib.Path) -> None:
    """Writes dorad/**/*_pb2*.py (and .pyi) under `out`."""
    protoc, grpc = _program("protoc"), _program("grpc_python_plugin")
    if not (protoc and grpc):
        raise RuntimeError(
            "protoc or grpc_python_plugin is missing: install protobuf-compiler and "
            "protobuf-compiler-grpc, or install the wheel of dorad instead of its sources"
        )
    roots = dict.fromkeys((proto_root(), HERE / "proto"))
    args = [protoc, *(f"-I{root}" for root in roots), f"--python_out={out}"]
    args += [f"--plugin=protoc-gen-grpc_python={grpc}", f"--grpc_python_out={out}"]
    mypy, mypy_grpc = _program("protoc-gen-mypy"), _program("protoc-gen-mypy_grpc")
    if mypy and mypy_grpc:
        args += [f"--plugin=protoc-gen-mypy={mypy}", f"--mypy_out=quiet:{out}"]
        args += [f"--plugin=protoc-gen-mypy_grpc={mypy_grpc}", f"--mypy_grpc_out=quiet:{out}"]
    args += [str(path) for path in _sources()]
    run = subprocess.run(args, capture_output=True, text=True)
    if run.returncode != 0:
        raise RuntimeError(f"protoc failed:\n{run.stderr.strip()}")


def _is_fresh(out: pathlib.Path) -> bool:
    """True when every module of protoc exists under `out` and is younger than the proto files."""
    newest = max(path.stat().st_mtime for path in [*_sources(), pathlib.Path(__file__)])
    suffixes = ("_pb2.py", "_pb2_grpc.py")
    modules = [out / p.parent / (p.stem + s) for p in _sources().values() for s in suffixes]
    return all(module.exists() and module.stat().st_mtime >= newest for module in modules)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=pathlib.Path, default=HERE / "src")
    parser.add_argument("--if-stale", action="store_true", help="do nothing when up to date")
    args = parser.parse_args()
    try:
        generate(args.out, if_stale=args.if_stale)
    except (RuntimeError, FileNotFoundError, ValueError) as error:
        print(f"generate: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
