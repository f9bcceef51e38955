#!/usr/bin/env python3
"""Writes dorad.json, the Grafana dashboard: `python3 deploy/grafana/make_dashboard.py`.

Panels are listed here in the order in which they appear; a test keeps the JSON equal to what this
makes. Panels of `gpu` have no data on a server without a GPU, and their titles say so.
"""

import json
import sys
from dataclasses import dataclass, field
from pathlib import Path

OUTPUT = Path(__file__).with_name("dorad.json")
ON = 'job=~"$job",instance=~"$instance"'
RATE = "$__rate_interval"
GPU_MARK = " (GPU)"
COLUMNS = 24


def series(name: str, labels: str = "") -> str:
    return f"{name}{{{ON}{',' + labels if labels else ''}}}"


def rate(name: str, by: str = "", labels: str = "") -> str:
    """Of a counter, a second; summed over all servers that are chosen."""
    inner = f"rate({series(name, labels)}[{RATE}])"
    return f"sum by ({by}) ({inner})" if by else f"sum({inner})"


def total(name: str, by: str = "", labels: str = "") -> str:
    return f"sum by ({by}) ({series(name, labels)})" if by else f"sum({series(name, labels)})"


def mean(name: str, by: str = "") -> str:
    """Of a histogram's observations."""
    return f"{rate(name + '_sum', by)} / {rate(name + '_count', by)}"


def quantiles(name: str, by: str = "", labels: str = "", of=(0.5, 0.9, 0.99)) -> list:
    legend = f"{{{{{by}}}}} " if by else ""
    buckets = rate(name + "_bucket", f"{by}, le" if by else "le", labels)
    return [
        (
            f"histogram_quantile({q}, {buckets})",
            f"{legend}p{q * 100:g}",
        )
        for q in of
    ]


@dataclass
class Panel:
    title: str
    unit: str
    targets: list  # (expression, legend)
    about: str
    stacked: bool = False
    gpu: bool = False
    kind: str = "timeseries"
    width: int = 8
    extra: dict = field(default_factory=dict)


def stat(title: str, unit: str, expression: str, about: str) -> Panel:
    return Panel(title, unit, [(expression, "")], about, kind="stat", width=4)


