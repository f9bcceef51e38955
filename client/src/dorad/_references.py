"""References to adapters: "name", "name@version", "name@version:digest". Pure functions."""

from __future__ import annotations

from dorad._arguments import shown


def ref_parts(ref: str) -> tuple[str, str, str]:
    """ "a@2:0f3c81aa" → ("a", "2", "0f3c81aa"). Missing parts are empty."""
    name, _, pin = ref.partition("@")
    version, _, digest = pin.partition(":")
    return name, version, digest


def split_ref(name: str, version: int | None) -> tuple[str, int, str]:
    """("a@2:0f3c81aa", None) → ("a", 2, "0f3c81aa"), ("a", 2) → ("a", 2, "").

    Raises ValueError when the version is missing.
    """
    if not isinstance(name, str):
        raise TypeError(f'an adapter is named by text such as "name@2", not {shown(name)}')
    if version is None:
        base, number, digest = ref_parts(name)
        if not number.isdigit():
            raise ValueError(f'which version of {name!r}? Pass "name@version" or a version')
        return base, int(number), digest
    return name, version, ""
