"""Blocks of one worker's KV pool: their reference counts, the free list and the prefix cache.

A block is used (ref_count > 0), cached (unreferenced, but its hash can still be found) or free.
Knows block ids and hashes only: nothing of sequences, tokens, steps or the memory itself.
"""

from collections import Counter, OrderedDict
from collections.abc import Iterable, Mapping, Sequence


class BlockManager:
    """Reference counts, the free list and the prefix cache. Every table that lists a block holds one reference."""

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ValueError(f"num_blocks is {num_blocks}: a pool has at least 1")
        self.num_blocks = num_blocks
        self.num_references = 0  # of all holders to all blocks
        self.num_shared_blocks = 0  # with more than one holder
        self._ref_counts = [0] * num_blocks
        self._hashes: list[bytes | None] = [None] * num_blocks
        self._block_of: dict[bytes, int] = {}  # hash -> the first block registered under it
        self._free = list(range(num_blocks - 1, -1, -1))  # unhashed; a stack, lowest id on top at first
        self._cached: OrderedDict[int, None] = OrderedDict()  # unreferenced but hashed; next to evict first

    @property
    def num_free_blocks(self) -> int:
        return len(self._free)

    @property
    def num_cached_blocks(self) -> int:
        return len(self._cached)

    @property
    def num_available_blocks(self) -> int:
        """Blocks that `allocate` can give: free ones, and cached ones to be evicted."""
        return len(self._free) + len(self._cached)

    @property
    def num_used_blocks(self) -> int:
        return self.num_blocks - self.num_available_blocks

    def ref_count(self, block: int) -> int:
        return self._ref_counts[block]

    def is_findable(self, block: int) -> bool:
        """True if the block has a hash, so that others may come to share it: its content must not change."""
        return self._hashes[block] is not None

    def allocate_block(self) -> int:
        """Return a block with one reference and no hash; the least recently used cached one if none is free."""
        if self._free:
            block = self._free.pop()
        else:
            assert self._cached, "allocate_block() without an available block"
            block, _ = self._cached.popitem(last=False)
            self._forget_hash(block)
        self._ref_counts[block] = 1
        self.num_references += 1
        return block

    def allocate(self, num_blocks: int) -> list[int]:
        """Allocate blocks. The caller has seen that `num_blocks` are available."""
        return [self.allocate_block() for _ in range(num_blocks)]

    def share(self, blocks: Iterable[int]) -> None:
        """Add a reference to each; a cached block becomes used again."""
        for block in blocks:
            if self._ref_counts[block] == 0:
                del self._cached[block]
            self._ref_counts[block] += 1
            self.num_references += 1
            if self._ref_counts[block] == 2:
                self.num_shared_blocks += 1

    def free(self, block_table: Sequence[int]) -> None:
        """Give up one reference to each block of a table.

        Cached blocks are evicted in the order in which they lost their last reference, so the table is walked
        from its tail: a head block is of use to more sequences.
        """
        for block in reversed(block_table):
            ref_count = self._ref_counts[block] - 1
            assert ref_count >= 0, f"block {block} is freed more often than it was referenced"
            self._ref_counts[block] = ref_count
            self.num_references -= 1
            if ref_count == 1:
                self.num_shared_blocks -= 1
            if ref_count == 0:
                if self._hashes[block] is None:
                    self._free.append(block)
                else:
                    self._cached[block] = None

    def register(self, block: int, block_hash: bytes) -> bool:
        """Make a used block findable. False if another has the hash already: the first one stays."""
        assert self._ref_counts[block] > 0, f"block {block} is registered without a reference"
        if block_hash in self._block_of:
            return False
        assert self._hashes[block] is None, f"block {block} is registered under two hashes"
        self._hashes[block] = block_hash
        self._block_of[block_hash] = block
        return True

    def unregister(self, block: int) -> None:
        """Make a used block unfindable: what its hash stands for was not computed."""
        assert self._ref_counts[block] > 0, f"block {block} is unregistered without a reference"
        self._forget_hash(block)

    def is_cached(self, block_hash: bytes) -> bool:
        """True if a block can be found under this hash, used or not."""
        return block_hash in self._block_of

    def find(self, block_hash: bytes) -> int | None:
        """Return the block with this hash, used or not. Takes no reference: `share` does."""
        return self._block_of.get(block_hash)

    def forget(self, block_hash: bytes) -> None:
        """Make unfindable whichever block has this hash, used or cached; no-op if none has."""
        block = self._block_of.get(block_hash)
        if block is None:
            return
        self._forget_hash(block)
        if block in self._cached:
            del self._cached[block]
            self._free.append(block)

    def lookup(self, block_hashes: Iterable[bytes]) -> list[int]:
        """Return the blocks of the longest known prefix of a hash chain. Takes no reference: `share` does."""
        blocks = []
        for block_hash in block_hashes:
            block = self._block_of.get(block_hash)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def num_unreferenced(self, blocks: Iterable[int]) -> int:
        """Count the blocks that `share` would take out of the available ones."""
        return sum(1 for block in blocks if self._ref_counts[block] == 0)

    def num_freed_by(self, block_tables: Iterable[Sequence[int]]) -> int:
        """Count the blocks that would become available if all these tables were freed."""
        freed = Counter(block for table in block_tables for block in table)
        return sum(1 for block, count in freed.items() if self._ref_counts[block] == count)

    def _forget_hash(self, block: int) -> None:
        block_hash = self._hashes[block]
        assert block_hash is not None, f"block {block} has no hash to forget"
        del self._block_of[block_hash]
        self._hashes[block] = None

    def check(self, holders: Mapping[int, int]) -> None:
        """Assert that nothing leaks. `holders` counts for each block the tables that list it."""
        assert self.num_references == sum(self._ref_counts)
        assert self.num_shared_blocks == sum(1 for ref_count in self._ref_counts if ref_count > 1)
        for block, ref_count in enumerate(self._ref_counts):
            held = holders.get(block, 0)
            assert ref_count == held, f"block {block}: ref_count {ref_count}, {held} holders"
        used = {block for block, ref_count in enumerate(self._ref_counts) if ref_count > 0}
        free = set(self._free)
        assert len(free) == len(self._free), "a block is twice in the free list"
        assert len(used) + len(free) + len(self._cached) == self.num_blocks
        assert used | free | self._cached.keys() == set(range(self.num_blocks)), "a block is lost or in two places"
        assert all(self._hashes[block] is None for block in free), "a free block has a hash"
        hashed = {block for block, block_hash in enumerate(self._hashes) if block_hash is not None}
        assert self._cached.keys() <= hashed, "a cached block has no hash"
        assert hashed == set(self._block_of.values()), "a hash names a block that does not have it"
        assert all(self._hashes[block] == block_hash for block_hash, block in self._block_of.items())
