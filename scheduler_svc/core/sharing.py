"""Sharing of blocks within a group: members fork the blocks that earlier members compute.

Pure functions of token ids. They rebuild the tree of sharing after the blocks themselves are gone: the sequences of
parallel sampling share their prompt, beams each branch that they have in common.
"""

from collections.abc import Sequence as Seq

from scheduler_svc.core.sequence import Sequence


def have_same_tokens(members: Seq[Sequence]) -> bool:
    """True if one row can compute the tokens of all members, and all sample from it."""
    first = members[0].token_ids
    return all(member.token_ids == first for member in members[1:])


def shared_blocks(members: Seq[Sequence], block_size: int) -> list[tuple[int, int]]:
    """Return for each member the earlier one, by index, with which it shares the most full blocks, and their number.

    At least its last token is left for each member to compute.
    """
    shares = []
    for index, member in enumerate(members):
        best = (0, 0)
        for earlier in range(index):
            num_blocks = _num_common_blocks(members[earlier].token_ids, member.token_ids, block_size)
            if num_blocks > best[1]:
                best = (earlier, num_blocks)
        shares.append(best)
    return shares


def _num_common_blocks(a: list[int], b: list[int], block_size: int) -> int:
    num_blocks = min(len(a), len(b) - 1) // block_size
    for start in range(0, num_blocks * block_size, block_size):
        if a[start : start + block_size] != b[start : start + block_size]:
            return start // block_size
    return num_blocks
