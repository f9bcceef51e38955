#!/usr/bin/env python3
"""Checks proto/: buf's STANDARD lint rules, and no breaking change against proto/baseline.binpb.

    tools/proto_lint.py                    both checks; exit code 1 with one line for each finding
    tools/proto_lint.py --write-baseline   accept the present contract as the one to keep

The rules carry buf's names, so its documentation explains them. The contract of the last release is
the baseline: it is rewritten when a release is made, not to silence a finding.
"""

from __future__ import annotations

import argparse
import posixpath
import re
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    EnumDescriptorProto,
    FieldDescriptorProto,
    FileDescriptorProto,
    FileDescriptorSet,
    ServiceDescriptorProto,
)

ROOT = Path(__file__).resolve().parents[1]
PROTO = ROOT / "proto"
BASELINE = PROTO / "baseline.binpb"
# Contracts of others, whose style and versions are not ours.
STANDARD = {"grpc/health/v1/health.proto"}

Finding = tuple[str, str, str]
"""(file, rule, problem)."""

PASCAL = re.compile(r"[A-Z][A-Za-z0-9]*")
LOWER_SNAKE = re.compile(r"[a-z][a-z0-9]*(_[a-z0-9]+)*")
UPPER_SNAKE = re.compile(r"[A-Z][A-Z0-9]*(_[A-Z0-9]+)*")
PACKAGE = re.compile(r"[a-z][a-z0-9]*(_[a-z0-9]+)*(\.[a-z][a-z0-9]*(_[a-z0-9]+)*)*")
VERSION = re.compile(r"v[1-9]\d*((alpha|beta)\d+|p[1-9]\d*(alpha|beta)\d+|test.*)?")
# One value for a whole package, if any file sets it.
PACKAGE_OPTIONS = {
    "csharp_namespace": "PACKAGE_SAME_CSHARP_NAMESPACE",
    "go_package": "PACKAGE_SAME_GO_PACKAGE",
    "java_multiple_files": "PACKAGE_SAME_JAVA_MULTIPLE_FILES",
    "java_package": "PACKAGE_SAME_JAVA_PACKAGE",
    "php_namespace": "PACKAGE_SAME_PHP_NAMESPACE",
    "ruby_package": "PACKAGE_SAME_RUBY_PACKAGE",
    "swift_prefix": "PACKAGE_SAME_SWIFT_PREFIX",
}


# --- Reading --------------------------------------------------------------------------------------


def compile_protos(root: Path) -> FileDescriptorSet:
    """Our .proto files under `root`, without imports from elsewhere. Raises RuntimeError."""
    found = {path.relative_to(root).as_posix() for path in root.rglob("*.proto")}
    names = sorted(found - STANDARD)
    if not names:
        raise RuntimeError(f"no .proto files under {root}")
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "set.binpb"
        command = ["protoc", f"-I{root}"]
        command += [f"--descriptor_set_out={out}", "--include_imports", *names]
        run = subprocess.run(command, capture_output=True, text=True)
        if run.returncode != 0:
            raise RuntimeError(run.stderr.strip())
        everything = FileDescriptorSet.FromString(out.read_bytes())
    return FileDescriptorSet(file=[f for f in everything.file if f.name in names])


def messages_of(
    parent: FileDescriptorProto | DescriptorProto, prefix: str = ""
) -> Iterator[tuple[str, DescriptorProto]]:
    """(dotted name, message) of all messages, nested ones too; not the entries of maps."""
    nested = parent.message_type if isinstance(parent, FileDescriptorProto) else parent.nested_type
    for message in nested:
        if not message.options.map_entry:
            name = prefix + message.name
            yield name, message
            yield from messages_of(message, name + ".")


def enums_of(file: FileDescriptorProto) -> Iterator[tuple[str, EnumDescriptorProto]]:
    yield from ((enum.name, enum) for enum in file.enum_type)
    for name, message in messages_of(file):
        yield from ((f"{name}.{enum.name}", enum) for enum in message.enum_type)


def upper_snake(pascal: str) -> str:
    """FinishReason → FINISH_REASON, KVCache → KV_CACHE."""
    words = re.sub(r"([a-z0-9])([A-Z])", r"\1_\2", pascal)
    return re.sub(r"([A-Z]+)([A-Z][a-z])", r"\1_\2", words).upper()