ROWS = [
    (
        "Overview",
        [
            stat("Servers up", "short", f"sum(up{{{ON}}})", "Servers that answer scrapes."),
            stat("Generated tokens", "short", rate("dorad_generated_tokens_total"), "A second."),
            stat(
                "Running sequences",
                "short",
                total("dorad_engine_running_sequences"),
                "Sequences being computed.",
            ),
            stat(
                "Queued requests",
                "short",
                total("dorad_engine_queued_requests"),
                "Requests that wait for their first step.",
            ),
            stat(
                "Failed requests",
                "percentunit",
                f"({rate('dorad_requests_failed_total')} or vector(0)) "
                f"/ {rate('dorad_requests_ended_total')}",
                "Share of the requests that ended with an error, callers' deadlines and "
                "cancellations included.",
            ),
            stat(
                "Adapter versions",
                "short",
                total("dorad_adapter_versions", labels='state="ready"'),
                "Versions that requests can name.",
            ),
        ],
    ),
    (
        "Latency",
        [
            Panel(
                "Time to first token",
                "s",
                quantiles("dorad_time_to_first_token_seconds"),
                "From admission to a request's first token, the queue included.",
            ),
            Panel(
                "Inter-token latency",
                "s",
                quantiles("dorad_inter_token_latency_seconds"),
                "Between two consecutive tokens of a sample.",
            ),
            Panel(
                "End-to-end latency",
                "s",
                quantiles("dorad_request_duration_seconds", "kind", of=(0.5, 0.99)),
                "From admission to the end of a request.",
            ),
            Panel(
                "Queue time",
                "s",
                quantiles("dorad_request_queue_seconds"),
                "From admission to the first step, or to the end of a request that never had one.",
            ),
            Panel(
                "RPC handling time",
                "s",
                quantiles("dorad_rpc_handling_seconds", "method", of=(0.99,)),
                "From start to end of a call; a stream's is as long as the stream.",
            ),
            Panel(
                "RPCs by code",
                "reqps",
                [(rate("dorad_rpc_handled_total", "code"), "{{code}}")],
                "Calls that ended, by gRPC code.",
                stacked=True,
            ),
        ],
    ),
    (
        "Throughput",
        [
            Panel(
                "Tokens",
                "short",
                [
                    (rate("dorad_prompt_tokens_total", "source"), "prompt, {{source}}"),
                    (rate("dorad_generated_tokens_total"), "generated"),
                    (rate("dorad_scored_tokens_total"), "scored"),
                ],
                "Tokens a second. Cached prompt tokens cost no computing.",
                stacked=True,
            ),
            Panel(
                "Requests",
                "reqps",
                [
                    (rate("dorad_requests_admitted_total", "kind"), "{{kind}} admitted"),
                    (rate("dorad_requests_refused_total", "reason"), "refused, {{reason}}"),
                ],
                "Requests a second that the engine took, and that were refused before the queue.",
            ),
            Panel(
                "Failures by reason",
                "reqps",
                [(rate("dorad_requests_failed_total", "reason"), "{{reason}}")],
                "Accepted requests that ended with an error, by reason (docs/reference/errors.md).",
                stacked=True,
            ),
            Panel(
                "Samples by finish reason",
                "short",
                [(rate("dorad_samples_ended_total", "finish_reason"), "{{finish_reason}}")],
                "Samples a second that ended.",
                stacked=True,
            ),
            Panel(
                "Tokens by adapter",
                "short",
                [(f"topk(20, {rate('dorad_adapter_tokens_total', 'adapter')})", "{{adapter}}")],
                "Tokens a second of the busiest adapters (metrics.top_adapters), counted when "
                "requests end.",
                stacked=True,
            ),
            Panel(
                "Requests by adapter",
                "reqps",
                [(f"topk(20, {rate('dorad_adapter_requests_total', 'adapter')})", "{{adapter}}")],
                "Requests a second that ended, by adapter.",
                stacked=True,
            ),
        ],
    ),
    (
        "Batch and steps",
        [
            Panel(
                "Batch and queue",
                "short",
                [
                    (total("dorad_engine_running_sequences"), "running sequences"),
                    (total("dorad_engine_waiting_sequences"), "waiting sequences"),
                    (total("dorad_engine_queued_requests"), "queued requests"),
                    (total("dorad_engine_requests"), "requests"),
                    (total("dorad_engine_frozen_requests"), "frozen requests"),
                ],
                "Running and waiting sequences, and requests that wait for their first step. All "
                "requests that have not ended, and those frozen by a pause of an adapter.",
            ),
            Panel(
                "Tokens in a step",
                "short",
                [
                    (mean("dorad_engine_step_rows", "phase"), "{{phase}}, mean"),
                    *quantiles("dorad_engine_step_tokens", of=(0.99,)),
                ],
                "Rows of one forward pass, of steps that have any of the phase.",
            ),
            Panel(
                "Adapters in a step",
                "short",
                [
                    (mean("dorad_engine_step_adapters"), "mean"),
                    *quantiles("dorad_engine_step_adapters", of=(0.99,)),
                    (total("dorad_adapters_in_use", "state"), "{{state}}"),
                ],
                "Distinct versions that share a step, and adapters that requests run with or "
                "wait for.",
            ),
            Panel(
                "Step time",
                "s",
                quantiles("dorad_engine_step_seconds"),
                "One forward pass and its sampling.",
            ),
            Panel(
                "Step time split",
                "percentunit",
                [
                    (
                        f"avg by (phase) (rate({series('dorad_engine_step_phase_seconds_total')}"
                        f"[{RATE}]))",
                        "{{phase}}",
                    )
                ],
                "Share of the wall clock that the engine's thread spends on scheduling, launching, "
                "computing (on a GPU: waiting for it) and processing results. The rest to 100 % "
                "is idle.",
                stacked=True,
            ),
            Panel(
                "Time given to others",
                "percentunit",
                [
                    (f"avg({series('dorad_engine_gpu_share')})", "share that steps may take"),
                    (
                        f"avg(rate({series('dorad_engine_throttled_seconds_total')}[{RATE}]))",
                        "held back",
                    ),
                ],
                "engine.gpu_share and LimitGpuShare: the most that steps may take, and the time in "
                "which steps were held back for it.",
            ),
        ],
    ),
    (
        "Adapters",
        [
            Panel(
                "Versions",
                "short",
                [
                    (total("dorad_adapter_versions", "state"), "{{state}}"),
                    (total("dorad_adapter_evicted_versions"), "away"),
                    (total("dorad_adapter_leases"), "leases"),
                ],
                "Versions held by state, those whose weights are not resident, and leases of "
                "requests.",
            ),
            Panel(
                "Load time by stage",
                "s",
                [
                    (
                        rate("dorad_adapter_load_seconds_sum", "stage", 'stage!="total"')
                        + " / on () group_left () "
                        + rate("dorad_adapter_load_seconds_count", labels='stage="total"'),
                        "{{stage}}",
                    )
                ],
                "Mean time of a load, stages stacked: queue, read, validate, copy, norms, store, "
                "activate. A load without a stage counts as 0 there, so that the stages add up.",
                stacked=True,
            ),
            Panel(
                "Loads and swaps",
                "short",
                [
                    (rate("dorad_adapter_loads_total") + " * 60", "loads"),
                    (rate("dorad_adapter_generation") + " * 60", "registry changes"),
                    (rate("dorad_engine_version_switches_total") + " * 60", "requests switched"),
                ],
                "A minute: versions loaded, changes of the registry's generation, and requests "
                "that switched to a new version in flight.",
            ),
            Panel(
                "Load failures",
                "short",
                [(rate("dorad_adapter_load_failures_total", "reason") + " * 60", "{{reason}}")],
                "A minute, by reason.",
                stacked=True,
            ),
            Panel(
                "Evictions and recalls",
                "short",
                [
                    (rate("dorad_adapter_evictions_total") + " * 60", "evictions"),
                    (
                        rate("dorad_adapter_reloads_total", "from") + " * 60",
                        "reloads from {{from}}",
                    ),
                ],
                "A minute: evictions and reloads of adapter weights.",
            ),
            Panel(
                "Swap stalls",
                "s",
                [
                    (rate("dorad_adapter_stall_seconds_sum"), "lost a second, all sequences"),
                    *quantiles("dorad_adapter_stall_seconds", of=(0.5, 0.99)),
                ],
                "Time that sequences waited for evicted weights: a second of the wall clock, and "
                "for one sequence.",
            ),
            Panel(
                "Generation",
                "short",
                [(f"max by (instance) ({series('dorad_adapter_generation')})", "{{instance}}")],
                "Rises with each change of the registry.",
            ),
            Panel(
                "Adapter memory",
                "bytes",
                [
                    (total("dorad_adapter_resident_bytes"), "resident"),
                    (total("dorad_adapter_host_bytes"), "host copies"),
                    (total("dorad_adapter_idle_upload_bytes"), "broken uploads"),
                    (total("dorad_shared_memory_bytes"), "registered"),
                    (total("dorad_shared_weight_bytes"), "leased weights"),
                ],
                "Weights where they are used, their copies in host memory, and memory of others.",
            ),
            Panel(
                "Store",
                "bytes",
                [
                    (total("dorad_store_object_bytes"), "objects"),
                    (total("dorad_store_journal_bytes"), "journal"),
                ],
                "Durable adapters on the disk.",
            ),
            Panel(
                "Journal appends",
                "s",
                [
                    (
                        f"{rate('dorad_store_append_seconds_total')} "
                        f"/ {rate('dorad_store_appends_total')}",
                        "mean of an append",
                    )
                ],
                "The disk's part of a change of the registry.",
            ),
        ],
    ),
    (
        "KV and prefix cache",
        [
            Panel(
                "KV pages",
                "short",
                [
                    (total("dorad_kv_pages_used"), "used"),
                    (total("dorad_kv_pages_cached"), "cached"),
                    (total("dorad_kv_pages_released"), "released"),
                    (
                        f"{total('dorad_kv_pages_capacity')} - {total('dorad_kv_pages_used')} "
                        f"- {total('dorad_kv_pages_cached')} - {total('dorad_kv_pages_released')}",
                        "free",
                    ),
                ],
                "Pages held by sequences, kept for prefixes (available), released to others, and "
                "free.",
                stacked=True,
            ),
            Panel(
                "Prefix cache hits",
                "percentunit",
                [
                    (
                        f"{rate('dorad_prefix_cache_hit_tokens_total')} "
                        f"/ {rate('dorad_prefix_cache_queried_tokens_total')}",
                        "of the prompt tokens",
                    )
                ],
                "Share of prompt tokens that were found and not computed.",
            ),
            Panel(
                "Preemptions",
                "short",
                [(rate("dorad_engine_preemptions_total"), "sequences")],
                "Sequences a second that were put back into the queue to free pages.",
            ),
        ],
    ),
    (
        "Memory",
        [
            Panel(
                "Server's memory by kind",
                "bytes",
                [(total("dorad_memory_bytes", "kind"), "{{kind}}")],
                "The server's memory, on a GPU or in RAM.",
                stacked=True,
            ),
            Panel(
                "GPU memory: server and others",
                "bytes",
                [
                    (
                        f"sum({series('dorad_memory_bytes')} "
                        f"and on (job, instance) {series('dorad_device_memory_bytes')} > 0)",
                        "this server",
                    ),
                    (
                        f"sum({series('dorad_device_memory_pooled_bytes')} "
                        f"and on (job, instance) {series('dorad_device_memory_bytes')} > 0)",
                        "pooled by this server",
                    ),
                    (
                        f"sum({series('dorad_device_memory_others_bytes')} "
                        f"and on (job, instance) {series('dorad_device_memory_bytes')} > 0)",
                        "other processes and contexts",
                    ),
                    (
                        f"sum({series('dorad_device_memory_free_bytes')} "
                        f"and on (job, instance) {series('dorad_device_memory_bytes')} > 0)",
                        "free",
                    ),
                ],
                "How the GPU's memory is split between this server and the rest.",
                stacked=True,
                gpu=True,
            ),
            Panel(
                "Memory limit in use",
                "percentunit",
                [
                    (
                        f"sum by (instance) ({series('dorad_memory_bytes')}) "
                        f"/ sum by (instance) ({series('dorad_memory_limit_bytes')} > 0)",
                        "{{instance}}",
                    )
                ],
                "Of memory.vram_limit.",
                gpu=True,
            ),
            Panel(
                "Refused and released",
                "short",
                [
                    (
                        f"sum by (by) (increase({series('dorad_memory_refusals_total')}[{RATE}]) "
                        f"and on (job, instance) {series('dorad_device_memory_bytes')} > 0)",
                        "refused by {{by}}",
                    ),
                    (
                        f"sum by (from) (increase({series('dorad_memory_released_bytes_total')}"
                        f"[{RATE}])) / 1048576",
                        "MiB released from {{from}}",
                    ),
                    (
                        f"sum(increase({series('dorad_kv_grown_bytes_total')}[{RATE}]) "
                        f"and on (job, instance) {series('dorad_device_memory_bytes')} > 0) "
                        "/ 1048576",
                        "MiB grown by the KV cache",
                    ),
                ],
                "Allocations that were refused at first (some succeeded after the eviction of idle "
                "adapters), memory released for other processes.",
                gpu=True,
            ),
            Panel(
                "Asleep, paused",
                "short",
                [
                    (f"max by (tag) ({series('dorad_sleeping')})", "{{tag}} asleep"),
                    (f"max({series('dorad_engine_paused')})", "paused"),
                    (total("dorad_engine_paused_adapters"), "pauses of adapters"),
                ],
                "1 while the part sleeps (Sleep) or the engine is paused (Pause); the number of "
                "pauses of adapters in force.",
            ),
            Panel(
                "Process",
                "short",
                [
                    (f"sum(rate({series('process_cpu_seconds_total')}[{RATE}]))", "cores"),
                    (
                        f"max({series('process_open_fds')} / {series('process_max_fds')})",
                        "share of descriptors open",
                    ),
                ],
                "CPU cores in use, and the share of file descriptors.",
            ),
            Panel(
                "Resident memory of the process",
                "bytes",
                [
                    (
                        f"sum by (instance) ({series('process_resident_memory_bytes')})",
                        "{{instance}}",
                    )
                ],
                "RAM, the base weights on a CPU included.",
            ),
        ],
    ),
]


