"""What a fleet has promised, and whether that holds: read from the history of its manifest.

Not thread-safe.
"""

import json
import math
import pathlib
from dataclasses import dataclass, field
from typing import Any

from dorad.fleet import manifest as m


@dataclass
class Interval:
    """A version while it is the fleet's."""

    release: m.Release
    begin: float
    """Nobody has seen it before."""
    end: float = math.inf
    """Nobody sees it afterwards."""

    @property
    def label(self) -> tuple[int, str]:
        return self.release.version, self.release.digest


@dataclass
class FleetHistory:
    """All manifests so far, and the versions of each name with their times."""

    path: pathlib.Path
    versions: dict[str, list[Interval]] = field(default_factory=dict)
    gaps: dict[str, list[list[float]]] = field(default_factory=dict)
    """By name: begins and ends of the times when somebody may have seen no version."""
    last_change: float = 0.0
    """When the last version was committed or retired."""
    _offset: int = 0
    _settled: m.Manifest = field(default_factory=m.Manifest)
    _pending: tuple[m.Manifest, float] | None = None
    """A manifest that may be there, and the time just before readers could see it. A process that
    dies leaves it open whether they can."""

    def read(self) -> None:
        """Takes up what was written since the last call."""
        if not self.path.exists():
            return
        with self.path.open("rb") as file:
            file.seek(self._offset)
            data = file.read()
        whole = data[: data.rfind(b"\n") + 1]
        self._offset += len(whole)
        for line in whole.splitlines():
            value = json.loads(line)
            if "done" in value:
                self._settle(value["done"])
                continue
            manifest, at = m.from_json(json.dumps(value["manifest"])), value["at"]
            if self._pending is not None and self._pending[0].generation < manifest.generation:
                self._settle(at)
            self._pending = manifest, at

    def _settle(self, replaced: float) -> None:
        """Adopts the pending manifest. `replaced`: readers see the one before no more."""
        assert self._pending is not None
        (now, begin), self._pending, before = self._pending, None, self._settled
        self._check_step(before, now)
        for name in now.adapters:
            was, new = before.committed().get(name), now.committed().get(name)
            if was == new:
                continue
            self.last_change = begin
            intervals = self.versions.setdefault(name, [])
            if was is not None:
                intervals[-1].end = replaced
            else:  # It had none until now.
                self.gaps.setdefault(name, [[-math.inf, math.inf]])[-1][1] = replaced
            if new is not None:
                intervals.append(Interval(new, begin))
            else:
                self.gaps[name].append([begin, math.inf])
        self._settled = now

    @staticmethod
    def _check_step(before: m.Manifest, now: m.Manifest) -> None:
        """No change of any process takes the manifest back."""
        assert now.generation == before.generation + 1
        for name, old in before.adapters.items():
            new = now.adapters[name]
            assert new.highest >= old.highest
            if new.committed is not None and new.committed != old.committed:
                assert old.prepared is not None
                assert new.committed.version == old.prepared.release.version
                assert old.committed is None or new.committed.version > old.committed.version
                assert new.committed.digest

    # --- Questions --------------------------------------------------------------------------------

    def allowed(self, name: str, began: float, ended: float) -> set[tuple[int, str]]:
        """The versions (number, digest) that were the fleet's at some time between.

        Call `read` after `ended`, or later versions are missing.
        """
        found = {
            interval.label
            for interval in self.versions.get(name, [])
            if interval.begin <= ended and interval.end >= began
        }
        if self._pending is not None and self._pending[1] <= ended:
            release = self._pending[0].committed().get(name)
            if release is not None:
                found.add((release.version, release.digest))
        return found

    def was_without(self, name: str, began: float, ended: float) -> bool:
        """Whether somebody may have seen no version of a name at some time between."""
        if self._pending is not None and name not in self._pending[0].committed():
            return True
        gaps = self.gaps.get(name, [[-math.inf, math.inf]])
        return any(begin <= ended and end >= began for begin, end in gaps)

    def by_tag(self) -> dict[str, list[tuple[str, m.Release]]]:
        """The commits of each publish: (name, release) by its tag "publish"."""
        found: dict[str, list[tuple[str, m.Release]]] = {}
        for name, intervals in self.versions.items():
            for interval in intervals:
                tags: dict[str, Any] = interval.release.options.get("tags", {})
                found.setdefault(tags["publish"], []).append((name, interval.release))
        return found
