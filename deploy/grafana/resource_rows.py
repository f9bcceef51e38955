"""Rows on what requests need: adapters, caches and memory, in the order in which they appear."""

from panel import Panel
from queries import RATE, quantiles, rate, series, total

RESOURCE_ROWS = [
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
