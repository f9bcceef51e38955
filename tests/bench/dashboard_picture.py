"""Draws the Grafana dashboard's panels, from a run of a server and a Prometheus of its own.

    python tests/bench/dashboard_picture.py [--seconds 120] [--all] [--output FILE.svg]

Draws a selection, or all panels but those that need a GPU, section by section.
The server serves a small model with random weights; trainer, rollout workers and those who do
everything wrong are tests/lib/traffic.py.
"""

import argparse
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "client" / "src")]

from lib import adapters, dashboard, tiny_models  # noqa: E402
from lib.oracle import Oracle  # noqa: E402
from lib.prometheus import Prometheus, prometheus, target_of, write_config  # noqa: E402
from lib.server import serve  # noqa: E402
from lib.svg_charts import Chart, Line, picture  # noqa: E402
from lib.traffic import settings, traffic  # noqa: E402

FAMILY = tiny_models.BY_NAME["slow"]
VOCABULARY = 2048
CONTEXT = 192  # of the prompts and answers here
ADAPTERS = 4
SELECTION = [
    *("Time to first token", "Inter-token latency", "End-to-end latency"),
    *("Tokens", "Tokens by adapter", "Requests"),
    *("Batch and queue", "Step time", "Step time split"),
    *("Load time by stage", "Loads and swaps", "Failures by reason"),
    *("Evictions and recalls", "Swap stalls", "Versions"),
    *("KV pages", "Prefix cache hits", "Server's memory by kind"),
]
STEP = 2.0
WINDOW = "20s"
QUIET = 10.0  # before the traffic


def legend_of(pattern: str, labels: dict[str, str]) -> str:
    for name, value in labels.items():
        pattern = pattern.replace("{{" + name + "}}", value)
    return pattern


def chart_of(panel: dashboard.Panel, server: Prometheus, begin: float, end: float) -> Chart:
    lines = []
    for target in panel.targets:
        for series in server.query_range(target.expression, begin, end, STEP):
            points = [(float(at) - begin, float(value)) for at, value in series["values"]]
            numbers = [(at, value) for at, value in points if value == value]
            name = legend_of(target.legend, series["metric"]) or panel.title
            if numbers:
                lines.append(Line(name, numbers))
    return Chart(panel.title, panel.unit, lines, panel.stacked)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--output", type=Path, default=ROOT / "docs" / "images" / "dashboard.svg")
    parser.add_argument("--all", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="dorad-picture-") as name:
        scratch = Path(name)
        model = tiny_models.make(FAMILY, scratch / "model")
        base, kind = Oracle(model).base, adapters.BY_NAME["dora_r64"]
        folders = [
            adapters.make(base, kind, scratch / f"adapter-{i}", seed=i) for i in range(ADAPTERS)
        ]
        with serve(model, {"probe": folders[0]}) as probe:
            size = probe.wire.adapter("probe").resident_bytes
        limits = settings(scratch / "store", size, **{"engine.kv_bytes": 64 << 20})
        with (
            serve(model, None, limits) as server,
            prometheus(
                write_config(scratch / "prometheus.yml", [target_of(server.metrics_url)]),
                scratch / "data",
            ) as observer,
        ):
            begin = time.time() + 1
            time.sleep(1 + QUIET)
            with traffic(server, folders, VOCABULARY, CONTEXT, pace=2.0):
                time.sleep(options.seconds - QUIET)
            charts, sections = {}, {}
            for panel in dashboard.panels(WINDOW):
                if panel.kind == "timeseries" and not panel.needs_gpu:
                    chart = chart_of(panel, observer, begin, begin + options.seconds)
                    charts[panel.title] = chart
                    sections.setdefault(panel.row, []).append(chart)
            if not options.all:
                sections = {"": [charts[title] for title in SELECTION]}
    options.output.parent.mkdir(parents=True, exist_ok=True)
    caption = (
        "dorad: a small model, five DoRA adapters, two cores; minutes since the begin, "
        "last values in the legends"
    )
    options.output.write_text(picture(list(sections.items()), options.seconds, caption))
    print(f"{options.output}: {options.output.stat().st_size / 1024:.0f} KiB")


if __name__ == "__main__":
    main()
