"""What a scrape costs a server with many adapters, and what scraping costs its steps.

    python tests/bench/scrape_cost.py [--adapters 1000]

Publishes adapters of a tiny model, lets requests run, and scrapes every 50 ms, as endpoint pickers
do, then not at all.
"""

import argparse
import statistics
import sys
import tempfile
import threading
import time
import urllib.request
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "client" / "src")]

from lib import adapters, tiny_models  # noqa: E402
from lib.oracle import Oracle  # noqa: E402
from lib.server import Server, serve  # noqa: E402

FAMILY = tiny_models.BY_NAME["slow"]
PERIOD = 6.0


def scrape(server: Server, encoding: str = "gzip") -> tuple[float, int]:
    """The time from the request to the last byte, connection included, and the bytes sent."""
    request = urllib.request.Request(server.metrics_url, headers={"Accept-Encoding": encoding})
    begin = time.perf_counter()
    with urllib.request.urlopen(request, timeout=10) as response:
        size = len(response.read())
    return time.perf_counter() - begin, size


def steps(server: Server) -> tuple[float, float]:
    return (
        server.metric("dorad_engine_step_seconds_sum"),
        server.metric("dorad_engine_step_seconds_count"),
    )


def step_mean(server: Server, every: float | None) -> tuple[float, list[float], int]:
    """The mean time of a step over a period with scrapes at such a distance; None: without any."""
    seconds, count = steps(server)
    times, size = [], 0
    end = time.monotonic() + PERIOD
    while (now := time.monotonic()) < end:
        if every is None:
            time.sleep(end - now)
            break
        took, size = scrape(server)
        times.append(took)
        time.sleep(max(0.0, now + every - time.monotonic()))
    more_seconds, more_count = steps(server)
    return (more_seconds - seconds) / max(1.0, more_count - count), times, size


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--adapters", type=int, default=1000)
    count = parser.parse_args().adapters
    with tempfile.TemporaryDirectory(prefix="dorad-bench-") as scratch:
        model = tiny_models.make(FAMILY, Path(scratch) / "model")
        folder = adapters.make(
            Oracle(model).base, adapters.BY_NAME["lora"], Path(scratch) / "adapter"
        )
        with serve(model, None, {"metrics.vllm_aliases": True}) as server:
            begin = time.monotonic()
            for i in range(count):
                server.wire.publish(f"adapter-{i}", folder, activate=True)
            print(f"{count} adapters published in {time.monotonic() - begin:.0f} s")
            for encoding in ("identity", "gzip"):
                idle = sorted(scrape(server, encoding) for _ in range(200))
                print(
                    f"idle, {encoding}: median {1e3 * idle[100][0]:.2f} ms, "
                    f"p99 {1e3 * idle[197][0]:.2f} ms, {idle[100][1] / 1024:.1f} KiB a page"
                )
            over = threading.Event()

            def work(worker: int) -> None:
                turn = worker
                while not over.is_set():
                    server.wire.generate(
                        [11, 12, 13],
                        adapter=f"adapter-{turn % count}",
                        max_tokens=64,
                        ignore_eos=True,
                    )
                    turn += 7

            workers = [threading.Thread(target=work, args=(i,)) for i in range(8)]
            for worker in workers:
                worker.start()
            try:
                time.sleep(1)
                quiet, _, _ = step_mean(server, None)
                scraped, times, size = step_mean(server, 0.05)
                quiet_again, _, _ = step_mean(server, None)
            finally:
                over.set()
                for worker in workers:
                    worker.join()
            times.sort()
            print(
                f"under load, every 50 ms: median {1e3 * statistics.median(times):.2f} ms, "
                f"p99 {1e3 * times[int(0.99 * len(times))]:.2f} ms, {size / 1024:.0f} KiB a page"
            )
            print(
                f"mean step: {1e3 * quiet:.3f} and {1e3 * quiet_again:.3f} ms without scrapes, "
                f"{1e3 * scraped:.3f} ms with one every 50 ms"
            )


if __name__ == "__main__":
    main()
