"""The client."""

from __future__ import annotations

from dorad._aio.adapters import Adapters
from dorad._aio.control import Control
from dorad._aio.inference import Inference


class Client(Inference, Adapters, Control):
    """A connection to a dorad server, for one event loop: make it inside a coroutine.

    Args:
      target: "host:port", "[v6]:port" or "unix:PATH".
      admin_target: address of the adapter and control services, if the server has an admin
        listener.
      timeout: seconds a call may take unless it says otherwise; None or math.inf: no limit.
      retry_for: seconds to go on after a failure that may pass (DORAD_RETRY_FOR): the server cannot
        be reached, is full or is paused. 0: never. Default: up to 5 attempts (an upload: 8) within
        the timeout, and for `generate_many` until its timeout.
      keepalive: seconds between pings while calls run, at least 30; math.inf: none.
      token: sent with every call (DORAD_TOKEN). Never sent in plain text to another host or to a
        proxy of the environment (http_proxy); only TLS connections use such a proxy.
      ca_file: PEM file of the authorities whose servers are trusted (DORAD_CA_FILE). With it, or
        with cert_file, TCP connections use TLS; socket files never do.
      cert_file, key_file: PEM files of the client's own certificate and its key, for servers that
        require one (DORAD_CERT_FILE, DORAD_KEY_FILE).
      credentials: other credentials for TLS instead of the three files.
      shared_memory: path of the server's server.shared_memory_socket, for a server on this host: it
        reads the pixels of images from this process's memory. What finds no room there, up to 1 GiB
        of running calls, goes with the call.
      metadata: sent with every call, for example an authorization header for a proxy.
      options: further gRPC channel options; they override ours, except that a connection in plain
        text never uses a proxy.

    A pickled client is its arguments (a `token` too): the copy connects where it is unpickled, with
    that process's files and environment.

    Every method that takes `timeout` takes `retry_for` too, except `watch`, `health` and
    `wait_ready`. A call with an effect (activate, retire, sleep, wake, a publish without upload) is
    repeated only with `retry_for`, and only if the server certainly did nothing.

    Every method raises a subclass of `DoradError` when the call fails, and ValueError or TypeError
    for arguments that cannot be sent.
    """
