"""How a command line or a program names a fleet's manifest."""

from __future__ import annotations

import os

from dorad.fleet.config_map import ConfigMap
from dorad.fleet.manifest_store import ManifestFile, ManifestStore

SPELLINGS = "a file, configmap:[NAMESPACE/]NAME of Kubernetes, or ray:NAME, a fleet on Ray"


def store_of(manifest: str | os.PathLike[str] | ManifestStore) -> ManifestStore:
    """The store of a spelling: one of SPELLINGS. A store stays as it is.

    Raises NotFound when the cluster of Ray, which RAY_ADDRESS names, has no fleet of that name.
    """
    if not isinstance(manifest, (str, os.PathLike)):
        return manifest
    kind, colon, name = os.fspath(manifest).partition(":")
    if colon and kind == "configmap":
        namespace, _, name = name.rpartition("/")
        return ConfigMap(name, namespace=namespace or None)
    if colon and kind == "ray":
        from dorad._ray.calls import ActorManifest
        from dorad._ray.find import actor_of

        return ActorManifest(actor_of(name, "auto"))
    return ManifestFile(manifest)
