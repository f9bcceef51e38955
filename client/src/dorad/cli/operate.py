"""Commands that operate a server: `doractl info`, `health`, `pause`, `resume`, `sleep`, `wake`,
`limit-gpu-share`, `end-gpu-share-limit` and `abort`."""

from __future__ import annotations

import enum
from typing import Annotated

import typer
from rich.table import Table

import dorad
from dorad.cli.common import (
    Output,
    OutputOption,
    console,
    size,
)
from dorad.cli.server import Server, on_server


def _context(model: dorad.ModelInfo) -> str:
    whole = model.whole_context_length
    if whole <= model.context_length:
        return f"{model.context_length} tokens"
    needed = f"engine.kv_bytes: {model.whole_context_kv_bytes}"
    return f"{model.context_length} of {whole} tokens ({needed} serves them all)"


def _page(engine: dorad.EngineInfo) -> str:
    tokens = f"{engine.kv_page_tokens} tokens each"
    groups = engine.kv_layer_groups
    if groups > 1:
        tokens = f"{tokens}, in one of {groups} groups of layers"
    return f"{tokens}, {engine.kv_dtype}" if engine.kv_dtype else tokens


def _facts(info: dorad.ServerInfo) -> Table:
    engine, model = info.engine, info.model
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="bold")
    grid.add_column(overflow="fold")
    pages = f"{engine.kv_pages_used} used, {engine.kv_pages_cached} cached"
    rows = {
        "server": f"dorad {info.version} on {info.device}, up {duration(info.uptime)}",
        "model": f"{model.name} ({model.model_type})",
        "parameters": f"{model.num_parameters / 1e6:.1f} M",
        "digest": model.digest,
        "shape": f"{model.num_layers} layers, hidden {model.hidden_size}, vocab {model.vocab_size}",
        "context": f"{_context(model)}, computed in {model.compute_dtype}",
        "running": f"{engine.running_sequences} sequences, {engine.queued_requests} queued",
        "KV pages": f"{pages} of {engine.kv_pages_total} ({_page(engine)})",
        "engine": ", ".join(
            ["paused" if engine.paused else "running", f"{engine.steps} steps"]
            + ([f"asleep: {' '.join(engine.sleeping)}"] if engine.sleeping else [])
            + ([f"{engine.gpu_share:.0%} of the time"] if engine.gpu_share < 1 else [])
            + (["deterministic"] if engine.deterministic else [])
        ),
        "memory": ", ".join(f"{k} {size(v)}" for k, v in sorted(info.memory_bytes.items())),
        "limits": f"{info.limits.max_tokens} tokens, n {info.limits.max_n}, "
        f"rank {info.limits.max_adapter_rank}, queue {info.limits.max_queued_requests} requests",
        "adapters": f"generation {info.generation}, {engine.adapter_leases} leases",
    }
    for name, value in rows.items():
        grid.add_row(name, value)
    return grid


def duration(seconds: float) -> str:
    """1d 2h, 3m 4s, 5.6s."""
    if seconds < 60:
        return f"{seconds:.1f}s"
    minutes, left = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days}d {hours}h"
    return f"{hours}h {minutes}m" if hours else f"{minutes}m {left}s"


@on_server()
def info(server: Server, output: OutputOption = Output.TABLE) -> None:
    """Show the server's model, state, memory and limits."""
    with server.connect() as client:
        found = client.info()
    output.show(found, lambda: console().print(_facts(found)))


@on_server(admin=False, timeout=5.0, retries=False)
def health(
    server: Server,
    service: Annotated[
        str, typer.Argument(help="Full service name. Default: the whole server.")
    ] = "",
    output: OutputOption = Output.TABLE,
) -> None:
    """Check whether the server is serving. The exit code is 69 if it is not."""
    with server.connect() as client:
        status = client.health(service, timeout=server.timeout)
    output.show({"service": service, "status": status}, lambda: print(status))
    if status != "serving":
        raise typer.Exit(69)


class PauseMode(enum.StrEnum):
    """Treatment of running requests."""

    KEEP = "keep"
    WAIT = "wait"
    ABORT = "abort"


@on_server()
def pause(
    server: Server,
    mode: Annotated[
        PauseMode,
        typer.Option(
            help="Running requests. keep: freeze them; wait: let them finish; abort: end them now."
        ),
    ] = PauseMode.KEEP,
    adapter: Annotated[
        str, typer.Option("--adapter", "-a", help='Only requests of "name" or "name@version".')
    ] = "",
    output: OutputOption = Output.TABLE,
) -> None:
    """Stop all requests, or those of one adapter, until `doractl resume`."""
    with server.connect() as client:
        affected = client.pause(mode.value, adapter=adapter or None)
    what = f"paused {adapter}" if adapter else "paused"
    told = f"{what} ({mode.value}); {affected} requests affected"
    output.show({"affected": affected}, lambda: print(told))


