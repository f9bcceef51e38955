"""What several servers of one model give together, with random weights.

    DORAD_BINARY=build/dorad python tests/bench/fleet_load.py
    DORAD_BINARY=dorad-bundle/dorad DORAD_TEST_DEVICE=cuda \\
        python tests/bench/fleet_load.py --shape qwen3-0.6b --in-flight 256 --tokens 256

  scaling   the same prompts for each server of 1, 2 and 4 (--servers), as many in flight for each:
            tokens/s, and the CPU time of the client, of all its threads, as a share of one core
  prefixes  Zipf-distributed adapters with shared beginnings on the last number of servers: prompt
            tokens found in a prefix cache with the pool's choice, and with servers in turn
  publish   an adapter of --rank on the last number of servers: a pool, which sends it to each, and
            a fleet, whose members pass it on

A server has its own GPU, or on a CPU one thread. Cores that servers and client share bound the
scaling: `cores` is the CPU time of all servers by the time on the clock. Each line is the median of
--rounds; of prefixes there is one round, on new servers. Servers of one host share its memory's
bandwidth, so that a publish there has no slow link to save. JSON lines, then tables.
"""

import argparse
import contextlib
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "client" / "src"), str(ROOT / "tools")]

import dorad  # noqa: E402
import make_random_model  # noqa: E402
import numpy as np  # noqa: E402
from lib.markdown import table  # noqa: E402
from lib.peers import ALLOWED  # noqa: E402
from lib.server import Server, device, serve  # noqa: E402

VOCABULARY = 500  # ids of every shape
SLOWEST_START = 300.0  # seconds
ROUTES = ("home", "in turn")


@contextlib.contextmanager
def fleet(
    count: int, model: Path, adapters: dict[str, Path], options: argparse.Namespace
) -> Iterator[tuple[list[Server], dorad.RolloutPool]]:
    settings: dict[str, object] = {"engine.max_running_sequences": options.in_flight} | ALLOWED
    if device() == "cpu":
        settings["engine.threads"] = 1
    if options.kv_bytes:
        settings["engine.kv_bytes"] = options.kv_bytes
    with contextlib.ExitStack() as stack:

        def start(place: int) -> Server:
            own = {"CUDA_VISIBLE_DEVICES": str(place)} if device() == "cuda" else {}
            store = {"adapters.store_path": model.parent / f"store-{place}"}
            server = serve(model, adapters, settings | store, timeout=SLOWEST_START, **own)
            return stack.enter_context(server)

        servers = [start(place) for place in range(count)]
        pool = dorad.RolloutPool([server.grpc for server in servers])
        yield servers, stack.enter_context(pool)


def timed(servers: list[Server], work: Any) -> tuple[list[dorad.Sample], dict[str, float]]:
    """The samples of `work`, and what it cost."""
    before = sum(map(Server.cpu_seconds, servers))
    client, begin = time.process_time(), time.perf_counter()
    samples = [sample for of_prompt in work() for sample in of_prompt]
    seconds = time.perf_counter() - begin
    client = time.process_time() - client
    tokens = sum(len(sample.token_ids) for sample in samples)
    return samples, {
        "seconds": round(seconds, 2),
        "tokens_per_second": round(tokens / seconds, 1),
        "client_share": round(client / seconds, 3),
        "client_us_a_token": round(1e6 * client / tokens, 1),
        "cores": round((sum(map(Server.cpu_seconds, servers)) - before) / seconds, 2),
    }


def prompts_of(count: int, length: int, seed: int) -> list[list[int]]:
    draw = random.Random(seed)
    return [draw.choices(range(10, VOCABULARY), k=length) for _ in range(count)]


# --- Scaling --------------------------------------------------------------------------------------


