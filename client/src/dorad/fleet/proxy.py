"""Keeps the list of servers of an nginx in agreement with a fleet's manifest."""

from __future__ import annotations

import asyncio
import logging
import os
import pathlib
import re
import signal
from collections.abc import Callable

from dorad._aio.client import Client
from dorad.fleet.manifest_store import ManifestStore, replace_file
from dorad.fleet.watched import WatchedServers, address_of

_LINE = re.compile(r"server (\S+) max_fails=0;")
_ADDRESS = re.compile(r"[A-Za-z0-9_.:\[\]-]+")

_log = logging.getLogger("dorad.servers")


class ProxiedServers(WatchedServers):
    """The members behind an nginx. Use it from one event loop.

    A member is listed once it has the fleet's versions, and until it leaves or lacks one: nginx
    itself passes over those that do not answer, and each reload costs it a set of workers. It would
    refuse an empty list, and names without an address.

    Args:
      path: dorad-servers.conf of deploy/nginx.
      pid_file: of nginx, which reads the list again at each change.
    """

    def __init__(
        self,
        connect: Callable[[str], Client],
        store: ManifestStore,
        path: pathlib.Path,
        pid_file: pathlib.Path,
    ) -> None:
        super().__init__([], connect, store)
        self._path = path
        self._pid_file = pid_file
        self._listed = _LINE.findall(path.read_text(encoding="utf-8")) if path.exists() else []

    async def look(self) -> None:
        await super().look()
        wanted = [
            target
            for target, state in self.states.items()
            if (state == "ready" or (state == "unavailable" and target in self._listed))
            and _ADDRESS.fullmatch(target)
        ]
        found = await asyncio.gather(*(address_of(target, 0) for target in wanted))
        listed = sorted(at for at, address in zip(wanted, found, strict=True) if address)
        if listed and listed != self._listed:
            await asyncio.to_thread(self._write, listed)
            self._listed = listed

    def _write(self, listed: list[str]) -> None:
        text = "".join(f"server {target} max_fails=0;\n" for target in listed)
        replace_file(self._path, text.encode())
        try:
            os.kill(int(self._pid_file.read_text(encoding="utf-8")), signal.SIGHUP)
        except (OSError, ValueError) as error:  # It reads the list at its start.
            _log.warning("nginx was not told of its servers", extra={"fields": {"why": str(error)}})
        else:
            _log.info("nginx has other servers", extra={"fields": {"servers": " ".join(listed)}})


async def keep(servers: ProxiedServers) -> None:
    """Runs until SIGTERM or SIGINT. Raises OSError when the manifest cannot be read at first."""
    try:
        await servers.follow()
        await servers.look()
        watching = asyncio.create_task(servers.watch())
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, watching.cancel)
        await asyncio.gather(watching, return_exceptions=True)
        if not watching.cancelled():
            watching.result()
    finally:
        await servers.close()
