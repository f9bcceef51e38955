"""Rows on requests and the steps that serve them, in the order in which they appear."""

from panel import Panel, stat
from queries import ON, RATE, mean, quantiles, rate, series, total

REQUEST_ROWS = [
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
]
