"""Verdicts on the rows of the figures: each claim of the paper, our figure, and whether it is met.

Reads rows alone, so that it can be asked again at any time.
"""

from dataclasses import dataclass

from benchmarks.paper.jobs import Row
from benchmarks.paper.published import FIG12, FIG16_TEXT, NAMES, ORCAS, System

FIG2_POINTS = 4.0
RATIO_PART = 0.15
FIG15_POINTS = 1.0
Figures = dict[str, list[Row]]


@dataclass(frozen=True, slots=True)
class Verdict:
    """One line of the table."""

    figure: str
    claim: str
    paper: float
    ours: float
    difference: str
    verdict: str  # met, not met or reported


def verdicts(figures: Figures) -> list[Verdict]:
    """Verdicts of the figures that are present."""
    found: list[Verdict] = []
    for row in figures.get("fig2", []):
        claim = f"Fig. 2, {fig2_reading(row)}: token states of {NAMES[row['system']]}, %"
        found.append(_points("fig2", claim, row["paper"][0], row["use"][0], FIG2_POINTS))
    found += _fig12(figures.get("fig12", []))
    for row in figures.get("fig13", []):
        claim = f"Fig. 13, {row['dataset']}{_costs(row)}: requests batched by {NAMES[row['system']]}"
        allowed = RATIO_PART if row["system"] in ORCAS else None
        found.append(_part("fig13", claim, row["paper"], row["batch"], allowed))
    found += _fig14(figures.get("fig14", []))
    found += _fig15(figures.get("fig15", []))
    found += _fig16(figures.get("fig16", []))
    found += _fig17(figures.get("fig17", []))
    return found


def fig2_reading(row: Row) -> str:
    """Name the load of a row."""
    return f"{row['rate']:g} requests/s{_costs(row)}"


def rates(rows: list[Row], **wanted: object) -> dict[System, float]:
    """Rates of the rows with these values, by system."""
    return {row["system"]: row["capacity"] for row in rows if all(row[key] == each for key, each in wanted.items())}


def _fig12(rows: list[Row]) -> list[Verdict]:
    found = []
    for (model, dataset), paper in FIG12.items():
        for factor in sorted({row["cost_factor"] for row in rows}):
            ours = rates(rows, model=model, dataset=dataset, cost_factor=factor)
            if "quire" not in ours:
                continue
            for system in ours:
                if system == "quire":
                    continue
                costs = "" if factor == 1 else f", costs × {factor}"
                claim = f"Fig. 12, {model}, {dataset}{costs}: rate over that of {NAMES[system]}"
                allowed = RATIO_PART if system in ORCAS and model == "opt-13b" else None
                ratio = ours["quire"] / ours[system]
                found.append(_part("fig12", claim, paper["quire"] / paper[system], ratio, allowed))
    return found


def _fig14(rows: list[Row]) -> list[Verdict]:
    found = []
    for sharing, width in dict.fromkeys((row["sharing"], row["width"]) for row in rows):
        own = [row for row in rows if (row["sharing"], row["width"]) == (sharing, width)]
        claim = f"Fig. 14, {sharing} {width}: rate over that of Orca (Oracle)"
        found.append(_ratio("fig14", claim, own))
    return found


def _fig15(rows: list[Row]) -> list[Verdict]:
    found = []
    for row in rows:
        if row["paper"] is None:
            continue
        reading = f", {row['nats']} nats a token" if row["sharing"] == "beam" else ""
        claim = f"Fig. 15, {row['sharing']} {row['width']}, {row['dataset']}{reading}: blocks saved, %"
        is_claimed = row["sharing"] == "parallel" and row["dataset"] == "alpaca"
        allowed = FIG15_POINTS if is_claimed else None
        found.append(_points("fig15", claim, row["paper"], row["saving"], allowed))
    return found


def _fig16(rows: list[Row]) -> list[Verdict]:
    found = []
    for prefix, lengths in dict.fromkeys((row["prefix"], row["lengths"]) for row in rows):
        own = [row for row in rows if (row["prefix"], row["lengths"]) == (prefix, lengths)]
        claim = f"Fig. 16, prefix of {prefix} tokens, {lengths}: rate over that of Orca (Oracle)"
        found.append(_ratio("fig16", claim, own, paper=FIG16_TEXT[prefix]))
    return found


def _fig17(rows: list[Row]) -> list[Verdict]:
    found = []
    for conversations in dict.fromkeys(row["conversations"] for row in rows):
        for system in ("oracle", "max"):
            pair = [row for row in rows if row["conversations"] == conversations and row["system"] in (system, "quire")]
            claim = f"Fig. 17, {conversations}: rate over that of {NAMES[pair[0]['system']]}"
            found.append(_ratio("fig17", claim, pair))
    return found


def _ratio(figure: str, claim: str, rows: list[Row], paper: float | None = None) -> Verdict:
    """Compare Quire's row with the other system's."""
    other, quire = sorted(rows, key=lambda row: bool(row["system"] == "quire"))
    paper = paper or quire["paper"] / other["paper"]
    return _part(figure, claim, paper, quire["capacity"] / other["capacity"], None)


def _points(figure: str, claim: str, paper: float, ours: float, allowed: float | None) -> Verdict:
    difference = ours - paper
    return Verdict(
        figure, claim, paper, round(ours, 2), f"{difference:+.1f} points", _verdict(abs(difference), allowed)
    )


def _part(figure: str, claim: str, paper: float, ours: float, allowed: float | None) -> Verdict:
    difference = ours / paper - 1
    verdict = _verdict(abs(difference), allowed)
    return Verdict(figure, claim, round(paper, 2), round(ours, 2), f"{100 * difference:+.1f} %", verdict)


def _verdict(difference: float, allowed: float | None) -> str:
    if allowed is None:
        return "reported"
    return "met" if difference <= allowed else "not met"


def _costs(row: Row) -> str:
    return "" if row["cost_factor"] == 1 else f", costs × {row['cost_factor']}"
