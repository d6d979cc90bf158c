"""Blocks that members of a group share when they are started again with different tokens. Blocks hold 4 tokens."""

import pytest

from scheduler_svc.core.scheduler_config import SchedulerConfig
from scheduler_svc.core.sequence import Sequence
from scheduler_svc.core.sharing import have_same_tokens, shared_blocks
from scheduler_svc.core.waiting_reasons import WaitingReason
from tests.scheduler.core_cluster import Cluster


def members(*token_ids: list[int]) -> list[Sequence]:
    return [Sequence(seq_id, each, 1, 100, frozenset()) for seq_id, each in enumerate(token_ids)]


@pytest.mark.parametrize(
    ("others", "shares"),
    [
        ([[9, 2, 3, 4, 5]], [(0, 0)]),
        ([[1, 2, 3, 4, 5]], [(0, 1)]),
        ([[1, 2, 3, 4]], [(0, 0)]),  # its last token is left to compute
        ([[1, 2, 3, 4, 5, 6, 7, 8]], [(0, 1)]),
        ([[1, 2, 3, 4, 5, 6, 7, 8, 9, 10]], [(0, 2)]),
        ([[1, 2, 3, 4, 0, 0, 0, 0, 0], [1, 2, 3, 4, 5, 6, 7, 8, 0]], [(0, 1), (0, 2)]),
        ([[1, 2, 3, 4, 0, 0, 0, 0, 0], [1, 2, 3, 4, 0, 0, 0, 0, 9]], [(0, 1), (1, 2)]),
        ([[1, 2, 3, 4, 0], [1, 2, 3, 4, 9]], [(0, 1), (0, 1)]),  # with the first of several
    ],
)
def test_a_member_shares_full_blocks_with_the_earlier_one_that_has_the_most_in_common(
    others: list[list[int]], shares: list[tuple[int, int]]
) -> None:
    assert shared_blocks(members([1, 2, 3, 4, 5, 6, 7, 8], *others), 4) == [(0, 0), *shares]


def test_one_row_computes_for_members_whose_tokens_are_all_the_same() -> None:
    assert have_same_tokens(members([1, 2], [1, 2], [1, 2]))
    assert not have_same_tokens(members([1, 2], [1, 2], [1, 3]))
    assert not have_same_tokens(members([1, 2], [1, 2, 3]))


def test_what_members_share_is_found_anew_when_one_of_them_ends_while_they_wait() -> None:
    cluster = Cluster(SchedulerConfig(pipeline_depth=1, watermark=0.0))
    cluster.add_worker(num_blocks=40)
    group = cluster.add_group([11, 12, 13, 14, 15, 16], 3, 12)
    for _ in range(4):
        cluster.step()
    cluster.remove_all_memory("w", num_blocks=40)
    assert cluster.scheduler.waiting_reason(group) is WaitingReason.NEXT_STEP  # looks at what they share
    cluster.scheduler.finish(group.sequences[0])
    cluster.run_until_idle()
    cluster.assert_outputs_are_unconstrained()
    cluster.assert_idle_and_unleaked()
