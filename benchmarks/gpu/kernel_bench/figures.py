"""Figure of one timed launch: its share of a ceiling, its target, and the error of its result.

A figure that could not be taken keeps its place, with the reason. Pure: it knows no tensor and no device.
"""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

Unit = Literal["GB/s", "TFLOP/s", "us", "x"]
Measure = Literal["value", "share"]


@dataclass(frozen=True, slots=True)
class Target:
    """Bound that a figure has to reach."""

    measure: Measure  # of the figure: itself, or its share of the ceiling
    bound: float
    at_most: bool = False

    def is_met_by(self, reached: float) -> bool:
        return reached <= self.bound if self.at_most else reached >= self.bound

    def __str__(self) -> str:
        return f"{'≤' if self.at_most else '≥'} {f'{self.bound:.0%}' if self.measure == 'share' else f'{self.bound:g}'}"


@dataclass(frozen=True, slots=True)
class Check:
    """The largest difference to the reference in float32, and what rounding explains."""

    max_error: float
    allowed: float

    @property
    def is_right(self) -> bool:
        return self.max_error <= self.allowed  # false for NaN


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One row of the table."""

    section: str
    case: str
    by: str = "quire"
    unit: Unit
    value: float | None  # None where it was not measured; `note` says why
    us: float | None = None  # a launch takes, median
    ceiling: float | None = None  # in the same unit
    target: Target | None = None
    check: Check | None = None
    note: str = ""

    @property
    def share(self) -> float | None:
        """Share of the ceiling."""
        return None if self.value is None or self.ceiling is None else self.value / self.ceiling

    @property
    def is_met(self) -> bool | None:
        """True if the target is met; None without a target or a figure."""
        reached = self.value if self.target is None or self.target.measure == "value" else self.share
        return None if self.target is None or reached is None else self.target.is_met_by(reached)

    @property
    def is_wrong(self) -> bool:
        return self.check is not None and not self.check.is_right

    def as_json(self) -> dict[str, Any]:
        own = {**asdict(self), "target": None if self.target is None else str(self.target)}
        return {**own, "share": self.share, "is_met": self.is_met}


@dataclass(slots=True)
class Figures:
    """Figures of a run, in order."""

    rows: list[Figure] = field(default_factory=list)

    def add(self, *figures: Figure) -> None:
        self.rows += figures

    def find(self, section: str, case: str, by: str = "quire") -> Figure | None:
        """Find a measured figure, if there is one."""
        rows = (row for row in self.rows if (row.section, row.case, row.by) == (section, case, by))
        return next((row for row in rows if row.value is not None), None)

    def ceiling(self, case: str) -> float | None:
        """Value of a ceiling, whatever program found it."""
        return next((row.value for row in self.rows if (row.section, row.case) == ("ceilings", case)), None)


def not_measured(figure: Figure, reason: str) -> Figure:
    """Copy of a row without its figure."""
    return replace(figure, value=None, us=None, check=None, note=reason)


def only_tried(figure: Figure) -> Figure:
    """Strip the times from a figure: a run without a device may not report any."""
    return figure if figure.value is None else replace(figure, value=None, us=None, note="only tried, without a device")


def times_faster(case: str, figure: Figure | None, other: Figure | None, target: Target | None = None) -> Figure:
    """Figure of the speedup over the other launch."""
    row = Figure(section="comparisons", case=case, unit="x", value=None, target=target)
    if figure is None or other is None or figure.us is None or other.us is None:
        return not_measured(row, "not measured: a side of it is missing")
    return replace(row, value=other.us / figure.us)


HEAD = ("section", "case", "by", "figure", "unit", "us", "share", "target", "met", "max error", "note")


def cells(figure: Figure) -> tuple[str, ...]:
    """One row of the printed table, as `HEAD`."""
    check = figure.check
    return (
        figure.section,
        figure.case,
        figure.by,
        "not measured" if figure.value is None else f"{figure.value:.4g}",
        figure.unit,
        "" if figure.us is None else f"{figure.us:.1f}",
        "" if figure.share is None else f"{figure.share:.1%}",
        "" if figure.target is None else str(figure.target),
        {None: "", True: "yes", False: "NO"}[figure.is_met],
        "" if check is None else f"{check.max_error:.1e}{'' if check.is_right else ' WRONG'}",
        figure.note,
    )


def markdown(figures: Iterable[Figure]) -> str:
    """The rows as a table of Markdown."""
    lines = [HEAD, tuple("---" for _ in HEAD), *map(cells, figures)]
    return "\n".join(f"| {' | '.join(_escaped(line))} |" for line in lines) + "\n"


def _escaped(line: Sequence[str]) -> list[str]:
    return [cell.replace("|", "\\|").replace("\n", " ") for cell in line]
