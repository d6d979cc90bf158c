"""Many small random loads, each in a pool that hardly holds its largest group: everything finishes, and in time.

MEMORY_TEST_LOADS=5000 looks at more than the suite has time for.
"""

import os
import random

import pytest

from scheduler_svc.core.pins import PinRefusedError
from scheduler_svc.core.preemption import PreemptionCosts
from scheduler_svc.core.scheduler_config import SchedulerConfig
from tests.scheduler.core_cluster import Cluster

NUM_LOADS = int(os.environ.get("MEMORY_TEST_LOADS", "120"))
BLOCK_SIZE = 4
MAX_PLANS_PER_TOKEN = 2


def random_config(rng: random.Random) -> SchedulerConfig:
    return SchedulerConfig(
        max_num_batched_tokens=rng.choice([1, 3, 8, 32, 128]),
        max_num_seqs=rng.choice([6, 16, 64]),
        watermark=rng.choice([0.0, 0.0, 0.1]),
        pipeline_depth=rng.choice([1, 2, 3]),
        enable_prefix_cache=rng.random() < 0.7,
        order=rng.choice(["fcfs", "edf"]),
        preemption=rng.choice(["swap", "auto", "recompute"]),
    )


def add_load(cluster: Cluster, rng: random.Random) -> int:
    """Returns the blocks that its largest group may come to hold."""
    head = [rng.randrange(1, 17) for _ in range(20)]
    groups = []
    for _ in range(rng.randrange(4, 25)):
        prompt = head[: rng.randrange(21)] + [rng.randrange(1, 4) for _ in range(rng.randrange(1, 6))]
        num_sequences = rng.choice([1, 1, 2, 4, 6])
        groups.append(
            cluster.add_group(
                prompt,
                num_sequences,
                rng.randrange(1, 17),
                priority=rng.choice([0, 0, 0, 1, 2]),
                deadline_s=rng.choice([None, 1e6, 2e6]),
                is_beam=num_sequences > 1 and rng.random() < 0.4,
            )
        )
    return max(group.worst_case_blocks(BLOCK_SIZE) for group in groups)


def add_tight_worker(cluster: Cluster, rng: random.Random, num_needed: int, part: float) -> None:
    """A pool of `part` of what is needed, above the watermark, beside a host pool of any size."""
    num_wanted, watermark = int(num_needed * part), cluster.config.watermark
    num_blocks = next(n for n in range(num_wanted, 2 * num_wanted + 9) if n - int(n * watermark) >= num_wanted)
    cluster.add_worker(
        f"w{len(cluster.workers)}",
        num_blocks=num_blocks,
        block_size=BLOCK_SIZE,
        num_seats=rng.choice([6, 16, 64]),
        num_host_blocks=rng.choice([0, 2, num_blocks // 2, num_blocks]),
    )


def pin_something(cluster: Cluster, rng: random.Random) -> int:
    """Pins are kept to the end: what was admitted must fit beside them."""
    worker_id = rng.choice(sorted(cluster.workers))
    hashes = rng.choice(cluster.sequences).block_hashes[: rng.randint(1, 4)]
    try:
        return hashes != [] and cluster.scheduler.workers.pin_blocks(worker_id, f"pin {cluster.num_plans}", hashes)
    except (PinRefusedError, ValueError):
        return False


@pytest.mark.long
@pytest.mark.parametrize("part", [1.0, 1.1, 1.2])
def test_a_pool_that_hardly_holds_the_largest_group_gets_every_load_done(part: float) -> None:
    num_preemptions = num_swaps = num_pins = 0
    for seed in range(NUM_LOADS):
        rng = random.Random(seed)
        cluster = Cluster(random_config(rng))
        num_needed = add_load(cluster, rng)
        for _ in range(rng.choice([1, 1, 2])):
            add_tight_worker(cluster, rng, num_needed, part)
        for worker_id in cluster.workers:
            cluster.scheduler.workers.record_costs(
                worker_id, PreemptionCosts(swap_blocks_per_s=10.0, prefill_tokens_per_s=30.0)
            )
        num_tokens = sum(s.worst_case_tokens for s in cluster.sequences)
        while cluster.num_plans < num_tokens // 2 and any(not s.is_finished for s in cluster.sequences):
            for worker_id, steps in cluster.in_flight.items():
                if cluster.start(worker_id) is None and steps:
                    cluster.complete(worker_id)
            num_pins += pin_something(cluster, rng) if rng.random() < 0.1 else 0
        cluster.run_until_idle(MAX_PLANS_PER_TOKEN * num_tokens)
        cluster.assert_outputs_are_unconstrained()
        cluster.scheduler.check()
        stats = cluster.scheduler.stats().workers
        assert all(worker.num_used_blocks == worker.num_pinned_blocks for worker in stats)
        num_preemptions += sum(worker.num_preemptions for worker in stats)
        num_swaps += sum(worker.num_swaps for worker in stats)
    assert num_preemptions > NUM_LOADS and 0 < num_swaps < num_preemptions and num_pins > 0