# --- Lint rules -----------------------------------------------------------------------------------


def lint_file(file: FileDescriptorProto, syntax_given: bool) -> Iterator[tuple[str, str]]:
    if not syntax_given:
        yield "SYNTAX_SPECIFIED", "has no syntax statement"
    stem = posixpath.basename(file.name).removesuffix(".proto")
    if not LOWER_SNAKE.fullmatch(stem):
        yield "FILE_LOWER_SNAKE_CASE", f"file name {stem} is not lower_snake_case"
    if file.public_dependency:
        yield "IMPORT_NO_PUBLIC", "has a public import"
    if file.weak_dependency:
        yield "IMPORT_NO_WEAK", "has a weak import"
    if not file.package:
        yield "PACKAGE_DEFINED", "has no package"
        return
    if not PACKAGE.fullmatch(file.package):
        yield "PACKAGE_LOWER_SNAKE_CASE", f"package {file.package} is not lower_snake.case"
    if not VERSION.fullmatch(file.package.rsplit(".", 1)[-1]):
        yield "PACKAGE_VERSION_SUFFIX", f"package {file.package} does not end in a version"
    if posixpath.dirname(file.name) != file.package.replace(".", "/"):
        yield "PACKAGE_DIRECTORY_MATCH", f"package {file.package} does not match the folder"


def lint_message(name: str, message: DescriptorProto) -> Iterator[tuple[str, str]]:
    if not PASCAL.fullmatch(message.name):
        yield "MESSAGE_PASCAL_CASE", f"message {name} is not PascalCase"
    for field in message.field:
        if not LOWER_SNAKE.fullmatch(field.name):
            yield "FIELD_LOWER_SNAKE_CASE", f"field {name}.{field.name} is not lower_snake_case"
        if field.label == FieldDescriptorProto.LABEL_REQUIRED:
            yield "FIELD_NOT_REQUIRED", f"field {name}.{field.name} is required"
    # proto3's `optional` makes a hidden oneof each.
    hidden = {field.oneof_index for field in message.field if field.proto3_optional}
    for index, oneof in enumerate(message.oneof_decl):
        if index not in hidden and not LOWER_SNAKE.fullmatch(oneof.name):
            yield "ONEOF_LOWER_SNAKE_CASE", f"oneof {name}.{oneof.name} is not lower_snake_case"


def lint_enum(name: str, enum: EnumDescriptorProto) -> Iterator[tuple[str, str]]:
    if not PASCAL.fullmatch(enum.name):
        yield "ENUM_PASCAL_CASE", f"enum {name} is not PascalCase"
    if enum.options.allow_alias:
        yield "ENUM_NO_ALLOW_ALIAS", f"enum {name} allows aliases"
    if enum.value[0].number != 0:
        yield "ENUM_FIRST_VALUE_ZERO", f"the first value of enum {name} is not 0"
    prefix = upper_snake(enum.name) + "_"
    for value in enum.value:
        if not UPPER_SNAKE.fullmatch(value.name):
            yield "ENUM_VALUE_UPPER_SNAKE_CASE", f"enum value {value.name} is not UPPER_SNAKE_CASE"
        if not value.name.startswith(prefix):
            yield "ENUM_VALUE_PREFIX", f"enum value {value.name} does not begin with {prefix}"
        if value.number == 0 and not value.name.endswith("_UNSPECIFIED"):
            yield "ENUM_ZERO_VALUE_SUFFIX", f"enum value {value.name} does not end in _UNSPECIFIED"


def lint_service(service: ServiceDescriptorProto) -> Iterator[tuple[str, str]]:
    if not PASCAL.fullmatch(service.name):
        yield "SERVICE_PASCAL_CASE", f"service {service.name} is not PascalCase"
    if not service.name.endswith("Service"):
        yield "SERVICE_SUFFIX", f"service {service.name} does not end in Service"
    for rpc in service.method:
        where = f"rpc {service.name}.{rpc.name}"
        if not PASCAL.fullmatch(rpc.name):
            yield "RPC_PASCAL_CASE", f"{where} is not PascalCase"
        for kind, type_name in (("Request", rpc.input_type), ("Response", rpc.output_type)):
            given = type_name.rsplit(".", 1)[-1]
            if given not in (f"{rpc.name}{kind}", f"{service.name}{rpc.name}{kind}"):
                rule = f"RPC_{kind.upper()}_STANDARD_NAME"
                yield rule, f"{where} has {given} where {rpc.name}{kind} is expected"


