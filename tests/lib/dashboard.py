"""The Grafana dashboard as a Prometheus can answer it."""

import json
from dataclasses import dataclass
from pathlib import Path

PATH = Path(__file__).resolve().parents[2] / "deploy" / "grafana" / "dorad.json"


@dataclass(frozen=True)
class Target:
    expression: str  # with the dashboard's variables filled in
    legend: str


@dataclass(frozen=True)
class Panel:
    row: str
    title: str
    unit: str
    stacked: bool
    kind: str
    needs_gpu: bool
    targets: tuple[Target, ...]


def load() -> dict:
    return json.loads(PATH.read_text())


def panels(window: str, job: str = ".*", instance: str = ".*") -> list[Panel]:
    """window: for $__rate_interval."""
    result, row = [], ""
    for panel in load()["panels"]:
        if panel["type"] == "row":
            row = panel["title"]
            continue
        defaults = panel["fieldConfig"]["defaults"]
        targets = tuple(
            Target(
                target["expr"]
                .replace("$__rate_interval", window)
                .replace("$job", job)
                .replace("$instance", instance),
                target["legendFormat"],
            )
            for target in panel["targets"]
        )
        result.append(
            Panel(
                row,
                panel["title"],
                defaults["unit"],
                "stacking" in defaults.get("custom", {}),
                panel["type"],
                panel["title"].endswith("(GPU)"),
                targets,
            )
        )
    return result
