"""The manifest of a fleet: its members and, for each adapter, the version that they shall have.

Pure functions of values: every change makes a new manifest of the next generation, or raises Lost.
A `ManifestStore` decides between two changes of the same generation. Times are seconds since 1970.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from dorad.errors import Conflict

FORMAT = 1


class Lost(Conflict):
    """The change is no longer possible: another coordinator's came first."""

    def __init__(self, message: str) -> None:
        super().__init__(message, code="ABORTED")


@dataclass(frozen=True)
class Files:
    """An adapter's two files: what a server may take from another one."""

    config_sha256: str
    """Hexadecimal, of adapter_config.json."""
    tensors_sha256: str
    """Hexadecimal, of adapter_model.safetensors."""
    size: int
    """Bytes of adapter_model.safetensors."""


@dataclass(frozen=True)
class Release:
    """One version of an adapter."""

    version: int
    files: Files
    upload_id: str
    """Names its transfer on every member, so that another sender continues it."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Of its publish: durable, tags, keep_last, pinned."""
    digest: str = ""
    """Of the content, as the members have computed it. Empty until the commit."""


@dataclass(frozen=True)
class Prepared:
    """A release that members receive. It never becomes active unless it is committed."""

    release: Release
    coordinator: str
    until: float
    """Afterwards any coordinator may finish or undo it."""


@dataclass(frozen=True)
class Adapter:
    """The versions of one name."""

    committed: Release | None = None
    """The version that every member must have active before it gets prompts."""
    prepared: Prepared | None = None
    highest: int = 0
    """The highest number given out. Numbers never return."""


@dataclass(frozen=True)
class Keeper:
    """The coordinator that repairs members. One at a time: two would take each other's transfers
    over."""

    coordinator: str = ""
    until: float = 0.0


@dataclass(frozen=True)
class Manifest:
    generation: int = 0
    members: Mapping[str, float] = field(default_factory=dict)
    """Target → the end of its lease."""
    adapters: Mapping[str, Adapter] = field(default_factory=dict)
    keeper: Keeper = Keeper()

    def live(self, now: float) -> list[str]:
        """Members whose lease has not ended."""
        return [target for target, until in self.members.items() if until > now]

    def committed(self) -> dict[str, Release]:
        """By adapter name."""
        return {name: a.committed for name, a in self.adapters.items() if a.committed is not None}

    def behind(self, held: Collection[tuple[str, int, str]]) -> list[str]:
        """The committed versions, as name@version, that are not among those of a member.

        `held`: name, version and digest of each.
        """
        return [
            f"{name}@{release.version}"
            for name, release in self.committed().items()
            if (name, release.version, release.digest) not in held
        ]

    def pinned(self, ref: str) -> str:
        """A reference to an adapter as one to the committed version, with its digest.

        A server with another version active then refuses the prompt instead of answering it. A
        reference with a version stays as it is, as does a name without a committed version.
        """
        committed = self.committed().get(ref)
        return f"{ref}@{committed.version}:{committed.digest}" if committed else ref


Change = Callable[[Manifest], Manifest]


def _next(manifest: Manifest, **changes: Any) -> Manifest:
    return replace(manifest, generation=manifest.generation + 1, **changes)


def _with_adapter(manifest: Manifest, name: str, adapter: Adapter) -> Manifest:
    return _next(manifest, adapters={**manifest.adapters, name: adapter})


# --- Members --------------------------------------------------------------------------------------


def renew(manifest: Manifest, targets: Iterable[str], until: float) -> Manifest:
    """Extends the leases of members, and adds those that are new."""
    return _next(manifest, members={**manifest.members, **dict.fromkeys(targets, until)})


def leave(manifest: Manifest, target: str) -> Manifest:
    """Removes a member."""
    if target not in manifest.members:
        raise Lost(f"{target} is no member")
    left = {other: until for other, until in manifest.members.items() if other != target}
    return _next(manifest, members=left)


def keep(manifest: Manifest, coordinator: str, now: float, until: float) -> Manifest:
    """Makes `coordinator` the one that repairs members. Raises Lost while another one is."""
    other = manifest.keeper
    if other.coordinator != coordinator and other.until > now:
        raise Lost(f"{other.coordinator} repairs the members")
    return _next(manifest, keeper=Keeper(coordinator, until))


