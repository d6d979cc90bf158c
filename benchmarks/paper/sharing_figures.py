"""Fig. 15: what sharing saves of the blocks, counted as `block_saving` counts it."""

from collections.abc import Iterator
from functools import partial

from benchmarks.lengths import INDEPENDENT, PAIRED, Dataset, Lengths, LengthSampler
from benchmarks.memory.block_saving import measure_saving
from benchmarks.memory.saturated_pool import NoModel, PoolConfig, SaturatedPool, sampled_groups
from benchmarks.paper.jobs import Job, Row, Scale
from benchmarks.paper.published import FIG15, Sharing
from benchmarks.paper.random_beams import CONCENTRATIONS, BeamsWithoutModel, RandomBeams, beam_groups, entropy

SEED = 15
WIDTHS = (2, 4, 6)
NUM_BATCHES = 10  # of requests: their spread gives the confidence interval


def jobs(scale: Scale) -> Iterator[Job]:
    for sharing, dataset in FIG15:
        for width in WIDTHS:
            if sharing == "parallel":
                run = partial(parallel_row, dataset, width, scale.num_sampled[dataset])
                yield Job(figure="fig15", run=run, is_long=True)
            else:
                for concentration in CONCENTRATIONS:
                    run = partial(beam_row, dataset, width, concentration, scale.num_searched[dataset])
                    yield Job(figure="fig15", run=run)


def parallel_row(dataset: Dataset, width: int, num_requests: int) -> Row:
    """Measure parallel sampling: lengths alone decide."""
    groups = sampled_groups(_lengths(dataset, num_requests), width)
    pool = SaturatedPool(PoolConfig(), groups, NoModel())
    return _row("parallel", dataset, width, pool)


def beam_row(dataset: Dataset, width: int, concentration: int, num_requests: int) -> Row:
    """Measure beam search: beams split and die at random."""
    lengths = _lengths(dataset, num_requests)
    execution = BeamsWithoutModel(RandomBeams(width, concentration, SEED))
    pool = SaturatedPool(PoolConfig(), beam_groups(lengths, width), execution)
    return {**_row("beam", dataset, width, pool), "nats": round(entropy(concentration), 2)}


def _row(sharing: Sharing, dataset: Dataset, width: int, pool: SaturatedPool) -> Row:
    saving = measure_saving(pool, NUM_BATCHES)
    return {
        "sharing": sharing,
        "dataset": dataset,
        "width": width,
        "saving": saving.saving,
        "half_width": float(saving.half_width),
        "requests": saving.num_requests,
        "paper": FIG15[sharing, dataset].get(width),
    }


def _lengths(dataset: Dataset, num_requests: int) -> Iterator[Lengths]:
    """Draw the same requests for every width."""
    sampler = LengthSampler(dataset, SEED, opposite_halves=PAIRED.get(dataset, INDEPENDENT))
    for _ in range(NUM_BATCHES):
        yield from sampler.draw(num_requests // NUM_BATCHES)
