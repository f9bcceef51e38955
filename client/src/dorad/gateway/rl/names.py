"""Names of adapters that libraries choose, as names that a server takes, and back.

A server's names have lower-case letters, digits, ".", "_" and "-". Another name gets an end that
tells what was changed: "Policy/v2" is "policy_v2--x0-6u2f". The beginning stays readable, and
within the prefix of its tenant.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable

from dorad import types as t

_NAME = re.compile(r"[a-z0-9]([a-z0-9._-]*[a-z0-9])?")
_KEPT = re.compile(r"[a-z0-9._-]")
_UPPER = re.compile(r"[A-Z]")
_MARK = "--x"
_MARKED = re.compile(rf"(.+){_MARK}((?:[0-9]+(?:u[0-9a-f]+)?(?:-|$))*)")


def server_name(name: str) -> str:
    """The server's name for it. Different names have different ones."""
    return name if _NAME.fullmatch(name) and shown_name(name) == name else _encoded(name)


def server_ref(ref: str) -> str:
    """The same for "name", "name@version" and "name@version:digest"."""
    name, at, version = ref.partition("@")
    return server_name(name) + at + version


def shown_name(name: str) -> str:
    """The name that `server_name` was given."""
    marked = _MARKED.fullmatch(name)
    if marked is None:
        return name
    characters = list(marked[1])
    for change in filter(None, marked[2].split("-")):
        position, _, code = change.partition("u")
        at, number = int(position), int(code or "0", 16)
        if at >= len(characters) or number > 0x10FFFF or 0xD800 <= number <= 0xDFFF:
            return name
        characters[at] = chr(number) if code else characters[at].upper()
    found = "".join(characters)
    needed = not _NAME.fullmatch(found) or shown_name(found) != found
    return found if needed and _encoded(found) == name else name


def shown_spans(spans: Iterable[t.Span]) -> list[t.Span]:
    return [
        dataclasses.replace(span, adapter=name)
        if (name := shown_name(span.adapter)) != span.adapter
        else span
        for span in spans
    ]


def shown_version(version: t.AdapterVersion) -> t.AdapterVersion:
    return dataclasses.replace(version, name=shown_name(version.name))


def _encoded(name: str) -> str:
    kept, changes = "", list[str]()
    for position, character in enumerate(name):
        if _UPPER.fullmatch(character):
            kept += character.lower()
            changes.append(str(position))
        elif _KEPT.fullmatch(character) and (position or character.isalnum()):
            kept += character
        else:
            kept += "_" if position else "0"
            changes.append(f"{position}u{ord(character):x}")
    return kept + _MARK + "-".join(changes)
