#!/usr/bin/env python3
"""Writes dorad.json, the Grafana dashboard: `python3 deploy/grafana/make_dashboard.py`.

Panels are listed in request_rows.py, resource_rows.py, fleet_rows.py, gateway_rows.py and
picker_rows.py; a test keeps the JSON equal to what this makes.
"""

import json
import sys
from pathlib import Path

from fleet_rows import FLEET_ROWS
from gateway_rows import GATEWAY_ROWS
from panel import panel_json
from picker_rows import PICKER_ROWS
from request_rows import REQUEST_ROWS
from resource_rows import RESOURCE_ROWS

OUTPUT = Path(__file__).with_name("dorad.json")
COLUMNS = 24
BUILDS = '__name__=~"dorad_(|gateway_|picker_)build_info"'  # Of every program.


def panels() -> list[dict]:
    made: list[dict] = []
    y = 0
    for title, row in [*REQUEST_ROWS, *RESOURCE_ROWS, *FLEET_ROWS, *GATEWAY_ROWS, *PICKER_ROWS]:
        made.append(
            {
                "id": len(made) + 1,
                "type": "row",
                "title": title,
                "collapsed": False,
                "gridPos": {"x": 0, "y": y, "w": COLUMNS, "h": 1},
                "panels": [],
            }
        )
        y += 1
        x = 0
        height = 4 if row[0].kind == "stat" else 8
        for panel in row:
            if x + panel.width > COLUMNS:
                x, y = 0, y + height
            made.append(panel_json(panel, len(made) + 1, x, y, height))
            x += panel.width
        y += height
    return made


def label_variable(name: str, query: str) -> dict:
    """Without an allValue: "All" means the jobs that the query lists, not every job of
    Prometheus."""
    return {
        "name": name,
        "type": "query",
        "datasource": {"type": "prometheus", "uid": "${datasource}"},
        "definition": query,
        "query": {"query": query, "refId": f"variable-{name}"},
        "refresh": 2,
        "multi": True,
        "includeAll": True,
        "current": {"selected": True, "text": ["All"], "value": ["$__all"]},
        "sort": 1,
    }


def dashboard() -> dict:
    return {
        "uid": "dorad",
        "title": "dorad",
        "description": "A server of many DoRA adapters over one model; docs/guides/monitoring.md.",
        "tags": ["dorad", "llm"],
        "schemaVersion": 39,
        "version": 1,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "timezone": "browser",
        "templating": {
            "list": [
                {
                    "name": "datasource",
                    "type": "datasource",
                    "query": "prometheus",
                    "label": "Data source",
                    "current": {},
                },
                label_variable("job", f"label_values({{{BUILDS}}}, job)"),
                label_variable("instance", f'label_values({{{BUILDS},job=~"$job"}}, instance)'),
            ]
        },
        "annotations": {"list": []},
        "links": [],
        "panels": panels(),
    }


def text() -> str:
    return json.dumps(dashboard(), indent=1) + "\n"


if __name__ == "__main__":
    OUTPUT.write_text(text())
    sys.exit(0)
