"""A line chart with two logarithmic axes, as SVG: enough to see whether a cost grows as it should.

It knows nothing of what it draws; the file needs no script, no font and no other file.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.sax.saxutils import escape

WIDTH, HEIGHT = 760, 460
LEFT, RIGHT, TOP, BOTTOM = 70, 200, 46, 54  # margins; the names of the lines stand at the right
COLOURS = ("#0b6e99", "#c2410c", "#3f7d20", "#7c3aed", "#b91c6b", "#57534e")


@dataclass(frozen=True, slots=True)
class Line:
    """Points (x, y), all above 0."""

    name: str
    points: Sequence[tuple[float, float]]
    is_dashed: bool = False


@dataclass(frozen=True, slots=True)
class Axes:
    """The range of both axes, whole powers: of 2 along x, of 10 along y."""

    x: tuple[int, int]
    y: tuple[int, int]

    def left_of(self, x: float) -> float:
        return LEFT + (math.log2(x) - self.x[0]) / (self.x[1] - self.x[0]) * (WIDTH - LEFT - RIGHT)

    def top_of(self, y: float) -> float:
        return TOP + (self.y[1] - math.log10(y)) / (self.y[1] - self.y[0]) * (HEIGHT - TOP - BOTTOM)


def log_log_chart(title: str, x_label: str, y_label: str, lines: Sequence[Line]) -> str:
    """Draw the SVG document."""
    points = [point for line in lines for point in line.points]
    xs, ys = [math.log2(x) for x, _ in points], [math.log10(y) for _, y in points]
    axes = Axes(_range(xs), _range(ys))
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" '
        'font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        _text(LEFT, 24, title, size=15),
        _text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 12, x_label, anchor="middle"),
        _text(LEFT, TOP - 8, y_label),
        *_grid(axes),
    ]
    for index, line in enumerate(lines):
        parts += _drawn(line, axes, COLOURS[index % len(COLOURS)], legend_y=TOP + 12 + 20 * index)
    return "\n".join([*parts, "</svg>", ""])


def _range(powers: Sequence[float]) -> tuple[int, int]:
    """Whole powers around all of them, at least one apart."""
    low = math.floor(min(powers))
    return low, max(low + 1, math.ceil(max(powers)))


def _grid(axes: Axes) -> list[str]:
    parts = []
    for power in range(axes.x[0], axes.x[1] + 1):
        x = axes.left_of(2**power)
        parts.append(_segment(x, TOP, x, HEIGHT - BOTTOM, "#e5e5e5"))
        parts.append(_text(x, HEIGHT - BOTTOM + 18, f"{2.0**power:g}", anchor="middle"))
    for power in range(axes.y[0], axes.y[1] + 1):
        y = axes.top_of(10**power)
        parts.append(_segment(LEFT, y, WIDTH - RIGHT, y, "#e5e5e5"))
        parts.append(_text(LEFT - 8, y + 4, f"{10.0**power:g}", anchor="end"))
    return parts


def _drawn(line: Line, axes: Axes, colour: str, legend_y: float) -> list[str]:
    """The line, a dot at each point, and its name."""
    places = [(axes.left_of(x), axes.top_of(y)) for x, y in line.points]
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    dash = ' stroke-dasharray="5 4"' if line.is_dashed else ""
    legend_x = WIDTH - RIGHT + 16
    return [
        f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.8"{dash}/>',
        *(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.6" fill="{colour}"/>' for x, y in places if not line.is_dashed),
        f'<line x1="{legend_x}" y1="{legend_y}" x2="{legend_x + 22}" y2="{legend_y}" stroke="{colour}" '
        f'stroke-width="1.8"{dash}/>',
        _text(legend_x + 28, legend_y + 4, line.name),
    ]


def _segment(x1: float, y1: float, x2: float, y2: float, colour: str) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{colour}"/>'


def _text(x: float, y: float, text: str, *, anchor: str = "start", size: int = 12) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}">{escape(text)}</text>'


def write_plots(folder: Path, documents: Mapping[str, str]) -> None:
    """Write SVG documents by name into a folder of their own, whose old ones are removed."""
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("*.svg"):
        old.unlink()
    for name, document in documents.items():
        (folder / f"{name}.svg").write_text(document)
