"""Blocks that members of a group share when they are started again with different tokens. Blocks hold 4 tokens."""

import pytest

from scheduler_svc.core.sequence import Sequence
from scheduler_svc.core.sharing import have_same_tokens, shared_blocks


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
