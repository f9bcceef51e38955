"""Seconds from `dorad serve MODEL`, without further settings, to the ready line, and of publishes
from a folder; random weights.

  DORAD_BINARY=dorad-bundle/dorad tests/bench/start_time.py [--shape qwen3-8b] [--starts 3]

The files are in the page cache: they have just been written. One JSON line a start, with what the
server chose for "auto", and one a publish, with its stages.
"""

import argparse
import dataclasses
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "client" / "src"), str(ROOT / "tools")]

import dorad  # noqa: E402
import make_random_model  # noqa: E402
from lib.server import PORTS, binary, options, start  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split(":")[0])
    parser.add_argument("--shape", choices=make_random_model.SHAPES, default="tiny")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--starts", type=int, default=3)
    parser.add_argument("--publishes", type=int, default=5)
    args = parser.parse_args()
    shape = make_random_model.SHAPES[args.shape]
    in_memory = "/dev/shm" if Path("/dev/shm").is_dir() else None
    with tempfile.TemporaryDirectory(prefix="dorad-bench-", dir=in_memory) as scratch:
        model, adapter = Path(scratch) / "model", Path(scratch) / "adapter"
        make_random_model.write_model(shape, model)
        make_random_model.write_adapter(shape, args.rank, adapter)
        size = sum(file.stat().st_size for file in model.glob("*.safetensors"))
        line = [str(binary()), "serve", str(model), *options(PORTS)]
        line += options({"adapters.allowed_roots": f"[{scratch}]"})
        seconds = []
        for turn in range(args.starts):
            began = time.perf_counter()
            server = start(line, Path(scratch) / "server.log", timeout=300)
            seconds.append(time.perf_counter() - began)
            log = [json.loads(text) for text in server.log().splitlines()]
            said = {"ready_seconds": round(seconds[-1], 2), "model_bytes": size}
            for entry in log:
                if entry["msg"] == "model loaded":
                    said["weights_seconds"] = round(entry["seconds"], 2)
                if entry["msg"].startswith("values chosen"):
                    said["chosen"] = {k: v for k, v in entry.items() if k not in ("ts", "level")}
            print(json.dumps(said), flush=True)
            if turn == args.starts - 1:
                publish(server.grpc, adapter, args.publishes)
            server.wire.close()
            server.stop()
        print(json.dumps({"median_ready_seconds": round(statistics.median(seconds), 2)}))


def publish(target: str, adapter: Path, times: int) -> None:
    size = (adapter / "adapter_model.safetensors").stat().st_size
    seconds = []
    with dorad.Client(target) as client:
        for _ in range(times):
            began = time.perf_counter()
            version = client.publish("policy", path=str(adapter), server_side=True, keep_last=1)
            seconds.append(time.perf_counter() - began)
            stages = {k: round(v, 3) for k, v in dataclasses.asdict(version.timing).items()}
            print(json.dumps({"publish_seconds": round(seconds[-1], 3), "stages": stages}))
    median = round(statistics.median(seconds), 3)
    print(json.dumps({"adapter_bytes": size, "median_publish_seconds": median}), flush=True)


if __name__ == "__main__":
    main()
