"""What the registry of a server must say after any sequence of operations: a plain model of it.

An operation's method returns the expected outcome: a result, or the reason of a refusal. The model
knows who may hold leases only from what its user tells it.
"""

from dataclasses import dataclass, field

READY, RETIRING, FAILED = "READY", "RETIRING", "FAILED"


@dataclass
class Version:
    content: int
    durable: bool
    state: str = READY


@dataclass
class Name:
    versions: dict[int, Version] = field(default_factory=dict)
    last: int = 0
    active: int = 0


class RegistryModel:
    def __init__(self) -> None:
        self.names: dict[str, Name] = {}

    def name(self, name: str) -> Name:
        return self.names.get(name, Name())

    def version(self, name: str, number: int) -> Version | None:
        return self.name(name).versions.get(number)

    def ready(self, name: str) -> list[int]:
        versions = self.name(name).versions
        return [number for number, version in versions.items() if version.state == READY]

    # --- Operations: the reason of a refusal, or "".

    def publish(self, name: str, number: int | None, content: int, durable: bool, activate: bool):
        """(version, reason). content < 0: one that the server must refuse."""
        entry = self.names.setdefault(name, Name())
        number = entry.last + 1 if number is None else number
        if number <= entry.last:
            return 0, "ADAPTER_VERSION_TAKEN"
        entry.last = number
        if content < 0:
            entry.versions[number] = Version(content, False, FAILED)
            return 0, "refused"
        entry.versions[number] = Version(content, durable)
        if activate:
            entry.active = number
        return number, ""

    def _usable(self, name: str, number: int) -> str:
        version = self.version(name, number)
        if version is None:
            return "ADAPTER_NOT_FOUND"
        return "" if version.state == READY else "ADAPTER_NOT_READY"

    def activate(self, name: str, number: int, generation_is_right: bool) -> str:
        reason = self._usable(name, number)
        if not reason and not generation_is_right:
            return "GENERATION_MISMATCH"
        if not reason:
            self.names[name].active = number
        return reason

    def retire(self, name: str, number: int) -> str:
        reason = self._usable(name, number)
        if not reason:
            entry = self.names[name]
            entry.versions[number].state = RETIRING
            if entry.active == number:
                entry.active = 0
        return reason

    def resolve(self, name: str, number: int) -> tuple[int, str]:
        """The version that a request gets; number 0 is the active one."""
        if number:
            return number, self._usable(name, number)
        entry = self.name(name)
        if not entry.versions:
            return 0, "ADAPTER_NOT_FOUND"
        return entry.active, "" if entry.active else "ADAPTER_NO_ACTIVE_VERSION"

    def restart(self) -> None:
        """Durable versions that were not retired come back; numbers are never used again."""
        for entry in self.names.values():
            entry.versions = {
                number: version
                for number, version in entry.versions.items()
                if version.durable and version.state == READY
            }
            if entry.active not in entry.versions:
                entry.active = 0
