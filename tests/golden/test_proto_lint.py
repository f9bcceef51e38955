"""The wire contract keeps its rules and its promises; and the checks themselves can fail."""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "tools" / "proto_lint.py"

_spec = importlib.util.spec_from_file_location("proto_lint", SCRIPT)
proto_lint = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(proto_lint)

GOOD = """syntax = "proto3";
package acme.v1;
enum Color { COLOR_UNSPECIFIED = 0; COLOR_RED = 1; }
message Part { reserved 9; reserved "old"; int32 size = 1; optional Color color = 2;
  oneof shape { string round = 3; string flat = 4; } }
message MakeRequest { Part part = 1; map<string, Part> parts = 2; }
message MakeResponse {}
service PartService { rpc Make(MakeRequest) returns (MakeResponse); }
"""


def write(root, text, name="acme/v1/part.proto"):
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return root


def rules(root):
    return {rule for _, rule, _ in proto_lint.lint(proto_lint.compile_protos(root), root)}


def as_proto2(text):
    """proto2 wants a label on every field."""
    return re.sub(r"(int32 size|Part part = )", r"optional \1", text)


def breaks(tmp_path, text, name="acme/v1/part.proto"):
    old = proto_lint.compile_protos(write(tmp_path / "old", GOOD))
    new = proto_lint.compile_protos(write(tmp_path / "new", text, name))
    return {rule for _, rule, _ in proto_lint.breaking(old, new)}


