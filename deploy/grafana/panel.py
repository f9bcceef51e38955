"""A panel and its JSON.

Panels of `gpu` have no data on a server without a GPU, and their titles say so.
"""

from dataclasses import dataclass, field

GPU_MARK = " (GPU)"


@dataclass
class Panel:
    title: str
    unit: str
    targets: list  # (expression, legend)
    about: str
    stacked: bool = False
    gpu: bool = False
    kind: str = "timeseries"
    width: int = 8
    extra: dict = field(default_factory=dict)


def stat(title: str, unit: str, expression: str, about: str) -> Panel:
    return Panel(title, unit, [(expression, "")], about, kind="stat", width=4)


def field_config(panel: Panel) -> dict:
    custom = {"fillOpacity": 25 if panel.stacked else 0, "showPoints": "never"}
    if panel.stacked:
        custom["stacking"] = {"mode": "normal", "group": "A"}
    defaults = {"unit": panel.unit, "min": 0}
    if panel.kind == "timeseries":
        defaults["custom"] = custom
    return {"defaults": defaults, "overrides": []}


def panel_json(panel: Panel, number: int, x: int, y: int, height: int) -> dict:
    source = {"type": "prometheus", "uid": "${datasource}"}
    about = panel.about + (" Needs a GPU: without one there is no data." if panel.gpu else "")
    options = (
        {"reduceOptions": {"calcs": ["lastNotNull"]}, "colorMode": "value", "graphMode": "area"}
        if panel.kind == "stat"
        else {
            "legend": {"displayMode": "list", "placement": "bottom"},
            "tooltip": {"mode": "multi", "sort": "desc"},
        }
    )
    return {
        "id": number,
        "type": panel.kind,
        "title": panel.title + (GPU_MARK if panel.gpu else ""),
        "description": about,
        "datasource": source,
        "gridPos": {"x": x, "y": y, "w": panel.width, "h": height},
        "fieldConfig": field_config(panel),
        "options": options,
        "targets": [
            {
                "refId": chr(ord("A") + i),
                "datasource": source,
                "expr": expression,
                "legendFormat": legend,
            }
            for i, (expression, legend) in enumerate(panel.targets)
        ],
    }
