"""Figures of a scenario, and its targets, as data. Knows no process."""

from dataclasses import asdict, dataclass, field
from typing import Any

from tests.equality import MAX_CUT_FRACTION


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """An upper bound of a figure."""

    figure: str
    at_most: float
    is_speed: bool = False  # a matter of the machine as well

    def is_met_by(self, figures: "Figures") -> bool:
        value = figures.value(self.figure)
        return value is not None and value <= self.at_most

    def __str__(self) -> str:
        return f"{self.figure} ≤ {self.at_most:g}" if self.at_most else f"{self.figure} 0"


@dataclass(slots=True, kw_only=True)
class Figures:
    """Figures of a scenario; None: not measured by this scenario."""

    sent: int = 0
    accepted: int = 0
    lost: int | None = None
    duplicated: int | None = None
    missing: int | None = None
    changed: int | None = None
    cuts: int | None = None  # requests with an output compared only up to a near tie
    detect_s: float | None = None
    recover_s: float | None = None
    worst_stall_s: float | None = None
    leaked_blocks: int | None = None
    died_by_themselves: int | None = None  # services, by a fault of their own
    tracebacks: int | None = None  # in logs of services
    more: dict[str, float | int] = field(default_factory=dict)  # figures of this scenario alone
    reasons: list[str] = field(default_factory=list)  # for what should be zero and is not

    @property
    def refused(self) -> int:
        """Requests that were never accepted."""
        return self.sent - self.accepted

    @property
    def cuts_above_1_percent(self) -> int | None:
        """Cuts beyond the share of requests that near ties may cut; one is none too many."""
        return None if self.cuts is None else max(0, self.cuts - max(1, int(MAX_CUT_FRACTION * self.sent)))

    def value(self, name: str) -> float | None:
        """A figure by its name; None if it was not measured."""
        if name in self.more:
            return self.more[name]
        value: float | None = getattr(self, name, None)
        return value

    def as_json(self) -> dict[str, Any]:
        plain = {**asdict(self), "refused": self.refused, "cuts_above_1_percent": self.cuts_above_1_percent}
        for name in ("detect_s", "recover_s", "worst_stall_s"):
            if plain[name] is not None:
                plain[name] = round(plain[name], 3)
        plain["more"] = {name: round(value, 4) for name, value in self.more.items()}
        return plain


def nothing(*figures: str) -> tuple[Target, ...]:
    """Targets of counts that must be zero."""
    return tuple(Target(figure=name, at_most=0) for name in figures)


NOTHING_LOST = nothing("refused", "lost", "duplicated", "missing", "changed", "cuts_above_1_percent", "leaked_blocks")
NOTHING_CRASHES = nothing("died_by_themselves", "tracebacks")  # of every scenario, beside its own


def speed(figure: str, at_most: float) -> Target:
    """A bound on a time."""
    return Target(figure=figure, at_most=at_most, is_speed=True)
