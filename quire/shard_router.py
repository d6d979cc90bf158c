"""Router of new requests: the shard that each goes to, by what is known of the shards, of their caches, and of the
prompts sent before.

Pure; one per client. Knows neither connections nor where its knowledge of the shards comes from.
"""

from quire.prefix_memory import PrefixMemory
from quire.prompt_beginnings import Prompt, beginnings_of, num_bytes_of
from quire.shards import Shard, ShardNumbers, load_of_request, load_of_shard, loads_of, session_number, shard_by_load


class ShardRouter:
    """Shards as they were described last, and what this client has sent them since."""

    def __init__(self) -> None:
        self.shards: list[Shard] = []  # by number; empty: not known yet
        self.numbers = ShardNumbers()
        self._sent: list[float] = []  # load since the shard was described
        self._loads: dict[int, float] = {}  # by shard, with what was sent: kept, since many requests ask for all
        self._prefixes = PrefixMemory()

    def record_shards(self, shards: list[Shard], numbers: ShardNumbers | None = None) -> None:
        """Record a description of every shard, by number. What was sent to a shard counts until its own changes.

        `numbers`: of the shards; None: all take requests, and their number does not change.
        """
        self.numbers = numbers or ShardNumbers(num_shards=len(shards), num_kept=len(shards))
        for gone in range(len(shards), len(self.shards)):
            self._prefixes.record_cached(gone, frozenset())
        before = {shard.number: shard for shard in self.shards}
        sent = dict(enumerate(self._sent))
        self._sent = [sent.get(shard.number, 0.0) if before.get(shard.number) == shard else 0.0 for shard in shards]
        self.shards = shards
        self._loads = loads_of(shards[: self.numbers.num_shards], self._sent)

    def record_cached(self, shard: int, hashes: frozenset[int]) -> None:
        """Record the summary of what a shard has cached, in place of the last; of an unknown shard it is ignored."""
        if shard < len(self.shards):
            self._prefixes.record_cached(shard, hashes)

    def choose_shard(
        self, prompt: Prompt, *, salt: str | None, tenant: str | None, session_key: str | None = None
    ) -> int:
        """Choose the shard of a new request, which counts as sent there. The shards must be known.

        `salt`: cache_salt of the request. `session_key`: none if it is empty.
        """
        session = session_number(session_key, tenant) if session_key else None
        beginnings = beginnings_of(prompt, salt, tenant)
        known_bytes = self._prefixes.find(beginnings)
        shard = shard_by_load(self._loads, self._sent, known_bytes, session)
        self._prefixes.record_sent(beginnings, shard)
        num_bytes = num_bytes_of(prompt) if beginnings else 0
        self._sent[shard] += load_of_request(num_bytes, known_bytes.get(shard, 0))
        self._loads[shard] = load_of_shard(self.shards[shard], self._sent[shard])
        return shard
