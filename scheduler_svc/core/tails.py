"""Tails: what a stopped sequence had computed behind its last full block stays findable, under a name of its own.

So it is found again where the sequence was stopped, and travels to another worker, like a full block. Nobody writes
into a tail once it has a name: whoever starts from it copies it. Functions over the blocks of one worker.
"""

from scheduler_svc.core.block_hash import extend_block_hashes, hash_tail, root_hash
from scheduler_svc.core.block_manager import BlockManager
from scheduler_svc.core.sequence import Sequence, Tail


def cache_tail(blocks: BlockManager, sequence: Sequence, block_size: int) -> int | None:
    """Name the partial block of a sequence that is about to give up its blocks. Return it if it can be found now.

    One that has computed nothing, or full blocks alone, keeps the name that it had: that is of its beginning still.
    A fork without a row here only takes the name, since its block is that of another member, which makes it findable.
    """
    num_tokens = min(sequence.num_computed_tokens, len(sequence.token_ids))
    num_full, num_in_tail = divmod(num_tokens, block_size)
    if not num_in_tail:
        return None
    hashes = sequence.block_hashes
    extend_block_hashes(hashes, sequence.hash_seed, sequence.token_ids, block_size, num_full)
    parent = hashes[num_full - 1] if num_full else root_hash(sequence.hash_seed)
    name = hash_tail(parent, sequence.token_ids[num_full * block_size : num_tokens])
    sequence.tail = Tail(num_tokens, name)
    in_table = num_full < len(sequence.block_table)
    block = sequence.block_table[num_full] if in_table else sequence.fork_tail
    assert block is not None, "computed tokens have a block"
    has_computed = sequence.last_step > 0
    return block if has_computed and not blocks.is_findable(block) and blocks.register(block, name) else None


def find_tail(blocks: BlockManager, sequence: Sequence, num_prefix_blocks: int, block_size: int) -> int | None:
    """Return the cached tail of a sequence of which so many full blocks are found: it continues those, or is None."""
    tail = sequence.tail
    if tail is None or tail.num_tokens // block_size != num_prefix_blocks:
        return None
    num_gained = min(tail.num_tokens, sequence.num_tokens - 1) - num_prefix_blocks * block_size
    return blocks.find(tail.block_hash) if num_gained > 0 else None
