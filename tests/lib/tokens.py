"""Tokens files, for servers that ask their callers who they are."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path


def write_tokens(
    path: Path, tokens: Mapping[str, tuple[str, list[str]]], tenants: Mapping[str, dict]
) -> None:
    """`tokens` are (tenant, roles) by name. Each token is its name with "-token" behind it."""
    entries = [
        {
            "name": name,
            "tenant": tenant,
            "roles": roles,
            "sha256": hashlib.sha256(f"{name}-token".encode()).hexdigest(),
        }
        for name, (tenant, roles) in tokens.items()
    ]
    fresh = path.with_suffix(".new")
    fresh.write_text(json.dumps({"tenants": tenants, "tokens": entries}))
    fresh.rename(path)
