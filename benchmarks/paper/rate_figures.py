"""Figs. 12, 14, 16 and 17: the rates at which requests take 0.5 s a token."""

from collections.abc import Callable, Iterator
from functools import partial

from benchmarks.lengths import Dataset
from benchmarks.paper.capacity import capacity
from benchmarks.paper.cost_model import SLOWER
from benchmarks.paper.jobs import Job, Row, Scale
from benchmarks.paper.other_lengths import CHATS, TRANSLATIONS, chat_lengths, translation_lengths
from benchmarks.paper.published import FIG12, FIG14, FIG16, FIG17, SYSTEMS, ModelName, Sharing, System
from benchmarks.paper.random_beams import CONCENTRATIONS, RandomBeams
from benchmarks.paper.served_model import MODELS
from benchmarks.paper.systems import serve
from benchmarks.paper.trace import SEED, Draw, paper_lengths, poisson_trace

AGAINST_ORACLE: tuple[System, ...] = ("oracle", "quire")
IN_CHATS: tuple[System, ...] = ("max", "pow2", "oracle", "quire")
# Where the search begins; it ends at the same rate wherever that is. Elsewhere it begins at the paper's rate.
GUESSES: dict[tuple[ModelName, Dataset, System], float] = {
    ("opt-13b", "sharegpt", "quire"): 2.35,
    ("opt-13b", "alpaca", "quire"): 28.4,
}
CURVE = (0.25, 0.5, 0.75, 0.9)  # parts of the rate found, for the plots
CURVE_PART = 4  # and of the trace: below saturation latency does not hang on how long requests come


def jobs(scale: Scale) -> Iterator[Job]:
    for model, dataset in FIG12:
        for system in SYSTEMS:
            for factor in (1.0, SLOWER) if model == "opt-13b" else (1.0,):
                seconds = scale.duration_s if model == "opt-13b" else scale.short_s
                run = partial(fig12_row, model, dataset, system, factor, seconds[dataset], scale.precision)
                yield Job(figure="fig12", run=run, is_long=system == "quire")
    for sharing, per_width in FIG14.items():
        for width in per_width:
            for system in AGAINST_ORACLE:
                run = partial(fig14_row, sharing, width, system, scale.short_s["alpaca"], scale.precision)
                yield Job(figure="fig14", run=run, is_long=system == "quire")
    for num_prefix in FIG16:
        for lengths in TRANSLATIONS:
            for system in AGAINST_ORACLE:
                run = partial(fig16_row, num_prefix, lengths, system, scale.short_s["alpaca"], scale.precision)
                yield Job(figure="fig16", run=run, is_long=system == "quire")
    for conversations in CHATS:
        for system in IN_CHATS:
            run = partial(fig17_row, conversations, system, scale.short_s["sharegpt"], scale.precision)
            yield Job(figure="fig17", run=run, is_long=system == "quire")


def fig12_row(
    model: ModelName, dataset: Dataset, system: System, factor: float, duration_s: float, precision: float
) -> Row:
    """Measure one row; baselines at half the duration too, to see if the rate has settled."""
    served = MODELS[model]
    costs = served.costs.scaled(factor)

    def latency_s(seconds: float, rate: float) -> float:
        trace = poisson_trace(paper_lengths(dataset), rate, seconds)
        return serve(system, trace, served.num_slots, costs).normalized_latency_s

    paper = FIG12[model, dataset][system]
    found = capacity(partial(latency_s, duration_s), GUESSES.get((model, dataset, system), paper) / factor, precision)
    curve = [(part * found.rate, latency_s(duration_s / CURVE_PART, part * found.rate)) for part in CURVE]
    row = _row(found.rate, [*curve, *found.points])
    if system != "quire":
        row["rate_in_half"] = round(capacity(partial(latency_s, duration_s / 2), found.rate, precision).rate, 4)
    return {
        "model": model,
        "dataset": dataset,
        "system": system,
        "cost_factor": factor,
        "duration_s": duration_s,
        "paper": paper,
        **row,
    }


def fig14_row(sharing: Sharing, width: int, system: System, duration_s: float, precision: float) -> Row:
    """Requests with several samples or beams, on Alpaca's lengths."""
    served = MODELS["opt-13b"]
    concentration = CONCENTRATIONS[0]
    beams = partial(RandomBeams, width, concentration, SEED) if sharing == "beam" else None
    draw = partial(paper_lengths, "alpaca")

    def latency_s(rate: float) -> float:
        trace = poisson_trace(draw(), rate, duration_s, width=width)
        return serve(system, trace, served.num_slots, served.costs, beams=beams).normalized_latency_s

    paper = FIG14[sharing][width][system == "quire"]
    found = capacity(latency_s, paper, precision)
    own = {"sharing": sharing, "width": width, "system": system, "duration_s": duration_s, "paper": paper}
    return {**own, **_row(found.rate, found.points)}


def fig16_row(num_prefix: int, lengths: str, system: System, duration_s: float, precision: float) -> Row:
    """Measure one row. LLaMA-13B has OPT-13B's size: the same memory and costs."""
    paper = FIG16[num_prefix][system == "quire"]
    found = _rate(system, partial(translation_lengths, lengths), paper, duration_s, precision, num_prefix=num_prefix)
    own = {"prefix": num_prefix, "lengths": lengths, "system": system, "duration_s": duration_s, "paper": paper}
    return {**own, **found}


def fig17_row(conversations: str, system: System, duration_s: float, precision: float) -> Row:
    paper = FIG17.get(system)
    found = _rate(system, partial(chat_lengths, conversations), paper or FIG17["oracle"], duration_s, precision)
    own = {"conversations": conversations, "system": system, "duration_s": duration_s, "paper": paper}
    return {**own, **found}


def _rate(
    system: System, draw: Callable[[], Draw], guess: float, duration_s: float, precision: float, *, num_prefix: int = 0
) -> Row:
    served = MODELS["opt-13b"]

    def latency_s(rate: float) -> float:
        trace = poisson_trace(draw(), rate, duration_s, num_prefix=num_prefix)
        return serve(system, trace, served.num_slots, served.costs).normalized_latency_s

    found = capacity(latency_s, guess, precision)
    return _row(found.rate, found.points)


def _row(rate: float, points: list[tuple[float, float]]) -> Row:
    return {"capacity": round(rate, 4), "points": [(round(rate, 4), round(latency_s, 4)) for rate, latency_s in points]}
