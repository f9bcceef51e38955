"""Where the time of loading an adapter version goes, with SmolLM2: the first version computes the
base's squared norms, the next ones find them cached.

    python tests/bench/load_versions.py [ADAPTER_DIR]
"""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "client" / "src")]

from lib.server import serve  # noqa: E402

MODEL = ROOT / ".cache" / "models" / "SmolLM2-135M-Instruct"


def main() -> None:
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / ".cache/adapters/pirate-v1"
    if not (MODEL / "config.json").exists() or not folder.exists():
        sys.exit("the demo's model or adapter is missing: run `make assets`")
    import dorad

    with serve(MODEL) as server, dorad.Client(server.grpc) as client:
        print("version   read  validate   copy   norms   total (ms)")
        for _ in range(4):
            version = client.publish("policy", path=folder)
            t = version.timing
            cells = (t.read, t.validate, t.copy, t.norms, t.total)
            print(f"{version.version:7}" + "".join(f"{1e3 * seconds:8.1f}" for seconds in cells))


if __name__ == "__main__":
    main()
