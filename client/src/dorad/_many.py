"""Many prompts at once: what they are, and worker threads for them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import contextmanager
from typing import Any

from dorad import types as t
from dorad._channel import check_concurrency
from dorad.errors import DoradError


def as_requests(
    requests: Iterable[t.TokenIds | t.GenerateRequest], options: t.GenerateOptions
) -> list[t.GenerateRequest]:
    """Bare token ids take `options`."""
    return [
        r if isinstance(r, t.GenerateRequest) else t.GenerateRequest(r, **options) for r in requests
    ]


class RunningCalls:
    """The gRPC calls that worker threads wait for, to end all of them at once. Thread-safe."""

    def __init__(self) -> None:
        self.stopped = threading.Event()
        self._lock = threading.Lock()
        self._calls: set[Any] = set()

    @contextmanager
    def running(self, call: Any) -> Iterator[None]:
        """A block that waits for the call, which is cancelled if all have been stopped."""
        with self._lock:
            self._calls.add(call)
        try:
            if self.stopped.is_set():
                call.cancel()
            yield
        finally:
            with self._lock:
                self._calls.discard(call)

    def stop(self) -> None:
        """Cancels what runs; what begins later ends at once."""
        self.stopped.set()
        with self._lock:
            calls = list(self._calls)
        for call in calls:
            call.cancel()


def run_many(
    todo: Sequence[t.GenerateRequest],
    generate: Callable[[t.GenerateRequest], list[t.Sample]],
    stop: Callable[[], None],
    *,
    concurrency: int,
    return_errors: bool,
    progress: Callable[[int, int], None] | None,
) -> list[Any]:
    """Runs `generate` for each request, in at most `concurrency` threads; results in order.

    The first DoradError ends the rest by `stop`, or takes its result's place (`return_errors`).
    """
    lock = threading.Lock()
    done = 0

    def run(request: t.GenerateRequest) -> list[t.Sample] | DoradError:
        nonlocal done
        result: list[t.Sample] | DoradError
        try:
            result = generate(request)
        except DoradError as error:
            if not return_errors:
                raise
            result = error
        with lock:
            done += 1
            if progress is not None:
                progress(done, len(todo))
        return result

    with ThreadPoolExecutor(min(check_concurrency(concurrency), max(1, len(todo)))) as workers:
        futures = [workers.submit(run, request) for request in todo]
        try:
            finished, _ = wait(futures, return_when=FIRST_EXCEPTION)
            for future in finished:
                future.result()
            return [future.result() for future in futures]
        except BaseException:
            stop()
            workers.shutdown(wait=True, cancel_futures=True)
            raise
