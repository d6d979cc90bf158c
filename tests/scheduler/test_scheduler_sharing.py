"""Blocks that members of a group share when they are started again with different tokens. Blocks hold 4 tokens."""

import random
from typing import Any

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


def most_common_blocks(tokens: list[list[int]], block_size: int) -> list[tuple[int, int]]:
    """Compare each member with every earlier one: `shared_blocks` finds the same."""
    shares = []
    for index, own in enumerate(tokens):
        best = (0, 0)
        for earlier, other in enumerate(tokens[:index]):
            num_blocks = min(len(other), len(own) - 1) // block_size
            while other[: num_blocks * block_size] != own[: num_blocks * block_size]:
                num_blocks -= 1
            if num_blocks > best[1]:
                best = (earlier, num_blocks)
        shares.append(best)
    return shares


def test_random_groups_share_what_a_comparison_of_all_pairs_finds() -> None:
    rng = random.Random(3)
    seen = set()
    for _ in range(2000):
        prompt = [rng.randrange(2) for _ in range(rng.randrange(1, 14))]
        outputs = [[rng.choice([0, 0, 1]) for _ in range(rng.randrange(9))] for _ in range(rng.randrange(1, 7))]
        tokens = [prompt + output for output in outputs]
        block_size = rng.randrange(1, 5)
        group = [Sequence(seq_id, each, len(prompt), 100, frozenset()) for seq_id, each in enumerate(tokens)]
        shares = shared_blocks(group, block_size)
        assert shares == most_common_blocks(tokens, block_size)
        seen |= {(earlier > 0, num_blocks > len(prompt) // block_size) for earlier, num_blocks in shares}
    assert len(seen) == 3, "they share the prompt, or more, with the first or with another"


class ReadTokens(list[int]):
    """Tokens that count how many of them are read."""

    num_read = 0

    def __getitem__(self, index: Any) -> Any:
        found = super().__getitem__(index)
        self.num_read += len(found) if isinstance(found, list) else 1
        return found


def test_what_many_members_of_a_long_prompt_share_is_found_without_reading_the_prompt_again() -> None:
    prompt = list(range(16384))
    tokens = [ReadTokens([*prompt, *([index // 2] * 40)]) for index in range(128)]
    group = [Sequence(seq_id, each, len(prompt), 100, frozenset()) for seq_id, each in enumerate(tokens)]
    shares = shared_blocks(group, 16)
    assert shares == [(0, 0)] + [(index - 1, 1026) if index % 2 else (0, 1024) for index in range(1, 128)]
    assert max(each.num_read for each in tokens) <= 40


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
    cluster.finish_and_compare()
