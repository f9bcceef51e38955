"""Runs a plan in several processes, because an event loop uses one core only."""

from __future__ import annotations

import asyncio
import multiprocessing
import queue
import threading
import time
from typing import Any

from dorad.errors import Internal
from dorad.load.drive import Counts, Show, drive, run
from dorad.load.plan import Plan
from dorad.load.report import summarise
from dorad.load.target import Target

_START_SECONDS = 120.0


def run_processes(
    target: Target,
    plan: Plan,
    processes: int,
    *,
    connections: int = 1,
    show: Show | None = None,
) -> dict[str, Any]:
    """Like `run`, in several processes that begin together. Each has `connections`.

    Raises ValueError for a plan that cannot be split, Internal when a process died, and the errors
    of `run`.
    """
    for what, count in (("requests", plan.requests), ("concurrency", plan.concurrency)):
        if count is not None and count < processes:
            raise ValueError(f"{what} must be at least the {processes} processes, not {count}")
    if processes == 1:
        return asyncio.run(run(target, plan, connections=connections, show=show))
    # Not fork, which breaks gRPC's threads.
    context = multiprocessing.get_context("spawn")
    barrier = context.Barrier(processes)
    results: Any = context.Queue()
    workers = [
        context.Process(
            target=_work,
            args=(
                i,
                target,
                part,
                connections,
                show is not None,
                barrier,
                results,
            ),
            daemon=True,
        )
        for i, part in enumerate(plan.split(processes))
    ]
    try:
        for worker in workers:
            worker.start()
        return summarise(plan, _collect(workers, results, show))
    finally:
        for worker in workers:
            if worker.is_alive():
                worker.terminate()
        for worker in workers:
            if worker.pid is not None:
                worker.join()


def _collect(workers: list[Any], results: Any, show: Show | None) -> list[Any]:
    outcomes: dict[int, Any] = {}
    counts: dict[int, Counts] = {}
    while len(outcomes) < len(workers):
        try:
            number, item = results.get(timeout=1.0)
        except queue.Empty:
            dead = [i for i, w in enumerate(workers) if w.exitcode is not None]
            if set(dead) - set(outcomes):
                # A result may arrive just after the process has ended.
                time.sleep(0.1)
                if results.empty():
                    message = f"load processes {dead} ended without a result"
                    raise Internal(message, code="INTERNAL") from None
            continue
        if isinstance(item, BaseException):
            raise item
        if isinstance(item, Counts):
            counts[number] = item
            if show is not None:
                show(sum(counts.values(), Counts()))
        else:
            outcomes[number] = item
    return list(outcomes.values())


def _work(
    number: int,
    target: Target,
    plan: Plan,
    connections: int,
    shows: bool,
    barrier: Any,
    results: Any,
) -> None:
    def show(counts: Counts) -> None:
        results.put((number, counts))

    try:
        outcome = asyncio.run(
            drive(
                target,
                plan,
                connections=connections,
                show=show if shows else None,
                ready=lambda: barrier.wait(_START_SECONDS),
            )
        )
        results.put((number, outcome))
    except KeyboardInterrupt:
        pass  # The parent gets it, too.
    except threading.BrokenBarrierError:
        pass  # Another process failed and reports why.
    except Exception as error:
        results.put((number, error))
        barrier.abort()