@on_server()
def resume(
    server: Server,
    adapter: Annotated[str, typer.Option("--adapter", "-a", help="Resume this adapter only.")] = "",
    output: OutputOption = Output.TABLE,
) -> None:
    """Undo `doractl pause`, for all requests or for one adapter."""
    with server.connect() as client:
        client.resume(adapter or None)
    output.show({"resumed": True}, lambda: print("resumed"))


class Tag(enum.StrEnum):
    """Memory that can sleep."""

    WEIGHTS = "weights"
    KV = "kv"
    ADAPTERS = "adapters"


TagsArgument = Annotated[list[Tag] | None, typer.Argument(help="Memory to release. Default: all.")]


@on_server()
def sleep(
    server: Server,
    tags: TagsArgument = None,
    keep_kv: Annotated[
        bool, typer.Option("--keep-kv", help="Save the KV cache in host memory.")
    ] = False,
    refuse: Annotated[
        bool, typer.Option("--refuse", help="Refuse new requests. Default: they wait.")
    ] = False,
    output: OutputOption = Output.TABLE,
) -> None:
    """Release device memory to other programs until `doractl wake`."""
    with server.connect() as client:
        freed = client.sleep(
            *[tag.value for tag in tags or []], keep_kv=keep_kv, refuse_requests=refuse
        )
    told = "asleep; " + (", ".join(f"{k} {size(v)}" for k, v in sorted(freed.items())))
    output.show({"freed_bytes": freed}, lambda: print(told))


@on_server()
def wake(
    server: Server,
    tags: TagsArgument = None,
    output: OutputOption = Output.TABLE,
) -> None:
    """Undo `doractl sleep`."""
    with server.connect() as client:
        client.wake(*[tag.value for tag in tags or []])
        left = client.info().engine.sleeping
    told = f"asleep: {' '.join(left)}" if left else "awake"
    output.show({"sleeping": left}, lambda: print(told))


LimitIdOption = Annotated[str, typer.Option("--id", help="Identifier of the limit.")]


@on_server()
def limit_gpu_share(
    server: Server,
    share: Annotated[
        float, typer.Argument(help="Maximum share of time for the server's steps, 0.01 to 1.")
    ],
    time_to_live: Annotated[
        float, typer.Option("--for", help="Seconds until the limit ends by itself.")
    ] = 600.0,
    limit_id: LimitIdOption = "doractl",
    output: OutputOption = Output.TABLE,
) -> None:
    """Leave part of the GPU's time to other programs until `doractl end-gpu-share-limit`."""
    with server.connect() as client:
        in_effect = client.limit_gpu_share(share, time_to_live=time_to_live, limit_id=limit_id)
    told = f"steps take at most {in_effect:.0%} of the time"
    output.show({"gpu_share": in_effect}, lambda: print(told))


@on_server()
def end_gpu_share_limit(
    server: Server,
    limit_id: LimitIdOption = "doractl",
    output: OutputOption = Output.TABLE,
) -> None:
    """Undo `doractl limit-gpu-share`."""
    with server.connect() as client:
        ended = client.end_gpu_share_limit(limit_id)
        left = client.info().engine.gpu_share
    what = "ended" if ended else f"no limit {limit_id}"
    share = "all the time" if left == 1 else f"at most {left:.0%} of the time"
    output.show({"ended": ended, "gpu_share": left}, lambda: print(f"{what}; steps take {share}"))


@on_server(admin=False)
def abort(
    server: Server,
    request_ids: Annotated[list[str] | None, typer.Argument(help="Request ids.")] = None,
    adapter: Annotated[
        str, typer.Option("--adapter", "-a", help='Requests of "name" or "name@version".')
    ] = "",
    all_requests: Annotated[bool, typer.Option("--all", help="Every request.")] = False,
    output: OutputOption = Output.TABLE,
) -> None:
    """Abort requests. Their callers get the tokens so far."""
    if bool(request_ids) + bool(adapter) + all_requests != 1:
        raise typer.BadParameter("give ids, --adapter or --all", param_hint="REQUEST_IDS")
    with server.connect() as client:
        ended = client.abort(request_ids or None, adapter=adapter or None, all=all_requests)
    output.show({"aborted": ended}, lambda: print(f"{ended} requests aborted"))
