"""Client processes that are killed. Run as a program: forks one client for each line on stdin.

A line is "TARGET KIND". The child prints "PID" when it is in the middle of its call and then
stays there. Forking before any channel exists is what makes two hundred clients cheap.
"""

import os
import signal
import sys
import time

# Read before forking; no channel is made in this process.
from lib import wire

PROMPT = [11, 12, 13, 14, 15]


def _generate(client: "wire.Wire") -> None:
    call = client.stream(PROMPT, adapter="a", n=2, max_tokens=8000, ignore_eos=True, timeout=None)
    next(call)
    _report()
    for _ in call:
        pass


def _slow_reader(client: "wire.Wire") -> None:
    call = client.stream(PROMPT, adapter="a", max_tokens=8000, ignore_eos=True, timeout=None)
    next(call)
    _report()
    time.sleep(600)


def _score(client: "wire.Wire") -> None:
    from dorad.v1 import inference_pb2

    ids = wire.pack_ids([7] * 4000)
    request = inference_pb2.ScoreRequest(
        sequences=[inference_pb2.TokenSequence(token_ids=ids)] * 4,
        adapters=["a", ""],
        # The others' first tokens come before it, or they would wait for seconds.
        priority=10,
    )
    call = client.inference.Score.future(request)
    time.sleep(0.05)
    _report()
    # A GPU may be done before the kill: then again.
    while True:
        call.result()
        call = client.inference.Score.future(request)


def _publish(client: "wire.Wire") -> None:
    from dorad.v1 import adapters_pb2

    def parts():
        begin = adapters_pb2.PublishBegin(
            name="half", adapter_config_json="{}", safetensors_size=8 << 20
        )
        yield adapters_pb2.PublishRequest(begin=begin)
        chunk = adapters_pb2.PublishChunk(offset=0, data=bytes(1 << 20))
        yield adapters_pb2.PublishRequest(chunk=chunk)
        time.sleep(0.05)
        _report()
        time.sleep(600)

    client.adapters.Publish(parts())


def _report() -> None:
    os.write(1, f"{os.getpid()}\n".encode())


KINDS = {
    "generate": _generate,
    "slow_reader": _slow_reader,
    "score": _score,
    "publish": _publish,
}


def main() -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    for line in iter(sys.stdin.readline, ""):
        target, kind = line.split()
        if os.fork() == 0:
            try:
                signal.alarm(120)
                KINDS[kind](wire.Wire(target))
            finally:
                os._exit(1)


if __name__ == "__main__":
    main()
