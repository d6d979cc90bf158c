"""Prompts whose blocks the workers have, or are about to compute, by hashes of their beginnings.

The hashes are the caller's, who says how many tokens each stands for; here each is tied to the block that ends there,
and known for as long as any worker has that block. Knows nothing of text, clients or the wire.
"""

from collections import OrderedDict
from collections.abc import Sequence as Seq
from typing import NamedTuple

from scheduler_svc.core.present_workers import PresentWorkers
from scheduler_svc.core.sequence import Sequence

MOST_HASHES = 2048  # in a summary
_MOST_KNOWN = 4 * MOST_HASHES


class PromptBeginning(NamedTuple):
    """One beginning of a prompt, of so many tokens."""

    hash: int
    num_tokens: int


class CachedPrompts:
    """Beginnings of the prompts of one shard; of more than a summary can have, those that were used last."""

    def __init__(self, workers: PresentWorkers) -> None:
        self._workers = workers
        self._coming: dict[Sequence, Seq[PromptBeginning]] = {}  # not computed yet, in the order of their arrival
        self._last_block: OrderedDict[int, bytes] = OrderedDict()  # of each beginning; its hash

    def add(self, sequence: Sequence, beginnings: Seq[PromptBeginning]) -> None:
        """Add a prompt that was admitted: its beginnings, the shortest first."""
        if beginnings:
            self._coming[sequence] = beginnings

    def hashes(self) -> list[int]:
        """Hashes of what is cached now or will be, in no particular order; at most `MOST_HASHES`.

        No beginning is left out for want of room before a longer one of the same prompt.
        """
        self._take_computed()
        found: dict[int, None] = {}
        for beginnings in reversed(self._coming.values()):
            found.update(dict.fromkeys(each.hash for each in beginnings[: MOST_HASHES - len(found)]))
            if len(found) >= MOST_HASHES:
                return list(found)
        evicted = []
        for prompt_hash, block_hash in reversed(self._last_block.items()):
            if not self._workers.is_cached(block_hash):
                evicted.append(prompt_hash)
                continue
            found[prompt_hash] = None
            if len(found) >= MOST_HASHES:
                break
        for prompt_hash in evicted:
            del self._last_block[prompt_hash]
        return list(found)

    def _take_computed(self) -> None:
        """Tie the beginnings of prompts that are computed to their blocks; forget those of prompts that never were."""
        done = [each for each in self._coming if each.num_output_tokens or each.is_finished]
        for sequence in done:
            self._tie_to_blocks(sequence, self._coming.pop(sequence))
        while len(self._last_block) > _MOST_KNOWN:
            self._last_block.popitem(last=False)

    def _tie_to_blocks(self, sequence: Sequence, beginnings: Seq[PromptBeginning]) -> None:
        block_size = self._workers.block_size
        if block_size is None:
            return
        for each in reversed(beginnings):  # the shortest is the latest, and so the last to be left out
            index = each.num_tokens // block_size - 1
            if 0 <= index < len(sequence.block_hashes):
                self._last_block[each.hash] = sequence.block_hashes[index]
                self._last_block.move_to_end(each.hash)
