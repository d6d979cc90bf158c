"""Blocks that sharing saves: blocks saved / blocks without sharing, as the paper's Fig. 15 counts.

Blocks are counted in every step of every request's life, and both sums run over all of these: a mean by block-steps.
It is what a full pool that holds many requests saves at any time, but does not hang on when one begins to look.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import NamedTuple

from scipy.stats import t as student_t

from benchmarks.memory.saturated_pool import SaturatedPool
from scheduler_svc.core.memory_use import group_blocks
from scheduler_svc.core.sequence import SequenceGroup


class BlockSteps(NamedTuple):
    """Sums over the steps of one request."""

    saved: int
    without_sharing: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Saving:
    """Saving in percent."""

    saving: float
    half_width: float  # of the 95 % confidence interval, from the spread of batches of requests
    mean_over_time: float | None  # of the steps while more waited than fitted; None if those were not the most
    num_requests: int
    num_steps: int


def measure_saving(pool: SaturatedPool, num_batches: int) -> Saving:
    """Serves all requests of the pool, which were drawn in `num_batches` batches of the same size, at least 2."""
    sums: dict[SequenceGroup, BlockSteps] = {}
    over_time: list[float] = []
    num_steps = 0
    while (plan := pool.start()) is not None:
        num_steps += 1
        for group in pool.groups:
            if group.worker_id is not None:
                sums[group] = _with_step(sums.get(group, BlockSteps(0, 0)), group)
        if pool.is_saturated:
            over_time.append(pool.stats().block_saving)
        pool.complete(plan)
    saving, half_width = ratio_with_interval(_batches(sums, num_batches))
    return Saving(
        saving=round(100 * saving, 2),
        half_width=round(100 * half_width, 2),
        mean_over_time=round(100 * fmean(over_time), 2) if 2 * len(over_time) > num_steps else None,
        num_requests=len(sums),
        num_steps=num_steps,
    )


def ratio_with_interval(batches: Sequence[BlockSteps]) -> tuple[float, float]:
    """Ratio of the sums, and half the width of its 95 % confidence interval."""
    ratio = sum(each.saved for each in batches) / sum(each.without_sharing for each in batches)
    spread = stdev(each.saved / each.without_sharing for each in batches)
    return ratio, student_t.ppf(0.975, len(batches) - 1) * spread / math.sqrt(len(batches))


def _batches(sums: dict[SequenceGroup, BlockSteps], num_batches: int) -> list[BlockSteps]:
    """Sum each batch; requests arrived batch by batch."""
    batches = [BlockSteps(0, 0)] * num_batches
    for group, (saved, without_sharing) in sums.items():
        index = group.arrival * num_batches // len(sums)
        batches[index] = BlockSteps(batches[index].saved + saved, batches[index].without_sharing + without_sharing)
    return batches


def _with_step(sums: BlockSteps, group: SequenceGroup) -> BlockSteps:
    blocks = group_blocks(group)
    return BlockSteps(sums.saved + blocks.num_saved, sums.without_sharing + blocks.num_blocks + blocks.num_saved)
