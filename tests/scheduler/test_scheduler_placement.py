"""Limits of what a worker may take at all, at their edges. Blocks hold 4 tokens."""

import pytest

from scheduler_svc.core.scheduler_config import SchedulerConfig
from scheduler_svc.core.waiting_reasons import WaitingReason
from tests.scheduler.core_cluster import Cluster

MOST_SEQUENCES = 4  # that run at once on a worker


def make_cluster() -> Cluster:
    return Cluster(SchedulerConfig(max_num_batched_tokens=64, max_num_seqs=MOST_SEQUENCES, watermark=0.0))


@pytest.mark.parametrize(("max_tokens", "fits"), [(4, True), (5, False)])
def test_no_sequence_starts_where_it_could_become_longer_than_the_worker_can_hold(max_tokens: int, fits: bool) -> None:
    cluster = make_cluster()
    cluster.add_worker(num_blocks=40, max_model_len=12)
    group = cluster.add_group([1] * 8, 2, max_tokens)
    assert (cluster.start() is not None) is fits
    if fits:
        cluster.run_until_idle()
        return
    assert cluster.scheduler.waiting_reason(group) is WaitingReason.NO_LARGER_WORKER
    cluster.add_worker("longer", num_blocks=40, max_model_len=13)
    cluster.run_until_idle()
    assert cluster.workers["longer"].num_computed_tokens > 0 and cluster.workers["w"].num_computed_tokens == 0


@pytest.mark.parametrize(("num_seats", "num_sequences"), [(3, 3), (64, MOST_SEQUENCES)])
def test_no_group_starts_whose_sequences_cannot_all_run_at_once(num_seats: int, num_sequences: int) -> None:
    cluster = make_cluster()
    cluster.add_worker(num_blocks=40, num_seats=num_seats)
    too_wide = cluster.add_group([1, 2, 3], num_sequences + 1, 4)
    assert cluster.start() is None
    assert cluster.scheduler.waiting_reason(too_wide) is WaitingReason.NO_LARGER_WORKER
    cluster.scheduler.finish_group(too_wide)
    cluster.add_group([1, 2, 3], num_sequences, 4)
    cluster.run_until_idle()
    cluster.assert_outputs_are_unconstrained()


def test_no_more_sequences_run_at_once_than_may_though_there_are_seats() -> None:
    cluster = make_cluster()
    cluster.add_worker(num_blocks=40)
    for number in range(3):
        cluster.add_group([number + 1, 2], MOST_SEQUENCES // 2, 4)
    cluster.start()
    cluster.start()
    assert cluster.stats().num_running == MOST_SEQUENCES
    cluster.run_until_idle()
