"""A trainer's adapter, out of its own memory into a server and to the first token with it.

    DORAD_BINARY=dorad-bundle/dorad DORAD_TEST_DEVICE=cuda python tests/bench/memory_publish.py

A server of its own with random weights; the trainer is this process, with torch's tensors on the
same GPU (without one: in this host's memory). Each line is one publish of a new version, in
milliseconds as the client sees them: until the call is answered, until the first token, of one
prompt, has come back, and what the server says of its stages. `check` lets the client hash, too.
The tokens are compared with those after a publish of the same content from a file.
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
import torch  # noqa: E402
from lib.server import device, serve  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402

PROMPT = list(range(100, 164))


def main() -> None:
    on_gpu = device() == "cuda"
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument(
        "--shape", choices=make_random_model.SHAPES, default="qwen3-8b" if on_gpu else "tiny"
    )
    parser.add_argument("--rank", type=int, default=384 if on_gpu else 16)
    parser.add_argument("--publishes", type=int, default=10)
    args = parser.parse_args()
    in_memory = "/dev/shm" if Path("/dev/shm").is_dir() else None
    with tempfile.TemporaryDirectory(prefix="dorad-bench-", dir=in_memory) as scratch:
        model, adapter = Path(scratch) / "model", Path(scratch) / "adapter"
        make_random_model.write_model(make_random_model.SHAPES[args.shape], model)
        make_random_model.write_adapter(make_random_model.SHAPES[args.shape], args.rank, adapter)
        file = adapter / "adapter_model.safetensors"
        config = json.loads((adapter / "adapter_config.json").read_text())
        tensors = {name: tensor.clone() for name, tensor in load_file(file).items()}
        if on_gpu:
            tensors = {name: tensor.cuda() for name, tensor in tensors.items()}
        socket = str(Path(scratch) / "shared_memory.sock")
        settings = {"server.shared_memory_socket": socket, "adapters.allowed_roots": f"[{scratch}]"}
        with (
            serve(model, {}, settings, timeout=300) as server,
            dorad.Client(server.grpc) as client,
            dorad.SharedTensors(socket) as shared,
        ):

            def first_token(ref: str) -> tuple:
                (sample,) = client.generate(
                    PROMPT, adapter=ref, max_tokens=1, temperature=0.0, logprobs="raw"
                )
                return list(sample.token_ids), list(sample.logprobs)

            first_token("")
            lines = []
            for check in [False] * args.publishes + [True]:
                for name, tensor in tensors.items():
                    if "lora_B" in name:
                        tensor.mul_(1.01)
                if on_gpu:
                    torch.cuda.synchronize()
                began = time.perf_counter()
                version = client.publish_from_memory(
                    "policy", shared_memory=shared, tensors=tensors, config=config, check=check,
                    keep_last=1,
                )  # fmt: skip
                answered = time.perf_counter()
                answer = first_token("policy")
                ended = time.perf_counter()
                line = {
                    "check": check,
                    "answered_ms": round(1e3 * (answered - began), 1),
                    "first_token_ms": round(1e3 * (ended - began), 1),
                    "stages_ms": {
                        stage: round(1e3 * seconds, 1)
                        for stage, seconds in dataclasses.asdict(version.timing).items()
                    },
                }
                lines.append(line)
                print(json.dumps(line), flush=True)
            save_file({name: tensor.cpu() for name, tensor in tensors.items()}, file)
            from_file = client.publish("file", path=str(adapter))
            assert from_file.digest == version.digest, "the digests differ"
            assert first_token("file") == answer, "the answers differ"
    unchecked = [line for line in lines if not line["check"]][1:]
    bytes_ = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    print(
        json.dumps(
            {
                "bytes": bytes_,
                "median_answered_ms": statistics.median(x["answered_ms"] for x in unchecked),
                "median_first_token_ms": statistics.median(x["first_token_ms"] for x in unchecked),
            }
        )
    )


if __name__ == "__main__":
    main()
