"""Sharing of blocks within a group: members fork the blocks that earlier members compute.

Pure functions of token ids. They rebuild the tree of sharing after the blocks themselves are gone: the sequences of
parallel sampling share their prompt, beams each branch that they have in common.
"""

from collections.abc import Sequence as Seq

from scheduler_svc.core.sequence import Sequence

# Tokens of the next full block -> the first member that has them here, and what follows them.
_Branches = dict[tuple[int, ...], tuple[int, "_Branches"]]


def have_same_tokens(members: Seq[Sequence]) -> bool:
    """True if one row can compute the tokens of all members, and all sample from it."""
    first = members[0].output_token_ids  # they have one prompt
    return all(member.output_token_ids == first for member in members[1:])


def distinct_members(members: Seq[Sequence]) -> Seq[Sequence]:
    """Return the first member if all have the same tokens, and so the same blocks; else all of them."""
    return members[:1] if have_same_tokens(members) else members


def shared_blocks(members: Seq[Sequence], block_size: int) -> list[tuple[int, int]]:
    """Return for each member the earlier one, by index, with which it shares the most full blocks, and their number.

    At least its last token is left for each member to compute. The prompt, which all have in common, is not read.
    """
    num_of_prompt = members[0].num_prompt_tokens // block_size
    behind_prompt: _Branches = {}
    shares = []
    for index, member in enumerate(members):
        num_shareable = (len(member.token_ids) - 1) // block_size
        best = (0, min(num_of_prompt, num_shareable) if index else 0)
        branches = behind_prompt
        for place in range(num_of_prompt, len(member.token_ids) // block_size):
            block = tuple(member.token_ids[place * block_size : (place + 1) * block_size])
            first, branches = branches.setdefault(block, (index, {}))
            if first < index and place < num_shareable:
                best = (first, place + 1)
        shares.append(best)
    return shares