def field_config(panel: Panel) -> dict:
    custom = {"fillOpacity": 25 if panel.stacked else 0, "showPoints": "never"}
    if panel.stacked:
        custom["stacking"] = {"mode": "normal", "group": "A"}
    defaults = {"unit": panel.unit, "min": 0}
    if panel.kind == "timeseries":
        defaults["custom"] = custom
    return {"defaults": defaults, "overrides": []}


def panel_json(panel: Panel, number: int, x: int, y: int, height: int) -> dict:
    source = {"type": "prometheus", "uid": "${datasource}"}
    about = panel.about + (" Needs a GPU: without one there is no data." if panel.gpu else "")
    options = (
        {"reduceOptions": {"calcs": ["lastNotNull"]}, "colorMode": "value", "graphMode": "area"}
        if panel.kind == "stat"
        else {
            "legend": {"displayMode": "list", "placement": "bottom"},
            "tooltip": {"mode": "multi", "sort": "desc"},
        }
    )
    return {
        "id": number,
        "type": panel.kind,
        "title": panel.title + (GPU_MARK if panel.gpu else ""),
        "description": about,
        "datasource": source,
        "gridPos": {"x": x, "y": y, "w": panel.width, "h": height},
        "fieldConfig": field_config(panel),
        "options": options,
        "targets": [
            {
                "refId": chr(ord("A") + i),
                "datasource": source,
                "expr": expression,
                "legendFormat": legend,
            }
            for i, (expression, legend) in enumerate(panel.targets)
        ],
    }