def measure_scaling(count: int, model: Path, options: argparse.Namespace) -> dict[str, Any]:
    rounds = []
    with fleet(count, model, {}, options) as (servers, pool):
        for round_ in range(options.rounds + 1):
            wanted = prompts_of(options.prompts * count, options.prompt, round_)
            samples, cost = timed(
                servers,
                lambda wanted=wanted: pool.generate_many(
                    wanted,
                    max_tokens=options.tokens,
                    ignore_eos=True,
                    concurrency=options.in_flight * count,
                ),
            )
            assert all(len(sample.token_ids) == options.tokens for sample in samples)
            if round_:  # The first one warms up.
                rounds.append(cost)
    middle = statistics.median_low(cost["tokens_per_second"] for cost in rounds)
    return next(cost for cost in rounds if cost["tokens_per_second"] == middle)


# --- Prefixes -------------------------------------------------------------------------------------


def zipf_prompts(options: argparse.Namespace, names: list[str]) -> list[dorad.GenerateRequest]:
    draw = random.Random(9)
    begins = {name: prompts_of(options.begins, options.prompt, n) for n, name in enumerate(names)}
    weights = [1 / (rank + 1) for rank in range(len(names))]
    return [
        dorad.GenerateRequest(
            draw.choice(begins[name]) + draw.choices(range(10, VOCABULARY), k=16),
            adapter=name,
            max_tokens=4,
            ignore_eos=True,
        )
        for name in draw.choices(names, weights, k=options.zipf_prompts)
    ]


def prompt_tokens(servers: list[Server]) -> tuple[float, float]:
    """Those computed, and those found in a prefix cache."""
    computed, cached = (
        sum(server.metric("dorad_prompt_tokens_total", source=source) for server in servers)
        for source in ("computed", "cached")
    )
    return computed, cached


def in_turn(
    clients: list[dorad.Client], wanted: list[dorad.GenerateRequest], at_once: int
) -> list[list[dorad.Sample]]:
    count = len(clients)

    def send(place: int) -> list[list[dorad.Sample]]:
        found: list[list[dorad.Sample]] = clients[place].generate_many(
            wanted[place::count], concurrency=at_once // count
        )
        return found

    with ThreadPoolExecutor(count) as threads:
        return [samples for part in threads.map(send, range(count)) for samples in part]


def measure_prefixes(
    route: str, model: Path, adapters: dict[str, Path], options: argparse.Namespace
) -> dict[str, Any]:
    wanted = zipf_prompts(options, list(adapters))
    with (
        fleet(options.servers[-1], model, adapters, options) as (servers, pool),
        contextlib.ExitStack() as stack,
    ):
        clients = [stack.enter_context(dorad.Client(server.grpc)) for server in servers]
        # Both ways begin with connections that are made.
        pool.generate_many([[10]] * len(servers), max_tokens=1)
        for client in clients:
            client.health()
        before = prompt_tokens(servers)
        _, cost = timed(
            servers,
            lambda: (
                pool.generate_many(wanted, concurrency=options.zipf_in_flight)
                if route == "home"
                else in_turn(clients, wanted, options.zipf_in_flight)
            ),
        )
        computed, cached = np.subtract(prompt_tokens(servers), before)
    return {
        "prompt_tokens": int(computed + cached),
        "cached": round(cached / (computed + cached), 4),
        "prompts_per_second": round(len(wanted) / cost["seconds"], 1),
        "seconds": cost["seconds"],
    }


# --- Publishing -----------------------------------------------------------------------------------


