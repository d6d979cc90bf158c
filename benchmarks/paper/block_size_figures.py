"""Figs. 18b and 19: latency by block size, and swapping against computing again.

The paper does not say at which rates it measured. Ours are those at which block size 16 has the latency that its
figure shows; at the other sizes nothing is fitted. The cost of a step does not hang on the block size here, so what
small blocks cost an attention kernel is missing.
"""

from collections.abc import Iterator
from functools import partial

from benchmarks.lengths import Dataset
from benchmarks.paper.capacity import capacity
from benchmarks.paper.cost_model import SWAP_TOKENS
from benchmarks.paper.jobs import Job, Row, Scale
from benchmarks.paper.published import BLOCK_SIZES, FIG18B, FIG19A_RECOMPUTE, FIG19A_SWAP, FIG19B
from benchmarks.paper.served_model import MODELS
from benchmarks.paper.systems import serve
from benchmarks.paper.trace import paper_lengths, poisson_trace
from scheduler_svc.core.preemption import PreemptionMode

USUAL = 16  # the paper's default block size
GUESSES: dict[Dataset, float] = {"sharegpt": 2.2, "alpaca": 28.0}


def jobs(scale: Scale) -> Iterator[Job]:
    precision = scale.precision if scale.finds_usual_rate else None
    for dataset in FIG18B:
        yield Job(figure="fig18b", run=partial(fig18b_row, dataset, scale.short_s[dataset], precision), is_long=True)
    for index in range(len(BLOCK_SIZES)):
        yield Job(figure="fig19a", run=partial(fig19a_row, index))
    yield Job(figure="fig19b", run=partial(fig19b_row, scale.short_s["sharegpt"], precision), is_long=True)


def fig18b_row(dataset: Dataset, duration_s: float, precision: float | None) -> Row:
    """Measure all block sizes at one rate."""
    paper = dict(zip(BLOCK_SIZES, FIG18B[dataset], strict=True))
    rate = _rate(dataset, duration_s, paper[USUAL], precision)
    return {
        "dataset": dataset,
        "rate": round(rate, 4),
        "duration_s": duration_s,
        "sizes": [
            {
                "block_size": size,
                "latency_s": round(_latency_s(dataset, duration_s, size, "recompute", rate), 4),
                "paper": paper[size],
            }
            for size in BLOCK_SIZES
        ],
    }


def fig19a_row(index: int) -> Row:
    """Time to swap one sequence in and out, ms; and to recompute it beside others, which read the weights anyway."""
    size = BLOCK_SIZES[index]
    costs = MODELS["opt-13b"].costs
    return {
        "block_size": size,
        "swap_ms": round(2e3 * costs.of_swap(SWAP_TOKENS // size, size), 1),
        "recompute_ms": round(1e3 * SWAP_TOKENS * costs.prompt_token_s, 1),
        "paper_swap_ms": FIG19A_SWAP[index],
        "paper_recompute_ms": FIG19A_RECOMPUTE[index],
    }


def fig19b_row(duration_s: float, precision: float | None) -> Row:
    """Measure both ways of preemption, at one rate."""
    rate = _rate("sharegpt", duration_s, FIG19B[USUAL][0], precision)
    return {
        "rate": round(rate, 4),
        "duration_s": duration_s,
        "sizes": [
            {
                "block_size": size,
                "recompute_s": round(_latency_s("sharegpt", duration_s, size, "recompute", rate), 4),
                "swap_s": round(_latency_s("sharegpt", duration_s, size, "swap", rate), 4),
                "paper_recompute_s": recompute,
                "paper_swap_s": swap,
            }
            for size, (recompute, swap) in FIG19B.items()
        ],
    }


def _rate(dataset: Dataset, duration_s: float, bound_s: float, precision: float | None) -> float:
    """Find the rate at which block size 16 has that latency; without a precision one near it."""
    if precision is None:
        return GUESSES[dataset]
    return capacity(
        partial(_latency_s, dataset, duration_s, USUAL, "recompute"), GUESSES[dataset], precision, bound_s=bound_s
    ).rate


def _latency_s(dataset: Dataset, duration_s: float, block_size: int, preemption: PreemptionMode, rate: float) -> float:
    served = MODELS["opt-13b"]
    trace = poisson_trace(paper_lengths(dataset), rate, duration_s)
    outcome = serve("quire", trace, served.num_slots, served.costs, block_size=block_size, preemption=preemption)
    return outcome.normalized_latency_s