def used_types(file: FileDescriptorProto) -> set[str]:
    """Full names (".pkg.Name") of the types that fields and rpcs of a file name."""
    used = {t for s in file.service for m in s.method for t in (m.input_type, m.output_type)}

    def walk(message: DescriptorProto) -> None:
        used.update(field.type_name for field in message.field if field.type_name)
        used.update(field.extendee for field in message.extension)
        for nested in message.nested_type:
            walk(nested)

    for message in file.message_type:
        walk(message)
    used.update(x for e in file.extension for x in (e.extendee, e.type_name) if x)
    return used


def lint_imports(files: Mapping[str, FileDescriptorProto]) -> Iterator[Finding]:
    """IMPORT_USED, and PACKAGE_NO_IMPORT_CYCLE between packages."""
    from google.protobuf import descriptor_pool

    pool = descriptor_pool.DescriptorPool()
    added: set[str] = set()

    def add(name: str) -> None:
        if name in added:
            return
        added.add(name)
        file = files.get(name)
        if file is None:  # A well-known type: take it from the installed runtime.
            file = FileDescriptorProto()
            descriptor_pool.Default().FindFileByName(name).CopyToProto(file)
        for dependency in file.dependency:
            add(dependency)
        pool.Add(file)

    edges: dict[str, set[str]] = defaultdict(set)
    for name, file in files.items():
        for dependency in file.dependency:
            if dependency not in files:
                __import__(dependency.removesuffix(".proto").replace("/", ".") + "_pb2")
        add(name)
        homes = {pool.FindFileContainingSymbol(t.lstrip(".")).name for t in used_types(file)}
        for dependency in file.dependency:
            if dependency not in homes:
                yield name, "IMPORT_USED", f"import {dependency} is not used"
            other = pool.FindFileByName(dependency).package
            if other != file.package:
                edges[file.package].add(other)
    for package in sorted(edges):
        seen, todo = set[str](), list(edges[package])
        while todo:
            at = todo.pop()
            if at not in seen:
                seen.add(at)
                todo += edges.get(at, ())
        if package in seen:
            yield package, "PACKAGE_NO_IMPORT_CYCLE", f"package {package} imports itself by a cycle"


def lint_packages(files: Iterable[FileDescriptorProto]) -> Iterator[Finding]:
    """Rules about common options of the files of one package, or of one folder."""
    by_package: dict[str, list[FileDescriptorProto]] = defaultdict(list)
    by_folder: dict[str, set[str]] = defaultdict(set)
    for file in files:
        by_package[file.package].append(file)
        by_folder[posixpath.dirname(file.name)].add(file.package)
    for folder, packages in by_folder.items():
        if len(packages) > 1:
            names = ", ".join(sorted(packages))
            yield folder, "DIRECTORY_SAME_PACKAGE", f"the folder holds packages {names}"
    for package, members in by_package.items():
        if len({posixpath.dirname(file.name) for file in members}) > 1:
            yield package, "PACKAGE_SAME_DIRECTORY", f"package {package} lies in several folders"
        for option, rule in PACKAGE_OPTIONS.items():
            values = {str(getattr(file.options, option)) for file in members}
            if len(values) > 1:
                yield package, rule, f"{option} differs: {', '.join(sorted(values))}"


def lint_uniqueness(files: Iterable[FileDescriptorProto]) -> Iterator[Finding]:
    """RPC_REQUEST_RESPONSE_UNIQUE: no message serves two rpcs, or both sides of one."""
    users: dict[str, list[tuple[str, str]]] = defaultdict(list)
    for file in files:
        for service in file.service:
            for rpc in service.method:
                where = f"{service.name}.{rpc.name}"
                users[rpc.input_type].append((file.name, where))
                users[rpc.output_type].append((file.name, where))
    for type_name, used in users.items():
        if len(used) > 1:
            names = ", ".join(where for _, where in used)
            message = f"message {type_name.lstrip('.')} is used by {names}"
            yield used[0][0], "RPC_REQUEST_RESPONSE_UNIQUE", message


