"""A server that the system stops for a while goes on as if nothing had been."""

import os
import signal
import time

import grpc
import pytest
from lib.server import serve, wait_until
from lib.wire import LENGTH, collect

PROMPT = [11, 12, 13, 14, 15]
WATCHDOG = 5


def test_streams_go_on_after_a_stop_longer_than_the_watchdogs_patience(zoo) -> None:
    settings = {"engine.kv_bytes": 64 << 20, "engine.watchdog_seconds": WATCHDOG}
    options = dict(max_tokens=600, ignore_eos=True, seed=5)
    with serve(zoo.model("slow"), None, settings) as server:
        (undisturbed,) = server.wire.generate(PROMPT, **options)
        call = server.wire.stream(PROMPT, **options)
        messages = [next(call)]
        impatient = server.wire.stream(PROMPT, max_tokens=4000, ignore_eos=True, timeout=2)
        next(impatient)
        os.kill(server.pid, signal.SIGSTOP)
        try:
            # The client's own clock ends its call, not the server.
            with pytest.raises(grpc.RpcError) as caught:
                for _ in impatient:
                    pass
            assert caught.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
            time.sleep(WATCHDOG + 2)
        finally:
            os.kill(server.pid, signal.SIGCONT)
        (sample,) = collect([*messages, *call]).values()
        assert sample.reason == LENGTH and sample.tokens == undisturbed.tokens
        wait_until(
            lambda: server.wire.info().engine.running_sequences == 0,
            what="the end of the call that nobody waits for",
        )
        assert server.process.poll() is None
