"""Time series as charts in one SVG picture, without any library: a grid of panels with axes, units
and legends."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

COLOURS = [
    "#3274d9",
    "#e0752d",
    "#2f9e44",
    "#c4162a",
    "#8f3bb8",
    "#b8860b",
    "#0f9aa6",
    "#d6478f",
    "#6b7280",
    "#7a5230",
    "#5f8f00",
    "#1f4e79",
]
WIDTH, HEIGHT, GAP = 400, 214, 14
LEFT, RIGHT, TOP, PLOT = 52, 12, 30, 122
LEGEND_ROW, LEGEND_ROWS, LETTER = 13, 3, 5.9
HEADING = 30
GREY, TEXT = "#d9dce1", "#333840"


@dataclass(frozen=True)
class Line:
    name: str
    points: Sequence[tuple[float, float]]  # seconds since the begin, value


@dataclass(frozen=True)
class Chart:
    title: str
    unit: str  # a Grafana unit
    lines: Sequence[Line]
    stacked: bool = False
    remark: str = ""  # in the place of lines, when there are none


def scaled(value: float, steps: Sequence[tuple[float, str]]) -> str:
    for factor, suffix in steps:
        if abs(value) >= factor:
            return f"{value / factor:.3g}{suffix}"
    return f"{value:.2g}"


def seconds(value: float) -> str:
    return (
        scaled(value, [(1, " s"), (1e-3, " ms")]) if abs(value) >= 1e-3 else f"{value * 1e6:.3g} µs"
    )


FORMATS: dict[str, Callable[[float], str]] = {
    "s": seconds,
    "bytes": lambda v: scaled(v, [(2**30, " GiB"), (2**20, " MiB"), (2**10, " KiB"), (1, " B")]),
    "percentunit": lambda v: f"{100 * v:.3g} %",
    "reqps": lambda v: f"{v:.3g}/s",
    "short": lambda v: scaled(v, [(1e6, "M"), (1e3, "k")]) if abs(v) >= 1e3 else f"{v:.3g}",
}


def formatted(value: float, unit: str) -> str:
    return "0" if value == 0 else FORMATS[unit](value)


def top_of(largest: float, unit: str) -> tuple[float, int]:
    """A round end of the axis at or above the largest value, and its number of parts."""
    if largest <= 0:
        return 1.0, 2
    base = 1024.0 if unit == "bytes" else 1000.0
    scale = 1.0
    if unit == "bytes":
        scale = base ** math.floor(math.log(largest, base)) if largest >= 1 else 1.0
    power = scale * 10 ** math.floor(math.log10(largest / scale))
    for step, parts in ((1, 4), (1.2, 4), (1.6, 4), (2, 4), (3, 3), (4, 4), (5, 5), (6, 3), (8, 4)):
        if step * power >= largest:
            return step * power, parts
    return 10 * power, 4


def clock(value: float) -> str:
    return f"{int(value) // 60}:{int(value) % 60:02d}"


def stack(lines: Sequence[Line]) -> list[Line]:
    """Each stacked on the earlier ones; a line without a point at a time counts as 0 there."""
    heights: dict[float, float] = {}
    result = []
    times = sorted({time for line in lines for time, _ in line.points})
    for line in lines:
        here = dict(line.points)
        points = []
        for time in times:
            heights[time] = heights.get(time, 0.0) + here.get(time, 0.0)
            points.append((time, heights[time]))
        result.append(Line(line.name, points))
    return result


def legend(lines: Sequence[Line], unit: str, y: float) -> list[str]:
    """Names with their last values, as many as fit."""
    out, x, row = [], float(LEFT), 0
    for i, line in enumerate(lines):
        label = f"{line.name}: {formatted(line.points[-1][1], unit)}"
        width = 22 + LETTER * len(label)
        if x + width > WIDTH - RIGHT and x > LEFT:
            x, row = float(LEFT), row + 1
        if row == LEGEND_ROWS - 1 and i < len(lines) - 1 and x + 2 * width > WIDTH - RIGHT:
            out.append(
                f'<text x="{x:.0f}" y="{y + row * LEGEND_ROW:.0f}">… {len(lines) - i} more</text>'
            )
            break
        colour = COLOURS[i % len(COLOURS)]
        at = y + row * LEGEND_ROW
        out.append(f'<rect x="{x:.0f}" y="{at - 6:.0f}" width="9" height="3" fill="{colour}"/>')
        out.append(f'<text x="{x + 13:.0f}" y="{at:.0f}">{escape(label)}</text>')
        x += width
    return out


def chart_svg(chart: Chart, span: float, x: float, y: float) -> list[str]:
    out = [f'<g transform="translate({x:.0f},{y:.0f})">']
    out.append(f'<rect width="{WIDTH}" height="{HEIGHT}" rx="3" fill="#fff" stroke="{GREY}"/>')
    out.append(f'<text class="t" x="10" y="18">{escape(chart.title)}</text>')
    lines = [line for line in chart.lines if line.points]
    if not lines:
        middle = f'x="{WIDTH / 2:.0f}" y="{TOP + PLOT / 2:.0f}" text-anchor="middle"'
        out.append(f"<text {middle}>{escape(chart.remark or 'no data')}</text></g>")
        return out
    drawn = stack(lines) if chart.stacked else lines
    largest = max(value for line in drawn for _, value in line.points)
    top, parts = top_of(largest, chart.unit)
    across = WIDTH - LEFT - RIGHT

    def place(time: float, value: float) -> str:
        return f"{LEFT + across * time / span:.1f},{TOP + PLOT * (1 - value / top):.1f}"

    for i in range(parts + 1):
        at = TOP + PLOT * (1 - i / parts)
        out.append(f'<path d="M{LEFT} {at:.1f}h{across}" stroke="{GREY}" stroke-width=".7"/>')
        label = formatted(top * i / parts, chart.unit)
        out.append(f'<text x="{LEFT - 5}" y="{at + 3:.1f}" text-anchor="end">{label}</text>')
    for i in range(4):
        time = span * i / 3
        anchor = ("start", "middle", "middle", "end")[i]
        at = LEFT + across * i / 3
        label = clock(time)
        out.append(
            f'<text x="{at:.0f}" y="{TOP + PLOT + 13}" text-anchor="{anchor}">{label}</text>'
        )
    order = list(enumerate(drawn))
    for i, line in reversed(order) if chart.stacked else order:
        colour = COLOURS[i % len(COLOURS)]
        path = "L".join(place(time, value) for time, value in line.points)
        if chart.stacked:
            below = drawn[i - 1].points if i else [(time, 0.0) for time, _ in line.points]
            back = "L".join(place(time, value) for time, value in reversed(below))
            out.append(f'<path d="M{path}L{back}Z" fill="{colour}" fill-opacity=".3"/>')
        out.append(f'<path d="M{path}" fill="none" stroke="{colour}" stroke-width="1.4"/>')
    out += legend(lines, chart.unit, TOP + PLOT + 30)
    out.append("</g>")
    return out


def picture(sections: Sequence[tuple[str, Sequence[Chart]]], span: float, caption: str) -> str:
    """Sections of charts, three in a row; span: seconds on each time axis."""
    body: list[str] = []
    y = float(GAP + 16)
    body.append(f'<text class="t" x="{GAP}" y="{y - 2:.0f}">{escape(caption)}</text>')
    y += GAP
    for title, charts in sections:
        if title:
            body.append(f'<text class="h" x="{GAP}" y="{y + 14:.0f}">{escape(title)}</text>')
            y += HEADING - 6
        for i, chart in enumerate(charts):
            body += chart_svg(chart, span, GAP + (i % 3) * (WIDTH + GAP), y)
            if i % 3 == 2 or i == len(charts) - 1:
                y += HEIGHT + GAP
    width, height = 3 * (WIDTH + GAP) + GAP, int(y)
    style = (
        f"text{{font:10px Helvetica,Arial,sans-serif;fill:{TEXT}}}"
        ".t{font-size:12px;font-weight:bold}.h{font-size:14px;font-weight:bold}"
    )
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
            f'width="{width}" height="{height}">',
            f"<style>{style}</style>",
            f'<rect width="{width}" height="{height}" fill="#f4f5f7"/>',
            *body,
            "</svg>",
            "",
        ]
    )