def lint(files: FileDescriptorSet, root: Path | None = None) -> list[Finding]:
    """Findings by buf's STANDARD rules. With `root`, files are also read for their syntax line."""
    found: list[Finding] = []
    for file in files.file:
        given = True
        if root is not None:
            text = (root / file.name).read_text(encoding="utf-8")
            given = re.search(r'^\s*(syntax|edition)\s*=\s*"', text, re.MULTILINE) is not None
        found += [(file.name, *f) for f in lint_file(file, given)]
        for name, message in messages_of(file):
            found += [(file.name, *f) for f in lint_message(name, message)]
        for name, enum in enums_of(file):
            found += [(file.name, *f) for f in lint_enum(name, enum)]
        for service in file.service:
            found += [(file.name, *f) for f in lint_service(service)]
    found += lint_imports({file.name: file for file in files.file})
    found += lint_packages(files.file)
    found += lint_uniqueness(files.file)
    return found


# --- Breaking changes -----------------------------------------------------------------------------


K = TypeVar("K", str, int)
V = TypeVar("V")


def kept(old: Mapping[K, V], new: Mapping[K, V]) -> Iterator[tuple[K, V, V]]:
    """(key, old, new) for common keys."""
    return ((key, value, new[key]) for key, value in old.items() if key in new)


def lost(rule: str, what: str, old: Iterable[Any], new: Iterable[Any]) -> Iterator[tuple[str, str]]:
    """A finding for each key that is no longer there."""
    there = set(new)
    return ((rule, f"{what} {key} was deleted") for key in old if key not in there)


def breaking_field(
    name: str, old: FieldDescriptorProto, new: FieldDescriptorProto
) -> Iterator[tuple[str, str]]:
    where = f"field {name}.{old.name} ({old.number})"
    if old.name != new.name:
        yield "FIELD_SAME_NAME", f"{where} is now called {new.name}"
    if old.json_name != new.json_name:
        yield "FIELD_SAME_JSON_NAME", f"{where} is now {new.json_name} in JSON"
    if (old.type, old.type_name) != (new.type, new.type_name):
        before = old.type_name or FieldDescriptorProto.Type.Name(old.type)
        after = new.type_name or FieldDescriptorProto.Type.Name(new.type)
        yield "FIELD_SAME_TYPE", f"{where} has changed from {before} to {after}"
    if (old.label, old.proto3_optional) != (new.label, new.proto3_optional):
        yield "FIELD_SAME_CARDINALITY", f"{where} has changed between single, optional and repeated"
    if old.HasField("oneof_index") != new.HasField("oneof_index"):
        yield "FIELD_SAME_ONEOF", f"{where} has moved into or out of a oneof"
    if old.default_value != new.default_value:
        yield "FIELD_SAME_DEFAULT", f"{where} has another default"


def breaking_message(
    name: str, old: DescriptorProto, new: DescriptorProto
) -> Iterator[tuple[str, str]]:
    fields = {field.number: field for field in old.field}
    fields_now = {field.number: field for field in new.field}
    yield from lost("FIELD_NO_DELETE", f"in message {name}, field", fields, fields_now)
    for _, before, after in kept(fields, fields_now):
        yield from breaking_field(name, before, after)
        if before.HasField("oneof_index") and after.HasField("oneof_index"):
            was = old.oneof_decl[before.oneof_index].name
            now = new.oneof_decl[after.oneof_index].name
            if was != now and not before.proto3_optional:
                yield "FIELD_SAME_ONEOF", f"field {name}.{before.name} moved from {was} to {now}"
    reserved = {(r.start, r.end) for r in new.reserved_range}
    for gone in sorted({(r.start, r.end) for r in old.reserved_range} - reserved):
        span = f"{gone[0]} to {gone[1] - 1}"
        yield "RESERVED_MESSAGE_NO_DELETE", f"message {name} no longer reserves {span}"
    for word in sorted(set(old.reserved_name) - set(new.reserved_name)):
        yield "RESERVED_MESSAGE_NO_DELETE", f"message {name} no longer reserves {word}"


