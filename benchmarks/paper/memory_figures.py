"""Table 1 and Figs. 1, 2, 11 and 13: what a token takes, how much memory is of use, and how many requests it holds."""

from collections.abc import Iterator
from functools import partial

from benchmarks.lengths import MAX_MODEL_LEN, PAPER_MEANS, Dataset, read_histograms
from benchmarks.paper.cost_model import SLOWER, largest_residual_s
from benchmarks.paper.jobs import Job, Row, Scale
from benchmarks.paper.published import (
    FIG1_GB_PER_REQUEST,
    FIG1_REQUESTS_THAT_FIT,
    FIG1_THROUGHPUT,
    FIG2,
    FIG13,
    FIG13_RATES,
    TABLE1,
    ModelName,
    System,
)
from benchmarks.paper.served_model import MODELS
from benchmarks.paper.systems import serve
from benchmarks.paper.trace import paper_lengths, poisson_trace

SATURATED_RATE = 4.0  # of ShareGPT: more than any of the systems bears, so that more waits than fits


def jobs(scale: Scale) -> Iterator[Job]:
    for model in TABLE1:
        yield Job(figure="table1", run=partial(table1_row, model))
    yield Job(figure="fig1", run=partial(fig1_row, scale.short_s["sharegpt"]))
    for dataset in PAPER_MEANS:
        yield Job(figure="fig11", run=partial(fig11_row, dataset))
    duration_s = scale.duration_s["sharegpt"]
    for system in FIG2:
        is_long = system == "quire"
        for rate, factor in ((2.0, 1.0), (2.0, SLOWER), (SATURATED_RATE, 1.0)):
            seconds = duration_s if rate < SATURATED_RATE else duration_s / 4
            yield Job(figure="fig2", run=partial(fig2_row, system, rate, factor, seconds), is_long=is_long)
    for dataset, per_system in FIG13.items():
        for system in per_system:
            for factor in (1.0, SLOWER):
                run = partial(fig13_row, dataset, system, factor, scale.duration_s[dataset])
                yield Job(figure="fig13", run=run, is_long=system == "quire")


def table1_row(name: ModelName) -> Row:
    """Memory in GB, as the paper prints it; memory of a token in bytes."""
    model = MODELS[name]
    gpus, memory_gb, weights_gb, kv_gb, slots = TABLE1[name]
    return {
        "model": name,
        "gpus": gpus,
        "memory_gb": memory_gb,
        "weights_gb": weights_gb,
        "kv_gb": kv_gb,
        "bytes_per_token": model.bytes_per_token,
        "slots": model.num_slots,
        "paper": slots,
    }


def fig1_row(duration_s: float) -> Row:
    """Residual of the cost model at the figure's points, and the memory of a request in a full pool."""
    model = MODELS["opt-13b"]
    costs = model.costs
    memory = {}
    systems: dict[str, System] = {"existing": "max", "paged": "quire"}
    for kind, system in systems.items():
        trace = poisson_trace(paper_lengths("sharegpt"), SATURATED_RATE, duration_s)
        num_fit = serve(system, trace, model.num_slots, costs).mean_batch
        num_slots = model.num_slots / num_fit if system == "quire" else MAX_MODEL_LEN
        memory[kind] = {
            "gb_per_request": round(num_slots * model.bytes_per_token / 1e9, 3),
            "paper_gb_per_request": FIG1_GB_PER_REQUEST[kind],
            "requests": round(num_fit, 1),
            "paper_requests": FIG1_REQUESTS_THAT_FIT[kind],
        }
    return {
        "throughput": [
            {"batch": batch, "tokens_per_s": round(batch / costs.of(batch, 0), 1), "paper": rate}
            for batch, rate in FIG1_THROUGHPUT.items()
        ],
        "largest_residual_ms": round(1e3 * largest_residual_s(costs), 3),
        "memory": memory,
    }


def fig11_row(dataset: Dataset) -> Row:
    """Means of the histograms."""
    first, second = read_histograms(dataset)
    paper = PAPER_MEANS[dataset]
    return {
        "dataset": dataset,
        "input": round(first.mean, 2),
        "output": round(second.mean, 2),
        "paper_input": paper[0],
        "paper_output": paper[1],
    }


def fig2_row(system: System, rate: float, factor: float, duration_s: float) -> Row:
    """Percent of the slots: token states, reservation, internal fragmentation, external and other."""
    model = MODELS["opt-13b"]
    trace = poisson_trace(paper_lengths("sharegpt"), rate, duration_s)
    outcome = serve(system, trace, model.num_slots, model.costs.scaled(factor))
    return {
        "system": system,
        "rate": rate,
        "cost_factor": factor,
        "duration_s": duration_s,
        "use": outcome.memory.percentages(),
        "paper": FIG2[system],
    }


def fig13_row(dataset: Dataset, system: System, factor: float, duration_s: float) -> Row:
    model = MODELS["opt-13b"]
    rate = FIG13_RATES[dataset]
    outcome = serve(
        system,
        poisson_trace(paper_lengths(dataset), rate, duration_s),
        model.num_slots,
        model.costs.scaled(factor),
    )
    return {
        "dataset": dataset,
        "system": system,
        "rate": rate,
        "cost_factor": factor,
        "duration_s": duration_s,
        "batch": round(outcome.mean_batch, 2),
        "paper": FIG13[dataset][system],
        "preemptions": outcome.num_preemptions,
    }
