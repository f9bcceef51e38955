"""Contexts: named servers with their credentials, in a file of the user.

The file is `dorad/contexts.yaml` in $XDG_CONFIG_HOME (default: ~/.config). It names tokens, it does
not hold them.
"""

from __future__ import annotations

import contextlib
import difflib
import os
import re
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from pathlib import Path

import yaml

from dorad._access import check_port, check_target

ADDRESSES = ("target", "admin_target", "metrics")
TLS = ("ca_file", "cert_file", "key_file")


@dataclass(frozen=True)
class Context:
    """One server. "" means not set."""

    target: str = ""
    admin_target: str = ""
    metrics: str = ""
    """URL of the server's /metrics."""
    ca_file: str = ""
    cert_file: str = ""
    key_file: str = ""
    token_file: str = ""
    token_env: str = ""
    """Name of the environment variable that holds the token."""

    def check(self) -> None:
        """Raises ValueError for values that can never work."""
        for address in filter(None, (self.target, self.admin_target)):
            check_target(address)
            check_port(address)
        if self.metrics and not self.metrics.startswith(("http://", "https://")):
            raise ValueError(f"metrics: {self.metrics!r} is not an http URL")
        if bool(self.cert_file) != bool(self.key_file):
            raise ValueError("cert_file and key_file must be given together")
        if self.token_file and self.token_env:
            raise ValueError("give token_file or token_env, not both")

    def token(self) -> str:
        """The token, or "". Raises ValueError without the variable, OSError without the file."""
        if self.token_file:
            return Path(self.token_file).read_text(encoding="utf-8").strip()
        if not self.token_env:
            return ""
        if not (found := os.environ.get(self.token_env)):
            raise ValueError(f"the variable {self.token_env}, which has its token, is not set")
        return found

    def given(self) -> dict[str, str]:
        """The values that are set."""
        values = {item.name: getattr(self, item.name) for item in fields(self)}
        return {name: value for name, value in values.items() if value}


def unknown(what: str, name: str, known: Iterable[str]) -> ValueError:
    """The error for a name that is not known, with the nearest one."""
    near = difflib.get_close_matches(name, list(known), 1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    return ValueError(f"there is no {what} {name!r}{hint}")


def path() -> Path:
    """The file of contexts, whether or not it exists."""
    home = os.environ.get("XDG_CONFIG_HOME")
    # A relative path in the variable is invalid and must be ignored, the specification says.
    base = Path(home) if home and os.path.isabs(home) else Path.home() / ".config"
    return base / "dorad" / "contexts.yaml"


@dataclass
class Contexts:
    """The content of the file."""

    contexts: dict[str, Context] = field(default_factory=dict)
    current: str = ""

    @classmethod
    def load(cls) -> Contexts:
        """Empty if there is no file. Raises ValueError for a file that is not one of contexts."""
        file = path()
        try:
            found = yaml.safe_load(file.read_text(encoding="utf-8")) or {}
            return cls._parse(found)
        except FileNotFoundError:
            return cls()
        except (yaml.YAMLError, UnicodeDecodeError, ValueError) as error:
            raise ValueError(f"{file}: {' '.join(str(error).split())}") from error

    @classmethod
    def _parse(cls, found: object) -> Contexts:
        if not isinstance(found, dict):
            raise ValueError("expected a mapping with `current` and `contexts`")
        if strange := set(found) - {"current", "contexts"}:
            raise unknown("key", str(min(strange, key=str)), ("current", "contexts"))
        contexts = {}
        for name, values in (found.get("contexts") or {}).items():
            contexts[check_name(name)] = _context(name, values or {})
        current = found.get("current") or ""
        if current and current not in contexts:
            raise unknown("context", str(current), contexts)
        return cls(contexts, current)

    def save(self) -> None:
        """Replaces the file. Only the user can read it."""
        file = path()
        file.parent.mkdir(parents=True, exist_ok=True)
        contexts = {name: context.given() for name, context in sorted(self.contexts.items())}
        text = yaml.safe_dump({"current": self.current, "contexts": contexts}, sort_keys=False)
        handle, written = tempfile.mkstemp(dir=file.parent, prefix=file.name)  # Mode 0600.
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as stream:
                stream.write(text)
            os.replace(written, file)
        except BaseException:
            os.unlink(written)
            raise

    def __getitem__(self, name: str) -> Context:
        """Raises ValueError, with the nearest name, for a context that does not exist."""
        if name not in self.contexts:
            raise unknown("context", name, self.contexts)
        return self.contexts[name]

    def remove(self, name: str) -> None:
        """Raises ValueError as above. Of the current one: no context is current then."""
        if name not in self.contexts:
            raise unknown("context", name, self.contexts)
        del self.contexts[name]
        self.current = "" if self.current == name else self.current


def check_name(name: object) -> str:
    if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name):
        raise ValueError(f"{name!r} is not a name of letters, digits, '.', '_' and '-'")
    return name


def _context(name: str, values: object) -> Context:
    known = [item.name for item in fields(Context)]
    if not isinstance(values, dict):
        raise ValueError(f"context {name!r} is not a mapping")
    for key, value in values.items():
        if key not in known:
            raise unknown(f"key of context {name!r}", str(key), known)
        if not isinstance(value, str):
            raise ValueError(f"context {name!r}: {key} is not text")
    context = Context(**values)
    try:
        context.check()
    except ValueError as error:
        raise ValueError(f"context {name!r}: {error}") from None
    return context


def export(name: str, context: Context, *, override: bool) -> None:
    """Makes a context's credentials those of this process: DORAD_TOKEN, DORAD_CA_FILE and so on.

    Those of the environment count more, unless `override`: then only its token counts, and only for
    a context without one.
    """
    values = {f"DORAD_{key.upper()}": getattr(context, key) for key in TLS}
    if override:
        for variable in values:
            os.environ.pop(variable, None)
    if override or not os.environ.get("DORAD_TOKEN"):
        try:
            values["DORAD_TOKEN"] = context.token()
        except (OSError, ValueError) as error:
            raise ValueError(f"the token of context {name!r}: {error}") from error
    for variable, value in values.items():
        if value and (override or not os.environ.get(variable)):
            os.environ[variable] = value


def complete(incomplete: str) -> list[str]:
    """Names for a shell."""
    with contextlib.suppress(ValueError, OSError):
        return [name for name in Contexts.load().contexts if name.startswith(incomplete)]
    return []
