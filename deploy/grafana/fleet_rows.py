"""The dashboard's row of a fleet: what its members have, and what they send each other."""

from panel import Panel
from queries import rate, series, total

NUMBERS = series("dorad_adapter_active_version_numbers")
CHECKSUMS = series("dorad_adapter_active_checksum")

FLEET_ROWS = [
    (
        "Fleet",
        [
            Panel(
                "Versions behind",
                "short",
                [
                    (
                        f"max by (job) ({NUMBERS}) - on (job) group_right () {NUMBERS}",
                        "{{instance}}",
                    )
                ],
                "By how many numbers of active versions, over all adapters, a server is behind the "
                "one that is ahead.",
            ),
            Panel(
                "Sets of active versions",
                "short",
                [
                    (f'count(count_values("checksum", {CHECKSUMS}))', "different sets"),
                    (f"count({CHECKSUMS})", "servers"),
                ],
                "A fleet has one set, and two while it goes from one version to the next.",
            ),
            Panel(
                "Ready and not active",
                "short",
                [(total("dorad_adapter_unactivated_versions", "instance"), "{{instance}}")],
                "Versions above the active one of their name: prepared, not committed yet.",
            ),
            Panel(
                "Bytes between servers",
                "bytes",
                [(rate("dorad_peer_bytes_total", "direction"), "{{direction}} a second")],
                "Of adapters, which members pass on to each other.",
            ),
            Panel(
                "Bytes sent by server",
                "bytes",
                [
                    (
                        rate("dorad_peer_bytes_total", "instance", 'direction="sent"'),
                        "{{instance}} a second",
                    )
                ],
                "At most two others fetch a version from the same server during a publish.",
            ),
        ],
    ),
]
