"""Whether a sample is of the version that was asked for."""

from __future__ import annotations

from dorad.errors import UnexpectedVersion
from dorad.types import AdapterVersion, Sample


def check_origin(sample: Sample, version: AdapterVersion) -> None:
    """Raises UnexpectedVersion unless exactly this version made every token, to the end."""
    count = len(sample.token_ids)
    made = [(s.adapter, s.version, s.digest, s.begin, s.end) for s in sample.spans]
    whole = (version.name, version.version, version.digest, 0, count)
    if made != [whole] * bool(count):
        raise UnexpectedVersion(
            f"expected {count} tokens of {version.label} {version.digest}, got {sample.spans}"
        )
