"""What a pool and a fleet have in common: prompts for several servers."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any, Literal, Self, Unpack, overload

from dorad import _wire
from dorad import types as t
from dorad._asyncio import Runner
from dorad._pool import Pool
from dorad.answers import Answers
from dorad.errors import DoradError


class Rollouts:
    """Prompts for several servers, whose work `_pool` does inside `_runner`."""

    _runner: Runner[Any]
    _pool: Pool
    _arguments: dict[str, Any]  # of the constructor, `targets` among them

    def __reduce__(self) -> tuple[Any, ...]:
        # As of a client. The copy asks the servers for the active versions.
        return functools.partial(type(self), **self._arguments | {"targets": self.targets}), ()

    async def close(self) -> None:
        """Closes all connections; running calls raise Cancelled. Idempotent."""
        await self._runner.close(type(self._pool).close)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    @property
    def targets(self) -> list[str]:
        """The addresses of the servers, in the order in which they were added."""
        return self._pool.targets

    @overload
    async def generate_many(
        self,
        requests: Iterable[t.TokenIds | t.GenerateRequest],
        *,
        return_errors: Literal[False] = ...,
        **options: Unpack[t.ManyOptions],
    ) -> list[list[t.Sample]]: ...

    @overload
    async def generate_many(
        self,
        requests: Iterable[t.TokenIds | t.GenerateRequest],
        *,
        return_errors: Literal[True],
        **options: Unpack[t.ManyOptions],
    ) -> list[list[t.Sample] | DoradError]: ...

    async def generate_many(
        self,
        requests: Iterable[t.TokenIds | t.GenerateRequest],
        *,
        concurrency: int = 512,
        return_errors: bool = False,
        progress: Callable[[int, int], None] | None = None,
        answers: Answers | None = None,
        timeout: float | None = None,
        retry_for: float | None = None,
        **options: Unpack[t.GenerateOptions],
    ) -> Any:
        """As `Client.generate_many`, over all servers: `concurrency` counts prompts in all.

        Prompts for an adapter with the same first 256 tokens go to the same server, whose prefix
        cache has them, unless it has more than 1.25 times its share: others that wait then begin
        before them. They go to another one when
        that server becomes unavailable or ends before its samples are complete, or has lost the
        adapter's version. When no server can take it, it waits for one until its timeout.

        Raises:
          UnexpectedVersion: a version that is not the active one made a token.
          Unavailable: a prompt failed on every server until its timeout (or for `retry_for`).
          NotFound: no server has the adapter's version.
          PoolError: servers have different versions of an adapter active.
        """
        return await self._runner.run(
            self._pool.generate_many(
                _wire.as_requests(requests, options),
                timeout,
                retry_for,
                concurrency=concurrency,
                return_errors=return_errors,
                progress=progress,
                answers=answers,
            )
        )

    async def report(self) -> list[t.TargetReport]:
        """The state of every server: asks each for its state, its queue and its active versions."""
        return await self._runner.run(self._pool.report())