def breaking_enum(
    name: str, old: EnumDescriptorProto, new: EnumDescriptorProto
) -> Iterator[tuple[str, str]]:
    before = {value.number: value for value in old.value}
    after = {value.number: value for value in new.value}
    yield from lost("ENUM_VALUE_NO_DELETE", f"in enum {name}, value", before, after)
    for _, was, now in kept(before, after):
        if was.name != now.name:
            yield "ENUM_VALUE_SAME_NAME", f"enum value {was.name} is now called {now.name}"


def breaking_service(
    old: ServiceDescriptorProto, new: ServiceDescriptorProto
) -> Iterator[tuple[str, str]]:
    before = {rpc.name: rpc for rpc in old.method}
    after = {rpc.name: rpc for rpc in new.method}
    yield from lost("RPC_NO_DELETE", f"in service {old.name}, rpc", before, after)
    for _, was, now in kept(before, after):
        where = f"rpc {old.name}.{was.name}"
        if was.input_type != now.input_type:
            yield "RPC_SAME_REQUEST_TYPE", f"{where} now takes {now.input_type}"
        if was.output_type != now.output_type:
            yield "RPC_SAME_RESPONSE_TYPE", f"{where} now returns {now.output_type}"
        if was.client_streaming != now.client_streaming:
            yield "RPC_SAME_CLIENT_STREAMING", f"{where} has changed client streaming"
        if was.server_streaming != now.server_streaming:
            yield "RPC_SAME_SERVER_STREAMING", f"{where} has changed server streaming"


def breaking_file(old: FileDescriptorProto, new: FileDescriptorProto) -> Iterator[tuple[str, str]]:
    if old.package != new.package:
        yield "FILE_SAME_PACKAGE", f"the package is now {new.package}"
    if old.syntax != new.syntax:
        yield "FILE_SAME_SYNTAX", f"the syntax is now {new.syntax}"
    messages, messages_now = dict(messages_of(old)), dict(messages_of(new))
    yield from lost("MESSAGE_NO_DELETE", "message", messages, messages_now)
    for name, message, message_now in kept(messages, messages_now):
        yield from breaking_message(name, message, message_now)
    enums, enums_now = dict(enums_of(old)), dict(enums_of(new))
    yield from lost("ENUM_NO_DELETE", "enum", enums, enums_now)
    for name, enum, enum_now in kept(enums, enums_now):
        yield from breaking_enum(name, enum, enum_now)
    services = {service.name: service for service in old.service}
    services_now = {service.name: service for service in new.service}
    yield from lost("SERVICE_NO_DELETE", "service", services, services_now)
    for _, service, service_now in kept(services, services_now):
        yield from breaking_service(service, service_now)


def breaking(old: FileDescriptorSet, new: FileDescriptorSet) -> list[Finding]:
    """Changes that would break programs or stored messages made for `old` (buf's category FILE)."""
    found: list[Finding] = []
    files = {file.name: file for file in new.file}
    for file in old.file:
        if file.name in files:
            found += [(file.name, *f) for f in breaking_file(file, files[file.name])]
        else:
            found.append((file.name, "FILE_NO_DELETE", "the file was deleted"))
    return found


# --- The program ----------------------------------------------------------------------------------


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write-baseline", action="store_true")
    parser.add_argument("--proto", type=Path, default=PROTO, help="default: proto/")
    parser.add_argument("--baseline", type=Path, default=BASELINE)
    args = parser.parse_args()
    try:
        files = compile_protos(args.proto)
    except RuntimeError as error:
        print(error, file=sys.stderr)
        return 1
    found = lint(files, args.proto)
    if args.write_baseline:
        args.baseline.write_bytes(files.SerializeToString(deterministic=True))
    elif args.baseline.exists():
        found += breaking(FileDescriptorSet.FromString(args.baseline.read_bytes()), files)
    else:
        found.append((args.baseline.name, "BASELINE", "missing; --write-baseline makes it"))
    for file, rule, text in found:
        print(f"{file}: {rule}: {text}", file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
