"""Operating the server: pauses, memory, the share of the device, and health."""

from __future__ import annotations

import time
from contextlib import AbstractAsyncContextManager
from typing import Literal

from grpc_health.v1 import health_pb2

from dorad import _wire
from dorad import types as t
from dorad._aio.connection import Connection
from dorad._aio.gpu_share import DEFAULT_TIME_TO_LIVE, new_id, renewal_interval, renewed
from dorad._arguments import filled
from dorad._asyncio import sleep
from dorad._stubs import control_pb2
from dorad.errors import DoradError, Unavailable


class Control(Connection):
    """The methods of the control service and of gRPC's health service."""

    async def info(
        self, *, timeout: float | None = None, retry_for: float | None = None
    ) -> t.ServerInfo:
        """The server's model, memory and current state."""
        message = control_pb2.GetInfoRequest()
        answer = await self._ask(self._control.GetInfo, message, timeout, retry_for)
        return _wire.server_info(answer)

    async def pause(
        self,
        mode: Literal["keep", "wait", "abort"] = "keep",
        *,
        adapter: str | None = None,
        allow_missing: bool = False,
        timeout: float | None = None,
        retry_for: float | None = None,
    ) -> int:
        """Stops the engine from starting steps, or with `adapter` ("name" or "name@version") the
        requests that hold it; returns how many requests were frozen or ended.

        "keep" freezes requests where they are, "wait" lets admitted ones finish first and refuses
        new ones, "abort" ends them now. Publishing and activating stay possible.

        Raises:
          NotFound: the server does not have the adapter, and not `allow_missing`.
        """
        message = filled(
            control_pb2.PauseRequest,
            mode=_wire.pause_mode(mode),
            adapter=adapter or "",
            allow_missing=allow_missing,
        )
        answer = await self._ask(self._control.Pause, message, timeout, retry_for)
        return int(answer.affected)

    async def resume(
        self,
        adapter: str | None = None,
        *,
        timeout: float | None = None,
        retry_for: float | None = None,
    ) -> None:
        """Undoes the `pause` of an adapter, or all pauses."""
        message = filled(control_pb2.ResumeRequest, adapter=adapter or "")
        await self._ask(self._control.Resume, message, timeout, retry_for)

    async def sleep(
        self,
        *tags: Literal["weights", "kv", "adapters"],
        keep_kv: bool = False,
        refuse_requests: bool = False,
        timeout: float | None = None,
        retry_for: float | None = None,
    ) -> dict[str, int]:
        """Releases device memory to other processes, until `wake`; no tags mean all.

        Returns the released bytes, by tag; weights that are leased to a trainer stay. Requests wait
        meanwhile, or new ones are refused. Running ones continue after `wake` with the same
        results: with `keep_kv` from a copy of the KV cache in host memory, else computed again.
        """
        message = filled(
            control_pb2.SleepRequest, tags=tags, keep_kv=keep_kv, refuse_requests=refuse_requests
        )
        answer = await self._ask(self._control.Sleep, message, timeout, retry_for, effects=True)
        return {tag: int(count) for tag, count in answer.freed_bytes.items()}

    async def wake(
        self,
        *tags: Literal["weights", "kv", "adapters"],
        timeout: float | None = None,
        retry_for: float | None = None,
    ) -> None:
        """Allocates the memory that `sleep` released; no tags mean all.

        Raises Overloaded when there is too little: the remaining tags stay asleep.
        """
        message = filled(control_pb2.WakeRequest, tags=tags)
        await self._ask(self._control.Wake, message, timeout, retry_for, effects=True)

    async def limit_gpu_share(
        self,
        share: float,
        *,
        time_to_live: float,
        limit_id: str,
        timeout: float | None = None,
        retry_for: float | None = None,
    ) -> float:
        """Limits the server's steps to `share` (0.01 to 1) of the time.

        Until `end_gpu_share_limit`, or for `time_to_live` seconds (at most a day); another call
        with the same `limit_id` renews and changes it. Of several limits, and of the server's own
        engine.gpu_share, the smallest share counts. Results do not depend on it. Returns the share
        in effect.
        """
        message = _wire.gpu_share_request(share, time_to_live, limit_id)
        answer = await self._ask(self._control.LimitGpuShare, message, timeout, retry_for)
        return float(answer.gpu_share)

    async def end_gpu_share_limit(
        self, limit_id: str, *, timeout: float | None = None, retry_for: float | None = None
    ) -> bool:
        """Ends a limit. False: it had ended by itself, or there was none."""
        message = filled(control_pb2.EndGpuShareLimitRequest, limit_id=limit_id)
        answer = await self._ask(self._control.EndGpuShareLimit, message, timeout, retry_for)
        return bool(answer.ended)

    def limited_gpu_share(
        self, share: float, *, time_to_live: float = DEFAULT_TIME_TO_LIVE
    ) -> AbstractAsyncContextManager[float]:
        """Limits the server's steps to `share` of the time during a block.

            async with client.limited_gpu_share(0.3):
                await asyncio.to_thread(train_step)

        The limit is renewed meanwhile and ends with the block, or after `time_to_live` seconds if
        this process dies. Returns the share in effect.
        """
        interval = renewal_interval(time_to_live)
        limit_id = new_id()

        async def renew() -> float:
            return await self.limit_gpu_share(
                share, time_to_live=time_to_live, limit_id=limit_id, timeout=interval
            )

        return renewed(
            renew, lambda: self.end_gpu_share_limit(limit_id, timeout=interval), interval
        )

    async def health(self, service: str = "", *, timeout: float | None = 5.0) -> str:
        """The server (or one service by full name): "serving" or "not_serving".

        Raises NotFound for a service that the server does not have.
        """
        message = filled(health_pb2.HealthCheckRequest, service=service)
        answer = await self._call(self._health.Check, message, timeout)
        name = health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)
        return str(name).lower()

    async def wait_ready(self, timeout: float = 60.0) -> None:
        """Returns when the server is serving. Raises Unavailable after `timeout` seconds."""
        end = time.monotonic() + timeout
        while True:
            try:
                left = max(0.05, min(5.0, end - time.monotonic()))
                state = await self.health(timeout=left)
                if state == "serving":
                    return
            except DoradError as error:
                state = error.message
            if time.monotonic() >= end:
                raise Unavailable(
                    f"{self.target} is not serving after {timeout:g} s: {state}", code="UNAVAILABLE"
                )
            await sleep(0.05)
