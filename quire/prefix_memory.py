"""Memory of prompts by their beginnings: which shards may have the blocks of a prompt that began alike.

Pure. There are two sources: what this client sent lately, and what the shards say that they have cached.
"""

from collections import OrderedDict
from collections.abc import Iterator, Sequence

from quire.prompt_beginnings import Beginning

_MOST_KNOWN = 1 << 16  # beginnings that were sent, about 8 MB


class PrefixMemory:
    """Shards by the beginnings that they got or have; what was not sent for longest is forgotten."""

    def __init__(self) -> None:
        self._sent: OrderedDict[int, int] = OrderedDict()  # hash -> the shard that got it last
        self._cached: dict[int, frozenset[int]] = {}  # shard -> short hashes, as it said
        self._cached_in: dict[int, int] = {}  # short hash -> the shards that have it, as bits

    def find(self, beginnings: Sequence[Beginning]) -> dict[int, int]:
        """Bytes of the longest beginning that is known of each shard, by its number; others know none."""
        found: dict[int, int] = {}
        cached_in, sent = self._cached_in, self._sent
        have, num_bytes = -1, 0
        for beginning in beginnings:
            still_have = have & cached_in.get(beginning.short_hash, 0)
            if num_bytes:
                found.update(dict.fromkeys(_bits(have & ~still_have), num_bytes))
            shard = sent.get(beginning.hash)
            if shard is not None:
                found[shard] = beginning.num_bytes
            elif not still_have:
                return found
            have, num_bytes = still_have, beginning.num_bytes
        if num_bytes:
            found.update(dict.fromkeys(_bits(have), num_bytes))
        return found

    def record_sent(self, beginnings: Sequence[Beginning], shard: int) -> None:
        """Record that a shard gets a prompt with these beginnings."""
        sent = self._sent
        for beginning in reversed(beginnings):  # so that no beginning is forgotten before a longer one
            sent[beginning.hash] = shard
            sent.move_to_end(beginning.hash)
        while len(sent) > _MOST_KNOWN:
            sent.popitem(last=False)

    def record_cached(self, shard: int, hashes: frozenset[int]) -> None:
        """Record what a shard says that it has cached, in place of what it said before."""
        bit, before = 1 << shard, self._cached.get(shard, frozenset())
        for gone in before - hashes:
            self._cached_in[gone] &= ~bit
            if not self._cached_in[gone]:
                del self._cached_in[gone]
        for new in hashes - before:
            self._cached_in[new] = self._cached_in.get(new, 0) | bit
        self._cached[shard] = hashes


def _bits(number: int) -> Iterator[int]:
    """Indices of the bits that are set."""
    while number:
        lowest = number & -number
        yield lowest.bit_length() - 1
        number ^= lowest
