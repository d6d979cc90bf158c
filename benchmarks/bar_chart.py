"""Horizontal bars of shares from 0 to 1, with a mark where each should reach, as SVG.

It knows nothing of what it draws; the file needs no script, no font and no other file.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

from benchmarks.svg_chart import COLOURS

LEFT, RIGHT, TOP, BAR, LABEL = 400, 60, 50, 16, 420  # px; names stand at the left
WIDTH = LEFT + LABEL + RIGHT
GAP = 4


@dataclass(frozen=True, slots=True)
class Bar:
    """One line; bars of one maker have one colour."""

    name: str
    by: str
    share: float
    target: float | None = None


def bar_chart(title: str, bars: Sequence[Bar]) -> str:
    """Draw the SVG document."""
    makers = list(dict.fromkeys(bar.by for bar in bars))
    height = TOP + len(bars) * (BAR + GAP) + 30
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="sans-serif" '
        'font-size="11">',
        f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
        f'<text x="12" y="24" font-size="15">{escape(title)}</text>',
    ]
    for tenth in range(0, 11, 2):
        x = LEFT + LABEL * tenth / 10
        parts.append(f'<line x1="{x}" y1="{TOP}" x2="{x}" y2="{height - 26}" stroke="#e5e5e5"/>')
        parts.append(f'<text x="{x}" y="{height - 12}" text-anchor="middle">{tenth / 10:.0%}</text>')
    for index, bar in enumerate(bars):
        parts += _drawn(bar, COLOURS[makers.index(bar.by) % len(COLOURS)], TOP + index * (BAR + GAP))
    return "\n".join([*parts, "</svg>", ""])


def _drawn(bar: Bar, colour: str, top: int) -> list[str]:
    length = LABEL * min(1.1, max(0.0, bar.share))
    middle = top + BAR - 4
    parts = [
        f'<text x="{LEFT - 8}" y="{middle}" text-anchor="end">{escape(f"{bar.name} · {bar.by}")}</text>',
        f'<rect x="{LEFT}" y="{top}" width="{length:.1f}" height="{BAR}" fill="{colour}"/>',
        f'<text x="{LEFT + length + 5:.1f}" y="{middle}">{bar.share:.1%}</text>',
    ]
    if bar.target is not None:
        x = LEFT + LABEL * bar.target
        parts.append(f'<line x1="{x:.1f}" y1="{top - 2}" x2="{x:.1f}" y2="{top + BAR + 2}" stroke="black"/>')
    return parts