def measure_publish(model: Path, adapter: Path, options: argparse.Namespace) -> dict[str, Any]:
    """By turns, on the same servers."""
    found: dict[str, list[tuple[float, float]]] = {"to each": [], "as a fleet": []}
    with fleet(options.servers[-1], model, {}, options) as (servers, pool):
        targets = [server.grpc for server in servers]
        with dorad.Fleet(model.parent / "manifest", targets) as members:
            for round_ in range(options.rounds + 1):
                for way, publisher in zip(found, (pool, members), strict=True):
                    name = way.replace(" ", "-")
                    client, begin = time.process_time(), time.perf_counter()
                    published = publisher.publish(name, path=adapter, durable=True)
                    cost = time.perf_counter() - begin, time.process_time() - client
                    if round_:  # The first one warms up.
                        found[way].append(cost)
                        if publisher is pool:  # A fleet retires it by itself.
                            pool.retire(f"{name}@{published.version - 1}")
    size = (adapter / "adapter_model.safetensors").stat().st_size
    return {
        way: {
            "servers": len(targets),
            "MiB": round(size / 2**20, 1),
            "seconds": round(statistics.median(seconds for seconds, _ in costs), 3),
            "client_cpu_seconds": round(statistics.median(cpu for _, cpu in costs), 3),
        }
        for way, costs in found.items()
    }


# --- All ------------------------------------------------------------------------------------------


def table_of(title: str, rows: dict[str, dict[str, Any]]) -> str:
    heads = [title, *(head.replace("_", " ") for head in next(iter(rows.values())))]
    return table(heads, [[name, *map(str, row.values())] for name, row in rows.items()])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--shape", choices=make_random_model.SHAPES, default="tiny")
    parser.add_argument("--layers", type=int, default=0, help="so many of its layers (all)")
    parser.add_argument("--only", choices=("scaling", "prefixes", "publish"))
    parser.add_argument(
        "--servers", type=lambda text: [*map(int, text.split(","))], default="1,2,4"
    )
    parser.add_argument("--prompts", type=int, default=256, help="for each server")
    parser.add_argument("--prompt", type=int, default=256, help="tokens; of prefixes those shared")
    parser.add_argument("--tokens", type=int, default=64, help="of an answer")
    parser.add_argument("--in-flight", type=int, default=32, help="for each server")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--kv-bytes", default="", help="of each server (1GiB)")
    parser.add_argument("--rank", type=int, default=384, help="of the published adapter")
    parser.add_argument("--adapters", type=int, default=32)
    parser.add_argument("--begins", type=int, default=8, help="shared beginnings of an adapter")
    parser.add_argument("--zipf-prompts", type=int, default=4000)
    parser.add_argument("--zipf-in-flight", type=int, default=64, help="of all servers")
    options = parser.parse_args()
    shape = make_random_model.Shape.read(options.shape, options.layers)
    in_memory = "/dev/shm" if Path("/dev/shm").is_dir() else None
    with tempfile.TemporaryDirectory(prefix="dorad-bench-", dir=in_memory) as scratch:
        folder = Path(scratch)
        make_random_model.write_model(shape, folder / "model")
        scaling, prefixes, published = {}, {}, {}
        for count in options.servers if options.only in (None, "scaling") else ():
            scaling[str(count)] = found = measure_scaling(count, folder / "model", options)
            first = next(iter(scaling.values()))["tokens_per_second"]
            found["of_the_first"] = round(found["tokens_per_second"] / first, 2)
            print(json.dumps({"servers": count, **found}), flush=True)
        if options.only in (None, "prefixes"):
            adapters = {f"a{n}": folder / f"adapter-{n}" for n in range(options.adapters)}
            for seed, out in enumerate(adapters.values()):
                make_random_model.write_adapter(shape, 8, out, seed)
            for route in ROUTES:
                found = measure_prefixes(route, folder / "model", adapters, options)
                prefixes[route] = found
                print(json.dumps({"route": route, **found}), flush=True)
        if options.only in (None, "publish"):
            make_random_model.write_adapter(shape, options.rank, folder / "published")
            published = measure_publish(folder / "model", folder / "published", options)
            print(json.dumps({"published": published}), flush=True)
    tables = {"servers": scaling, "route": prefixes, "published": published}
    print(*(table_of(title, rows) for title, rows in tables.items() if rows), sep="\n\n")


if __name__ == "__main__":
    main()
