"""Options of a run's schedulers: drawn from the seed, before the run."""

from dataclasses import dataclass
from random import Random

from scheduler_svc.core.scheduler_config import SchedulerConfig

GRACE_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerOptions:
    """The same for every life of a run."""

    config: SchedulerConfig
    grace_s: float
    max_queue_requests: int
    trim_every: int
    restate_entries: int
    stream_interval_s: float
    stands_by: bool  # who is started again: with all schedulers alike nobody leads who has not waited for the lease


def draw_options(draw: Random) -> SchedulerOptions:
    config = SchedulerConfig(
        max_num_batched_tokens=draw.choice([8, 24, 64]),
        max_num_seqs=draw.choice([8, 16, 64]),
        watermark=draw.choice([0.0, 0.02]),
        pipeline_depth=draw.choice([1, 2, 2]),
        enable_prefix_cache=draw.random() < 0.8,
        order=draw.choice(["fcfs", "fcfs", "edf"]),
        preemption=draw.choice(["auto", "swap", "recompute"]),
        preempt_every=draw.choice([None, None, 3, 11]),
        block_fetch=draw.choice(["auto", "always", "always", "never"]),
    )
    return SchedulerOptions(
        config=config,
        grace_s=GRACE_S,
        max_queue_requests=draw.choice([1000, 1000, 1000, 3]),
        trim_every=draw.choice([2, 16, 512]),
        restate_entries=draw.choice([2, 20, 4096]),
        stream_interval_s=draw.choice([0.0, 0.02]),
        stands_by=draw.random() < 0.3,
    )
