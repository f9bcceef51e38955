"""Sleep and Wake of a server of its own with random weights: released bytes and times.

    DORAD_BINARY=dorad-bundle/dorad DORAD_TEST_DEVICE=cuda python tests/bench/sleep_wake.py

Each line is one sleep of some tags and the wake after it, seen by a client: seconds, the bytes that
the server accounted for, and those that went back by its account and (with a GPU) by the device's.
Before and after, one request gets the same tokens and log-probabilities, or the program fails.
"""

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "client" / "src"), str(ROOT / "tools")]

import dorad  # noqa: E402
import make_random_model  # noqa: E402
from lib.server import device, serve  # noqa: E402

CASES = [
    (("weights", "kv"), False),
    (("weights", "kv"), True),
    (("kv",), False),
    (("adapters",), False),
    ((), False),
]


def free_bytes() -> int | None:
    if device() != "cuda":
        return None
    import torch

    return torch.cuda.mem_get_info()[0]


def measure(client: dorad.Client, tags: tuple, keep_kv: bool) -> dict:
    def ask() -> tuple:
        (sample,) = client.generate(
            list(range(100, 400)), adapter="policy", max_tokens=64, temperature=0.0,
            ignore_eos=True, logprobs="raw",
        )  # fmt: skip
        return list(sample.token_ids), list(sample.logprobs)

    before = ask()
    held = client.info().memory_bytes
    free = free_bytes()
    began = time.perf_counter()
    freed = client.sleep(*tags, keep_kv=keep_kv)
    asleep = time.perf_counter()
    free_asleep = free_bytes()
    woke = time.perf_counter()
    client.wake(*tags)
    awake = time.perf_counter()
    after = ask()
    first = time.perf_counter()
    assert after == before, "the answer has changed"
    accounted = sum(held.get(tag, 0) for tag in freed)
    result = {
        "tags": sorted(freed),
        "keep_kv": keep_kv,
        "sleep_seconds": round(asleep - began, 4),
        "wake_seconds": round(awake - woke, 4),
        "first_answer_seconds": round(first - awake, 4),
        "accounted_bytes": accounted,
        "freed_bytes": sum(freed.values()),
        "freed_by_tag": freed,
    }
    if free is not None and free_asleep is not None:
        result["device_freed_bytes"] = free_asleep - free
        result["device_share"] = round((free_asleep - free) / max(1, accounted), 4)
    return result


def main() -> None:
    on_gpu = device() == "cuda"
    parser = argparse.ArgumentParser(description=(__doc__ or "").split(":")[0])
    parser.add_argument(
        "--shape", choices=make_random_model.SHAPES, default="qwen3-8b" if on_gpu else "tiny"
    )
    parser.add_argument("--rank", type=int, default=384 if on_gpu else 16)
    parser.add_argument("--kv-bytes", type=int, default=40_000_000_000 if on_gpu else 1 << 28)
    parser.add_argument("--no-host-weights", action="store_true", help="wake from the files")
    args = parser.parse_args()
    settings = {
        "engine.kv_bytes": args.kv_bytes,
        "adapters.host_bytes": 4 << 30 if on_gpu else 1 << 28,
        "memory.host_weights": "false" if args.no_host_weights else "true",
    }
    in_memory = "/dev/shm" if Path("/dev/shm").is_dir() else None
    with tempfile.TemporaryDirectory(prefix="dorad-bench-", dir=in_memory) as scratch:
        model, adapter = Path(scratch) / "model", Path(scratch) / "adapter"
        make_random_model.write_model(make_random_model.SHAPES[args.shape], model)
        make_random_model.write_adapter(make_random_model.SHAPES[args.shape], args.rank, adapter)
        began = time.monotonic()
        with (
            serve(model, {"policy": adapter}, settings, timeout=300) as server,
            dorad.Client(server.grpc) as client,
        ):
            print(json.dumps({"ready_seconds": round(time.monotonic() - began, 2)}), flush=True)
            for tags, keep_kv in CASES:
                for _ in range(3):
                    print(json.dumps(measure(client, tags, keep_kv)), flush=True)


if __name__ == "__main__":
    main()
