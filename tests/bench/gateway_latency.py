"""What the gateway adds: a keep-alive request of a route without work, an answer of one token and
many streams at a time, each beside the same through gRPC. Tiny model, CPU, one gateway process.

    DORAD_BINARY=build/dorad python tests/bench/gateway_latency.py [--streams 200] [--rounds 5]

One JSON line each. Latencies are milliseconds; `gateway` and `grpc` requests take turns. Rates of
streams are medians of the rounds; a stream that lost a token ends the run.
"""

import argparse
import asyncio
import http.client
import json
import re
import statistics
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "client" / "src")]

import dorad  # noqa: E402
import dorad.aio  # noqa: E402
from lib.gateway import RunningGateway, running_gateway, stream_tokens  # noqa: E402
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


def cpu_seconds(gateway: RunningGateway) -> float:
    """CPU time of the gateway so far, which other work on the machine does not change."""
    page = urllib.request.urlopen(f"{gateway.url}/metrics", timeout=60).read().decode()
    return float(re.search(r"^process_cpu_seconds_total (\S+)", page, re.M).group(1))


async def grpc_stream(client: dorad.aio.Client, seed: int, tokens: int) -> int:
    options = {"max_tokens": tokens, "ignore_eos": True, "seed": seed}
    count = 0
    async with client.stream(PROMPT, **options) as stream:
        async for delta in stream:
            count += len(delta.token_ids)
    return count


async def measure_streams(
    gateway: RunningGateway, target: str, base: str, streams: int, tokens: int, rounds: int
) -> None:
    async def all_of(work: Callable[[int], object]) -> float:
        began = time.perf_counter()
        counts = await asyncio.gather(*(work(seed) for seed in range(streams)))
        assert counts == [tokens] * streams, "tokens were lost"
        return round(streams * tokens / (time.perf_counter() - began), 1)

    def through(seed: int):
        options = {"max_tokens": tokens, "ignore_eos": True, "seed": seed, "stream": True}
        body = {"model": base, "prompt": PROMPT, **options, "return_token_ids": True}
        return through_http(gateway.http, body)

    async def through_http(address: str, body: dict) -> int:
        return len(await stream_tokens(address, body))

    async with dorad.aio.Client(target, timeout=600) as client:
        found: list[tuple[float, float, float]] = []
        for _ in range(rounds + 1):
            direct = await all_of(lambda seed: grpc_stream(client, seed, tokens))
            before = cpu_seconds(gateway)
            rate = await all_of(through)
            found.append((direct, rate, cpu_seconds(gateway) - before))
        of_grpc, of_gateway, cpu = zip(*found[1:], strict=True)  # The first round warms up.
        line = {
            "grpc_tokens_per_second": statistics.median(of_grpc),
            "gateway_tokens_per_second": statistics.median(of_gateway),
            "gateway_cpu_us_per_token": round(1e6 * statistics.median(cpu) / streams / tokens),
            "rounds": rounds,
        }
        print(json.dumps({"work": "streams", "streams": streams, "tokens": tokens, **line}))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split(":")[0])
    parser.add_argument("--count", type=int, default=300, help="requests of each latency")
    parser.add_argument("--streams", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=64, help="of each stream")
    parser.add_argument("--rounds", type=int, default=5, help="of the streams, for the median")
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
        asyncio.run(
            measure_streams(gateway, server.grpc, base, args.streams, args.tokens, args.rounds)
        )


if __name__ == "__main__":
    main()
