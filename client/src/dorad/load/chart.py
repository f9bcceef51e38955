"""The reports of a sweep as one HTML page, with charts in SVG. It needs no other file."""

from __future__ import annotations

import html
import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from dorad._jsonable import to_jsonable

_WIDTH, _HEIGHT = 520, 300
_LEFT, _RIGHT, _TOP, _BOTTOM = 70, 16, 34, 44
_COLOURS = ("#1f6feb", "#d1242f", "#1a7f37")
_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2em auto; max-width: 1120px; color: #1f2328 }
table { border-collapse: collapse } th, td { padding: .25em .8em; text-align: right }
th { border-bottom: 1px solid #888 } figure { display: inline-block; margin: 0 1em 1em 0 }
svg { font: 12px system-ui, sans-serif } details { margin-top: 1em } .note { color: #d1242f }
"""


class Line(NamedTuple):
    """One curve: y over x. None: no value there."""

    name: str
    values: Sequence[float | None]


def load_of(report: Mapping[str, Any]) -> float:
    """The offered load: requests a second, or requests in flight."""
    return float(report["offered_rate"] or report["concurrency"])


def percentile(report: Mapping[str, Any], name: str, which: str) -> float | None:
    """Milliseconds, or None without an answer."""
    row = report[name]
    return None if row is None else float(row[which])


def _ticks(low: float, high: float) -> list[float]:
    """About five round numbers in [low, high]."""
    step = 10 ** math.floor(math.log10((high - low) / 4))
    step *= next(f for f in (1, 2, 5, 10) if (high - low) / (step * f) <= 6)
    first = math.ceil(low / step - 1e-9)
    return [i * step for i in range(first, math.floor(high / step + 1e-9) + 1)]


def _chart(title: str, x_name: str, xs: Sequence[float], lines: Sequence[Line]) -> str:
    """A chart from zero on, with a mark for each value."""
    right = max(xs)
    top = max([v for line in lines for v in line.values if v is not None], default=0.0) or 1.0
    across = (_WIDTH - _LEFT - _RIGHT) / right
    up = (_HEIGHT - _TOP - _BOTTOM) / (top * 1.05)

    def at(x: float, y: float) -> tuple[float, float]:
        return _LEFT + x * across, _HEIGHT - _BOTTOM - y * up

    parts = [f'<text x="{_LEFT}" y="16" font-weight="600">{html.escape(title)}</text>']
    for x in _ticks(0, right):
        px, py = at(x, 0)
        parts.append(f'<text x="{px:.1f}" y="{py + 18:.1f}" text-anchor="middle">{x:g}</text>')
    for y in _ticks(0, top):
        px, py = at(0, y)
        parts.append(
            f'<line x1="{px}" y1="{py:.1f}" x2="{_WIDTH - _RIGHT}" y2="{py:.1f}" stroke="#ddd"/>'
            f'<text x="{px - 6}" y="{py + 4:.1f}" text-anchor="end">{y:g}</text>'
        )
    middle = (_LEFT + _WIDTH - _RIGHT) / 2
    parts.append(
        f'<text x="{middle}" y="{_HEIGHT - 6}" text-anchor="middle">{html.escape(x_name)}</text>'
    )
    for number, (line, colour) in enumerate(zip(lines, _COLOURS, strict=False)):
        points = [at(x, y) for x, y in zip(xs, line.values, strict=True) if y is not None]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in points]
        if len(lines) > 1:
            parts.append(
                f'<text x="{_WIDTH - _RIGHT}" y="{16 + 14 * number}" text-anchor="end" '
                f'fill="{colour}">{html.escape(line.name)}</text>'
            )
    return f'<figure><svg width="{_WIDTH}" height="{_HEIGHT}">{"".join(parts)}</svg></figure>'


def _milliseconds(name: str, which: str) -> Callable[[Mapping[str, Any]], str]:
    def cell(report: Mapping[str, Any]) -> str:
        value = percentile(report, name, which)
        return "-" if value is None else f"{value:.1f}"

    return cell


COLUMNS: dict[str, Callable[[Mapping[str, Any]], str]] = {
    "requests/s": lambda report: f"{report['requests_per_second']:.2f}",
    "tokens/s": lambda report: f"{report['generated_tokens_per_second']:.1f}",
    "first token p50": _milliseconds("ttft_ms", "p50"),
    "first token p99": _milliseconds("ttft_ms", "p99"),
    "between tokens p50": _milliseconds("itl_ms", "p50"),
    "between tokens p99": _milliseconds("itl_ms", "p99"),
    "end to end p50": _milliseconds("e2e_ms", "p50"),
    "end to end p99": _milliseconds("e2e_ms", "p99"),
    "refused": lambda report: str(report["refused"]["requests"]),
    "failed": lambda report: str(report["failed"]),
}
"""The columns of a sweep's table; times are milliseconds."""


def page(reports: Sequence[Mapping[str, Any]]) -> str:
    """The page. `reports` are those of one loop, by rising load."""
    xs = [load_of(report) for report in reports]
    is_open = reports[0]["loop"] == "open"
    x_name = "offered requests a second" if is_open else "requests in flight"

    def chart(title: str, name: str) -> str:
        lines = [
            Line(which, [percentile(report, name, which) for report in reports])
            for which in ("p50", "p99")
        ]
        return _chart(title, x_name, xs, lines)

    generated = [Line("", [report["generated_tokens_per_second"] for report in reports])]
    charts = [
        _chart("Generated tokens a second", x_name, xs, generated),
        chart("First token, ms", "ttft_ms"),
        chart("Between tokens, ms", "itl_ms"),
        chart("End to end, ms", "e2e_ms"),
    ]
    head = "".join(f"<th>{html.escape(column)}</th>" for column in (x_name, *COLUMNS))
    rows = "".join(
        f"<tr><td>{x:g}</td>"
        + "".join(f"<td>{cell(r)}</td>" for cell in COLUMNS.values())
        + "</tr>"
        for x, r in zip(xs, reports, strict=True)
    )
    limited = [f"{x:g}" for x, r in zip(xs, reports, strict=True) if r["generator"]["bottleneck"]]
    note = (
        f'<p class="note">The load generator was the bottleneck at {", ".join(limited)}: those '
        "figures show its limits, not the server's.</p>"
        if limited
        else ""
    )
    data = html.escape(json.dumps(to_jsonable(list(reports)), indent=1), quote=False)
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>dorad-load</title>'
        f"<style>{_STYLE}</style></head><body><h1>dorad-load</h1>{note}{''.join(charts)}"
        f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"
        f"<details><summary>Reports</summary><pre>{data}</pre></details></body></html>\n"
    )
