"""The dashboard's row of endpoint pickers: what they choose, and what they know of the servers."""

from panel import Panel
from queries import rate, series


def _of_server(name: str) -> list:
    """The largest value of several pickers."""
    return [(f"max by (server) ({series(name)})", "{{server}}")]


PICKER_ROWS = [
    (
        "Endpoint picker",
        [
            Panel(
                "Picker: requests",
                "reqps",
                [(rate("dorad_picker_requests_total", "outcome"), "{{outcome}}")],
                "By what became of them. no_server: 503; body_too_long: 413; ended: by the proxy, "
                "before the choice.",
            ),
            Panel(
                "Picker: reasons",
                "reqps",
                [(rate("dorad_picker_picks_total", "reason"), "{{reason}}")],
                "home: the pod has the beginning of the prompt. version, full, bound: why another "
                "one was chosen. least: nothing to choose by but the load.",
            ),
            Panel(
                "Picker: servers that are ready",
                "short",
                [(f"min by (server) ({series('dorad_picker_server_ready')})", "{{server}}")],
                "0 while a picker sends no requests to the server.",
            ),
            Panel(
                "Picker: load",
                "short",
                _of_server("dorad_picker_server_load"),
                "Sequences and waiting requests of each server, of all callers.",
            ),
            Panel(
                "Picker: KV in use",
                "percentunit",
                _of_server("dorad_picker_server_kv_use"),
                "Above 90 % a server gets requests only if all are that full.",
            ),
            Panel(
                "Picker: versions behind, age",
                "short",
                [
                    *_of_server("dorad_picker_server_versions_behind"),
                    (f"max({series('dorad_picker_look_age_seconds')})", "seconds since a look"),
                ],
                "Versions of the fleet that a server lacks, and how old a picker's knowledge is.",
            ),
        ],
    ),
]
