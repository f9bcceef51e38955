"""A Ray cluster of this host, on loopback addresses, for one module's tests."""

import os
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

import ray

NODE = "127.0.0.2"
"""Ray takes another loopback address than 127.0.0.1 as it is."""


@contextmanager
def cluster(cpus: int = 8) -> Iterator[None]:
    """A cluster with so many CPUs by name. It ends with the block."""
    # Its sockets listen on all addresses: nobody else knows its token.
    os.environ |= {"RAY_AUTH_TOKEN": secrets.token_hex(32), "RAY_USAGE_STATS_ENABLED": "0"}
    folder = tempfile.mkdtemp(prefix="ray-", dir="/tmp")  # Paths of its sockets must be short.
    try:
        ray.init(
            num_cpus=cpus,
            include_dashboard=False,
            log_to_driver=False,
            object_store_memory=80 << 20,
            _node_ip_address=NODE,
            _temp_dir=folder,
        )
        yield
    finally:
        ray.shutdown()
        shutil.rmtree(folder, ignore_errors=True)
