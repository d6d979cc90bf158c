"""Steps that fail right after a group came back or was forked, and what the prefix cache says afterwards."""

import random

import pytest

from scheduler_svc.core.scheduler_config import SchedulerConfig
from tests.memory.audited_cluster import AuditedCluster

MAX_UNFINISHED = 8


def make_cluster(rng: random.Random, block_size: int) -> AuditedCluster:
    config = SchedulerConfig(
        max_num_batched_tokens=rng.choice([2, 3, 4, 6]),  # so few that members come back without a row
        max_num_seqs=12,
        watermark=0.0,
        pipeline_depth=rng.choice([2, 3]),
        preemption="swap",
        preempt_every=rng.choice([None, 2, 3, 5]),
    )
    cluster = AuditedCluster(config, rng.randrange(1000))
    cluster.add_worker("w", num_blocks=14, num_host_blocks=30, num_seats=16, block_size=block_size)
    return cluster


def add_something(cluster: AuditedCluster, rng: random.Random, block_size: int) -> None:
    prompt = [rng.randrange(1, 3) for _ in range(rng.randrange(1, 3 * block_size))]
    cluster.add_group(
        prompt,
        rng.randint(1, 4),
        rng.randrange(1, 2 * block_size + 2),
        priority=rng.choice([0, 0, -1]),
        is_beam=rng.random() < 0.2,
    )


def cancel_some(cluster: AuditedCluster, rng: random.Random) -> None:
    """Cancel some groups; first those that were just admitted and have computed nothing."""
    for _ in range(rng.randint(1, 3)):
        idle = [s for s in cluster.unfinished() if s.seat is not None and not s.last_step]
        chosen = idle or cluster.unfinished()
        if chosen:
            cluster.finish(rng.choice(chosen))


@pytest.mark.long
@pytest.mark.parametrize("block_size", [1, 2, 4])
def test_what_a_failed_step_was_to_compute_or_bring_back_is_not_found_in_the_cache(block_size: int) -> None:
    num_checked = 0
    for seed in range(40):
        rng = random.Random(seed)
        cluster = make_cluster(rng, block_size)
        for _ in range(120):
            if len(cluster.unfinished()) < MAX_UNFINISHED:
                add_something(cluster, rng, block_size)
            if rng.random() < 0.4 or cluster.start() is None:
                if cluster.in_flight["w"]:
                    cluster.complete()
            elif rng.random() < 0.2:
                cancel_some(cluster, rng)
                cluster.check()
                cluster.fail_steps()
                cluster.check()
                num_checked += cluster.check_cached_contents()
        cluster.run_until_idle(4000)
        cluster.assert_outputs_are_unconstrained()
        cluster.assert_idle_and_unleaked()
    assert num_checked > 1000
