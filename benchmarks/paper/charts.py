"""Line charts and grouped bars as SVG, with linear or logarithmic axes: the paper's figures and ours in one plot.

It knows nothing of what it draws; the file needs no script, no font and no other file.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from xml.sax.saxutils import escape

from benchmarks.svg_chart import COLOURS

WIDTH, HEIGHT = 760, 400
LEFT, RIGHT, TOP, BOTTOM = 64, 210, 46, 50  # margins; names stand at the right


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """Points (x, y). `is_paper`: reported by the paper, drawn as rings and a dashed line."""

    name: str
    points: Sequence[tuple[float, float]]
    colour: int = 0
    is_paper: bool = False
    has_line: bool = True


@dataclass(frozen=True, slots=True)
class Bars:
    """One bar of each group, None for no bar; `is_paper` as for a series."""

    name: str
    values: Sequence[float | None]
    colour: int = 0
    is_paper: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """Axis with `ticks` from its low to its high end."""

    label: str
    ticks: Sequence[float]
    is_log: bool = False

    def part(self, value: float) -> float:
        """Place of a value: 0 at the low end, 1 at the high one; values beyond an end are drawn there."""
        low, high = self.ticks[0], self.ticks[-1]
        if self.is_log:
            value, low, high = math.log(max(value, low)), math.log(low), math.log(high)
        return min(1.0, max(0.0, (value - low) / (high - low)))


def linear_axis(label: str, highest: float) -> Axis:
    """Make an axis from 0 to at least the highest value, in four to eight even steps."""
    magnitude = 10 ** math.floor(math.log10(highest / 4))
    step = next(each * magnitude for each in (1, 2, 5, 10) if highest / (each * magnitude) <= 8)
    return Axis(label=label, ticks=[step * index for index in range(math.ceil(highest / step) + 1)])


def line_chart(title: str, x: Axis, y: Axis, series: Sequence[Series]) -> str:
    """Draw the SVG document."""
    parts = _frame(title, y)
    for tick in x.ticks:
        left = _left(x, tick)
        parts.append(_segment(left, TOP, left, HEIGHT - BOTTOM, "#e5e5e5"))
        parts.append(_text(left, HEIGHT - BOTTOM + 18, f"{tick:g}", anchor="middle"))
    parts.append(_text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 10, x.label, anchor="middle"))
    for index, each in enumerate(series):
        places = [(_left(x, a), _top(y, b)) for a, b in each.points]
        parts += _drawn(each, places)
        parts += _drawn(
            each, [(WIDTH - RIGHT + 16.0, TOP + 12.0 + 18 * index), (WIDTH - RIGHT + 38.0, TOP + 12.0 + 18 * index)]
        )
        parts.append(_text(WIDTH - RIGHT + 46, TOP + 16 + 18 * index, each.name))
    return "\n".join([*parts, "</svg>", ""])


def bar_chart(title: str, y: Axis, groups: Sequence[str], bars: Sequence[Bars]) -> str:
    """The whole document; the values of each bars stand beside the groups."""
    parts = _frame(title, y)
    room = (WIDTH - LEFT - RIGHT) / len(groups)
    width = room * 0.84 / len(bars)
    for group, name in enumerate(groups):
        begin = LEFT + room * (group + 0.08)
        parts.append(_text(LEFT + room * (group + 0.5), HEIGHT - BOTTOM + 18, name, anchor="middle"))
        for index, each in enumerate(bars):
            value = each.values[group]
            if value is None:
                continue
            top = _top(y, value)
            parts.append(_bar(begin + width * index, top, width - 1, HEIGHT - BOTTOM - top, each))
            parts.append(_text(begin + width * (index + 0.5), top - 3, f"{value:.3g}", anchor="middle", size=9))
    for index, each in enumerate(bars):
        parts.append(_bar(WIDTH - RIGHT + 16, TOP + 5 + 18 * index, 22, 11, each))
        parts.append(_text(WIDTH - RIGHT + 46, TOP + 15 + 18 * index, each.name))
    return "\n".join([*parts, "</svg>", ""])


def _frame(title: str, y: Axis) -> list[str]:
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" '
        'font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        _text(LEFT, 22, title, size=15),
        _text(LEFT, TOP - 8, y.label),
    ]
    for tick in y.ticks:
        top = _top(y, tick)
        parts.append(_segment(LEFT, top, WIDTH - RIGHT, top, "#e5e5e5"))
        parts.append(_text(LEFT - 8, top + 4, f"{tick:g}", anchor="end"))
    return parts


def _drawn(series: Series, places: Sequence[tuple[float, float]]) -> list[str]:
    colour = COLOURS[series.colour % len(COLOURS)]
    dash = ' stroke-dasharray="5 4"' if series.is_paper else ""
    fill = "white" if series.is_paper else colour
    parts = []
    if series.has_line:
        for (x1, y1), (x2, y2) in pairwise(places):
            parts.append(
                f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{colour}" '
                f'stroke-width="1.8"{dash}/>'
            )
    radius = 4.5 if series.is_paper else 2.6
    parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius}" fill="{fill}" stroke="{colour}"/>' for x, y in places]
    return parts


def _bar(x: float, y: float, width: float, height: float, bars: Bars) -> str:
    own = COLOURS[bars.colour % len(COLOURS)]
    paint = f'fill="white" stroke="{own}" stroke-dasharray="3 2"' if bars.is_paper else f'fill="{own}" stroke="{own}"'
    return f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{max(0.0, height):.1f}" {paint}/>'


def _left(axis: Axis, value: float) -> float:
    return LEFT + axis.part(value) * (WIDTH - LEFT - RIGHT)


def _top(axis: Axis, value: float) -> float:
    return HEIGHT - BOTTOM - axis.part(value) * (HEIGHT - TOP - BOTTOM)


def _segment(x1: float, y1: float, x2: float, y2: float, colour: str) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{colour}"/>'


def _text(x: float, y: float, text: str, *, anchor: str = "start", size: int = 12) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}">{escape(text)}</text>'