def panels() -> list[dict]:
    made: list[dict] = []
    y = 0
    for title, row in ROWS:
        made.append(
            {
                "id": len(made) + 1,
                "type": "row",
                "title": title,
                "collapsed": False,
                "gridPos": {"x": 0, "y": y, "w": COLUMNS, "h": 1},
                "panels": [],
            }
        )
        y += 1
        x = 0
        height = 4 if row[0].kind == "stat" else 8
        for panel in row:
            if x + panel.width > COLUMNS:
                x, y = 0, y + height
            made.append(panel_json(panel, len(made) + 1, x, y, height))
            x += panel.width
        y += height
    return made


def label_variable(name: str, query: str) -> dict:
    """Without an allValue: "All" means the jobs that the query lists, not every job of
    Prometheus."""
    return {
        "name": name,
        "type": "query",
        "datasource": {"type": "prometheus", "uid": "${datasource}"},
        "definition": query,
        "query": {"query": query, "refId": f"variable-{name}"},
        "refresh": 2,
        "multi": True,
        "includeAll": True,
        "current": {"selected": True, "text": ["All"], "value": ["$__all"]},
        "sort": 1,
    }


def dashboard() -> dict:
    return {
        "uid": "dorad",
        "title": "dorad",
        "description": "A server of many DoRA adapters over one model; docs/guides/monitoring.md.",
        "tags": ["dorad", "llm"],
        "schemaVersion": 39,
        "version": 1,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "timezone": "browser",
        "templating": {
            "list": [
                {
                    "name": "datasource",
                    "type": "datasource",
                    "query": "prometheus",
                    "label": "Data source",
                    "current": {},
                },
                label_variable("job", "label_values(dorad_build_info, job)"),
                label_variable("instance", 'label_values(dorad_build_info{job=~"$job"}, instance)'),
            ]
        },
        "annotations": {"list": []},
        "links": [],
        "panels": panels(),
    }


def text() -> str:
    return json.dumps(dashboard(), indent=1) + "\n"


if __name__ == "__main__":
    OUTPUT.write_text(text())
    sys.exit(0)
