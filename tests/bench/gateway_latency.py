"""What the gateway adds: a keep-alive request of a route without work, an answer of one token and
many streams at a time, each beside the same through gRPC. Tiny model, CPU, one gateway process.

    DORAD_BINARY=build/dorad python tests/bench/gateway_latency.py [--streams 200] [--tokens 64]

One JSON line each. Latencies are milliseconds; `gateway` and `grpc` requests take turns.
"""

import argparse
import asyncio
import http.client
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "client" / "src")]

import dorad  # noqa: E402
import dorad.aio  # noqa: E402
from lib.gateway import RunningGateway, running_gateway  # noqa: E402
from lib.server import serve  # noqa: E402
from lib.smollm2 import CACHE  # noqa: E402
from lib.zoo import Zoo, default_directory  # noqa: E402

PROMPT = [1, 40, 77, 120, 33]
JSON = {"content-type": "application/json"}


def spread(seconds: list[float]) -> dict:
    ordered = sorted(1e3 * s for s in seconds)
    return {
        "p50_ms": round(statistics.median(ordered), 2),
        "p99_ms": round(ordered[int(0.99 * (len(ordered) - 1))], 2),
    }


def times(count: int, *works: Callable[[], object]) -> list[list[float]]:
    """Seconds of each work, `count` times in turn, after some rounds that warm up."""
    found: list[list[float]] = [[] for _ in works]
    for round_ in range(count + 10):
        for work, seconds in zip(works, found, strict=True):
            began = time.perf_counter()
            work()
            if round_ >= 10:
                seconds.append(time.perf_counter() - began)
    return found


def request_of(connection: http.client.HTTPConnection, method: str, path: str, body: dict | None):
    data = None if body is None else json.dumps(body)

    def send() -> None:
        connection.request(method, path, data, JSON if data else {})
        answer = connection.getresponse()
        text = answer.read()
        assert answer.status == 200, text

    return send


def measure_latency(gateway: RunningGateway, target: str, base: str, count: int) -> None:
    connection = http.client.HTTPConnection(gateway.http, timeout=60)
    (route,) = times(count, request_of(connection, "GET", "/v2/health/live", None))
    print(json.dumps({"work": "GET /v2/health/live", **spread(route)}), flush=True)
    body = {"model": base, "prompt": PROMPT, "max_tokens": 1, "seed": 7}
    with dorad.Client(target, timeout=60) as client:
        through, direct = times(
            count,
            request_of(connection, "POST", "/v1/completions", body),
            lambda: client.generate(PROMPT, max_tokens=1, seed=7),
        )
    added = 1e3 * (statistics.median(through) - statistics.median(direct))
    line = {"gateway": spread(through), "grpc": spread(direct), "added_p50_ms": round(added, 2)}
    print(json.dumps({"work": "one token", **line}), flush=True)


async def http_stream(address: str, body: dict) -> int:
    """Reads a whole event stream; returns its tokens."""
    host, port = address.rsplit(":", 1)
    reader, writer = await asyncio.open_connection(host, int(port))
    data = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(data)}\r\n"
    writer.write(
        f"{head}content-type: application/json\r\nconnection: close\r\n\r\n".encode() + data
    )
    tokens, done = 0, False
    async for line in reader:
        if line.startswith(b"data: [DONE]"):
            done = True
        elif line.startswith(b"data: "):
            event = json.loads(line[6:])
            assert "error" not in event, event
            tokens += sum(len(choice["token_ids"]) for choice in event["choices"])
    writer.close()
    assert done, "the stream ended early"
    return tokens


async def grpc_stream(client: dorad.aio.Client, seed: int, tokens: int) -> int:
    options = {"max_tokens": tokens, "ignore_eos": True, "seed": seed}
    count = 0
    async with client.stream(PROMPT, **options) as stream:
        async for delta in stream:
            count += len(delta.token_ids)
    return count


async def measure_streams(
    gateway: RunningGateway, target: str, base: str, streams: int, tokens: int
) -> None:
    async def all_of(work: Callable[[int], object]) -> float:
        began = time.perf_counter()
        counts = await asyncio.gather(*(work(seed) for seed in range(streams)))
        assert counts == [tokens] * streams, "tokens were lost"
        return round(streams * tokens / (time.perf_counter() - began), 1)

    def through(seed: int):
        options = {"max_tokens": tokens, "ignore_eos": True, "seed": seed, "stream": True}
        body = {"model": base, "prompt": PROMPT, **options, "return_token_ids": True}
        return http_stream(gateway.http, body)

    async with dorad.aio.Client(target, timeout=600) as client:
        for work in ("warm-up", "streams"):
            direct = await all_of(lambda seed: grpc_stream(client, seed, tokens))
            line = {"grpc_tokens_per_second": direct}
            line["gateway_tokens_per_second"] = await all_of(through)
            print(json.dumps({"work": work, "streams": streams, "tokens": tokens, **line}))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split(":")[0])
    parser.add_argument("--count", type=int, default=300, help="requests of each latency")
    parser.add_argument("--streams", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=64, help="of each stream")
    args = parser.parse_args()
    folder = Zoo(default_directory(CACHE / "tests")).model_with_tokenizer("llama2")
    settings = {"engine.max_running_sequences": args.streams}
    with (
        tempfile.TemporaryDirectory(prefix="dorad-bench-") as scratch,
        serve(folder, settings=settings) as server,
        running_gateway(server.grpc, "--tokenizer", folder, scratch=Path(scratch)) as gateway,
        dorad.Client(server.grpc, timeout=60) as client,
    ):
        base = client.info().model.name
        measure_latency(gateway, server.grpc, base, args.count)
        asyncio.run(measure_streams(gateway, server.grpc, base, args.streams, args.tokens))


if __name__ == "__main__":
    main()