def test_our_contract_is_clean_and_compatible():
    run = subprocess.run([sys.executable, SCRIPT], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


def test_a_clean_file_has_no_findings(tmp_path):
    assert rules(write(tmp_path, GOOD)) == set()


@pytest.mark.parametrize(
    ("old", "new", "rule"),
    [
        ('syntax = "proto3";', "", "SYNTAX_SPECIFIED"),
        ("package acme.v1;", "package acme.v2;", "PACKAGE_DIRECTORY_MATCH"),
        ("package acme.v1;", "package acme;", "PACKAGE_VERSION_SUFFIX"),
        ("package acme.v1;", "package Acme.v1;", "PACKAGE_LOWER_SNAKE_CASE"),
        ("package acme.v1;", "", "PACKAGE_DEFINED"),
        ("enum Color", "enum color", "ENUM_PASCAL_CASE"),
        ("COLOR_RED", "RED", "ENUM_VALUE_PREFIX"),
        ("COLOR_RED", "COLOR_red", "ENUM_VALUE_UPPER_SNAKE_CASE"),
        ("COLOR_UNSPECIFIED", "COLOR_NONE", "ENUM_ZERO_VALUE_SUFFIX"),
        ("COLOR_RED = 1;", "option allow_alias = true; COLOR_RED = 0;", "ENUM_NO_ALLOW_ALIAS"),
        ("message Part ", "message part_of { } message Part ", "MESSAGE_PASCAL_CASE"),
        ("int32 size", "int32 theSize", "FIELD_LOWER_SNAKE_CASE"),
        ("oneof shape", "oneof Shape", "ONEOF_LOWER_SNAKE_CASE"),
        ("service PartService", "service Parts", "SERVICE_SUFFIX"),
        ("service PartService", "service part_Service", "SERVICE_PASCAL_CASE"),
        ("rpc Make(", "rpc make(", "RPC_PASCAL_CASE"),
        ("rpc Make(MakeRequest)", "rpc Make(Part)", "RPC_REQUEST_STANDARD_NAME"),
        ("returns (MakeResponse)", "returns (Part)", "RPC_RESPONSE_STANDARD_NAME"),
        ("(MakeResponse);", "(MakeResponse); rpc Remake(MakeRequest) returns (Part);",
         "RPC_REQUEST_RESPONSE_UNIQUE"),
        ("package acme.v1;", 'package acme.v1; import "google/protobuf/any.proto";', "IMPORT_USED"),
        ("package acme.v1;", 'package acme.v1; import public "google/protobuf/any.proto";',
         "IMPORT_NO_PUBLIC"),
    ],
)  # fmt: skip
def test_each_lint_rule_can_fail(tmp_path, old, new, rule):
    assert old in GOOD
    text = GOOD.replace(old, new)
    if new.startswith("enum color"):
        text = text.replace("Color color", "color color")
    if rule == "SYNTAX_SPECIFIED":
        text = as_proto2(text)
    assert rule in rules(write(tmp_path, text))


def test_rules_across_files_can_fail(tmp_path):
    write(tmp_path, GOOD)
    other = 'syntax = "proto3"; package acme.v1; option go_package = "x";'
    write(tmp_path, other, "acme/v1/BadName.proto")
    write(tmp_path, 'syntax = "proto3"; package acme.v1;', "elsewhere/more.proto")
    write(tmp_path, 'syntax = "proto3"; package other.v1;', "acme/v1/other.proto")
    assert rules(tmp_path) >= {
        "FILE_LOWER_SNAKE_CASE",
        "PACKAGE_SAME_GO_PACKAGE",
        "PACKAGE_SAME_DIRECTORY",
        "DIRECTORY_SAME_PACKAGE",
    }


def test_import_cycles_between_packages_are_found(tmp_path):
    head = 'syntax = "proto3"; package %s.v1; import "%s.proto"; message %s { %s x = 1; }'
    write(tmp_path, head % ("a", "b/v1/b", "A", "b.v1.B"), "a/v1/a.proto")
    write(tmp_path, head % ("b", "a/v1/low", "B", "a.v1.Low"), "b/v1/b.proto")
    write(tmp_path, 'syntax = "proto3"; package a.v1; message Low {}', "a/v1/low.proto")
    assert "PACKAGE_NO_IMPORT_CYCLE" in rules(tmp_path)


def test_required_fields_are_found(tmp_path):
    text = 'syntax = "proto2"; package acme.v1; message M { required int32 x = 1; }'
    assert "FIELD_NOT_REQUIRED" in rules(write(tmp_path, text))


def test_additions_do_not_break(tmp_path):
    text = GOOD.replace("int32 size = 1;", "int32 size = 1; string more = 5;")
    text = text.replace("COLOR_RED = 1;", "COLOR_RED = 1; COLOR_BLUE = 2;") + "message New {}"
    assert breaks(tmp_path, text) == set()


@pytest.mark.parametrize(
    ("old", "new", "rule"),
    [
        ("int32 size = 1;", "", "FIELD_NO_DELETE"),
        ("int32 size = 1;", "int32 size = 7;", "FIELD_NO_DELETE"),
        ("int32 size", "int64 size", "FIELD_SAME_TYPE"),
        ("int32 size", "repeated int32 size", "FIELD_SAME_CARDINALITY"),
        ("int32 size", "optional int32 size", "FIELD_SAME_CARDINALITY"),
        ("int32 size", "int32 length", "FIELD_SAME_NAME"),
        ("int32 size = 1", 'int32 size = 1 [json_name = "s"]', "FIELD_SAME_JSON_NAME"),
        ("string flat = 4; }", "} string flat = 4;", "FIELD_SAME_ONEOF"),
        ("oneof shape", "oneof form", "FIELD_SAME_ONEOF"),
        ("reserved 9;", "", "RESERVED_MESSAGE_NO_DELETE"),
        ('reserved "old";', "", "RESERVED_MESSAGE_NO_DELETE"),
        (" COLOR_RED = 1;", "", "ENUM_VALUE_NO_DELETE"),
        ("COLOR_RED = 1", "COLOR_BLUE = 1", "ENUM_VALUE_SAME_NAME"),
        ("rpc Make(MakeRequest) returns (MakeResponse);", "", "RPC_NO_DELETE"),
        ("rpc Make(MakeRequest)", "rpc Make(Part)", "RPC_SAME_REQUEST_TYPE"),
        ("returns (MakeResponse)", "returns (Part)", "RPC_SAME_RESPONSE_TYPE"),
        ("(MakeRequest) returns", "(stream MakeRequest) returns", "RPC_SAME_CLIENT_STREAMING"),
        ("returns (Make", "returns (stream Make", "RPC_SAME_SERVER_STREAMING"),
        ("service PartService", "service PiecesService", "SERVICE_NO_DELETE"),
        ("message MakeResponse {}\n", "message MakeResponse2 {}\n", "MESSAGE_NO_DELETE"),
        ("Color", "Colour", "ENUM_NO_DELETE"),
        ("package acme.v1;", "package acme.v2;", "FILE_SAME_PACKAGE"),
        ("proto3", "proto2", "FILE_SAME_SYNTAX"),
    ],
)
def test_each_breaking_change_is_found(tmp_path, old, new, rule):
    assert old in GOOD
    text = GOOD.replace(old, new)
    if new == "message MakeResponse2 {}\n":
        text = text.replace("(MakeResponse)", "(MakeResponse2)")
    if new == "proto2":
        text = as_proto2(text)
    assert rule in breaks(tmp_path, text)


def test_a_deleted_file_is_found(tmp_path):
    assert "FILE_NO_DELETE" in breaks(tmp_path, GOOD, "acme/v1/moved.proto")


def test_the_program_names_findings_and_needs_a_baseline(tmp_path):
    def run(*more):
        command = [sys.executable, SCRIPT, "--proto", tmp_path, "--baseline", tmp_path / "b", *more]
        return subprocess.run(command, capture_output=True, text=True)

    write(tmp_path, GOOD)
    assert "BASELINE: missing" in run().stderr
    assert run("--write-baseline").returncode == 0
    assert run().returncode == 0
    write(tmp_path, GOOD.replace("int32 size", "int64 Size"))
    broken = run()
    assert broken.returncode == 1
    assert "acme/v1/part.proto: FIELD_LOWER_SNAKE_CASE: field Part.Size" in broken.stderr
    assert "FIELD_SAME_TYPE: field Part.size (1) has changed" in broken.stderr
