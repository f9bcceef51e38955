"""A fleet's manifest in a ConfigMap of Kubernetes, for processes on any of its nodes."""

from __future__ import annotations

import asyncio
import json
import os
import pathlib
import ssl
import urllib.error
import urllib.request
from typing import Any

from dorad._channel import PROBE_SECONDS
from dorad.fleet.manifest import Manifest, from_json, to_json

_KEY = "manifest.json"
_ACCOUNT = pathlib.Path("/var/run/secrets/kubernetes.io/serviceaccount")


class ConfigMap:
    """A manifest in a ConfigMap, which is there already. Any number of processes may use it.

    The API server decides between two writers by the ConfigMap's resourceVersion. The pod's service
    account needs the verbs get and update. Thread-safe.

    Args:
      name: of the ConfigMap.
      namespace: the pod's own unless given.
      api: the API server's URL; as the pod's environment says unless given.
      account: the folder with the files token, ca.crt and namespace, which are read for each call.
    """

    def __init__(
        self,
        name: str,
        *,
        namespace: str | None = None,
        api: str | None = None,
        account: str | os.PathLike[str] = _ACCOUNT,
    ) -> None:
        self._account = pathlib.Path(account)
        if api is None:
            host, port = (os.environ[f"KUBERNETES_SERVICE_{part}"] for part in ("HOST", "PORT"))
            api = f"https://{f'[{host}]' if ':' in host else host}:{port}"
        if namespace is None:
            namespace = (self._account / "namespace").read_text(encoding="utf-8").strip()
        self._url = f"{api}/api/v1/namespaces/{namespace}/configmaps/{name}"

    async def read(self) -> Manifest:
        return self._manifest(await asyncio.to_thread(self._call))

    async def compare_and_set(self, expected: int, manifest: Manifest) -> bool:
        return await asyncio.to_thread(self._compare_and_set, expected, manifest)

    def _compare_and_set(self, expected: int, manifest: Manifest) -> bool:
        found = self._call()
        if self._manifest(found).generation != expected:
            return False
        # It has the resourceVersion of what was read: another writer's change refuses it.
        found["data"] = {_KEY: to_json(manifest)}
        try:
            self._call(found)
        except urllib.error.HTTPError as error:
            if error.code == 409:
                return False
            raise
        return True

    @staticmethod
    def _manifest(found: dict[str, Any]) -> Manifest:
        text = (found.get("data") or {}).get(_KEY)
        return Manifest() if text is None else from_json(text)

    def _call(self, replacement: dict[str, Any] | None = None) -> dict[str, Any]:
        """The ConfigMap, or the result of its replacement. Raises OSError."""
        token = (self._account / "token").read_text(encoding="utf-8").strip()
        request = urllib.request.Request(
            self._url,
            data=None if replacement is None else json.dumps(replacement).encode(),
            headers={"Authorization": f"Bearer {token}", "Content-Type": "application/json"},
            method="GET" if replacement is None else "PUT",
        )
        # Made for each call: a fleet is pickled with its store, and the certificates change.
        handlers: list[urllib.request.BaseHandler] = [urllib.request.ProxyHandler({})]
        if self._url.startswith("https:"):
            trusted = ssl.create_default_context(cafile=self._account / "ca.crt")
            handlers.append(urllib.request.HTTPSHandler(context=trusted))
        opener = urllib.request.build_opener(*handlers)
        with opener.open(request, timeout=PROBE_SECONDS) as answer:
            found: dict[str, Any] = json.loads(answer.read())
            return found