# --- Versions -------------------------------------------------------------------------------------


def prepare(manifest: Manifest, name: str, prepared: Prepared) -> Manifest:
    """Announces a release. Raises Lost while another one is prepared, or its number is taken."""
    adapter = manifest.adapters.get(name, Adapter())
    if adapter.prepared is not None:
        other = adapter.prepared
        raise Lost(f"{name}@{other.release.version} is being published by {other.coordinator}")
    if prepared.release.version <= adapter.highest:
        raise Lost(f"{name}@{prepared.release.version} is taken")
    now = replace(adapter, prepared=prepared, highest=prepared.release.version)
    return _with_adapter(manifest, name, now)


def _prepared(manifest: Manifest, name: str, version: int, coordinator: str) -> Prepared:
    prepared = manifest.adapters.get(name, Adapter()).prepared
    if prepared is None or prepared.release.version != version:
        raise Lost(f"{name}@{version} is no longer prepared")
    if prepared.coordinator != coordinator:
        raise Lost(f"{name}@{version} was taken over by {prepared.coordinator}")
    return prepared


def take_over(
    manifest: Manifest, name: str, version: int, coordinator: str, now: float, until: float
) -> Manifest:
    """Makes `coordinator` the one that finishes or undoes a release, when its time has ended."""
    adapter = manifest.adapters.get(name, Adapter())
    other = adapter.prepared
    if other is None or other.release.version != version:
        raise Lost(f"{name}@{version} is no longer prepared")
    if other.until > now:
        raise Lost(f"{name}@{version} is being published by {other.coordinator}")
    mine = replace(other, coordinator=coordinator, until=until)
    return _with_adapter(manifest, name, replace(adapter, prepared=mine))


def prolong(
    manifest: Manifest, name: str, version: int, coordinator: str, until: float
) -> Manifest:
    """Gives a coordinator more time for its release."""
    prepared = _prepared(manifest, name, version, coordinator)
    mine = replace(prepared, until=until)
    return _with_adapter(manifest, name, replace(manifest.adapters[name], prepared=mine))


def commit(manifest: Manifest, name: str, version: int, coordinator: str, digest: str) -> Manifest:
    """Makes the prepared release the one that members must have active."""
    release = replace(_prepared(manifest, name, version, coordinator).release, digest=digest)
    now = replace(manifest.adapters[name], committed=release, prepared=None)
    return _with_adapter(manifest, name, now)


def abort(manifest: Manifest, name: str, version: int, coordinator: str) -> Manifest:
    """Gives up the prepared release."""
    _prepared(manifest, name, version, coordinator)
    return _with_adapter(manifest, name, replace(manifest.adapters[name], prepared=None))


def retire(manifest: Manifest, name: str, version: int) -> Manifest:
    """Takes the committed release of a name back. The number stays taken."""
    adapter = manifest.adapters.get(name, Adapter())
    if adapter.committed is None or adapter.committed.version != version:
        raise Lost(f"{name}@{version} is not the committed version")
    return _with_adapter(manifest, name, replace(adapter, committed=None))


# --- As text --------------------------------------------------------------------------------------


def to_json(manifest: Manifest) -> str:
    return json.dumps({"format": FORMAT, **asdict(manifest)}, indent=1)


def from_json(text: str) -> Manifest:
    """Raises ValueError when the text is no manifest of this format."""
    try:
        value = json.loads(text)
        if value["format"] != FORMAT:
            raise ValueError(f"a manifest of format {value['format']}, not {FORMAT}")
        adapters = {name: _adapter(each) for name, each in value["adapters"].items()}
        keeper = Keeper(**value["keeper"])
        return Manifest(int(value["generation"]), value["members"], adapters, keeper)
    except (KeyError, TypeError) as error:
        raise ValueError(f"not a fleet's manifest: {error!r}") from None


def _adapter(value: Any) -> Adapter:
    prepared = value["prepared"]
    return Adapter(
        None if value["committed"] is None else _release(value["committed"]),
        None
        if prepared is None
        else Prepared(_release(prepared["release"]), prepared["coordinator"], prepared["until"]),
        value["highest"],
    )


def _release(value: Any) -> Release:
    return Release(**{**value, "files": Files(**value["files"])})
