"""One pinned prefix: what it is, which workers have it, who waits for it. Decides nothing.

Of its tokens those of full blocks are kept, so their number depends on the workers' block size.
"""

import asyncio
from dataclasses import dataclass, field

from common.arrays import pack_int32, unpack_int32
from quire.errors import QuireError
from quire.v1 import inference_pb2 as pb
from quire.v1 import journal_pb2
from scheduler_svc.core.block_hash import extend_block_hashes
from scheduler_svc.core.sequence import Sequence, SequenceGroup
from scheduler_svc.requests.live.new_request import prefix_hash_seed


@dataclass(slots=True, kw_only=True, eq=False)
class PrefixPin:
    """Known from the first PinPrefix on; `is_kept` once a worker has had it, and then until it is unpinned."""

    name: str
    tenant: str
    cache_salt: str
    token_ids: list[int]
    fingerprint: str  # of the model whose tokens they are
    block_size: int = 0
    block_hashes: list[bytes] = field(default_factory=list)  # of its full blocks
    worker_ids: set[str] = field(default_factory=set)  # of workers that have it
    is_kept: bool = False
    durable: asyncio.Event = field(default_factory=asyncio.Event)  # the journal has it
    gone: asyncio.Event = field(default_factory=asyncio.Event)  # the journal has that it was taken back
    is_unsure: bool = False  # a client was not told whether it is gone
    is_missed: bool = False  # no worker has it, and that was said
    group: SequenceGroup | None = None  # that computes it now
    has_failed: bool = False  # its computation did, so that it may be what ends workers
    num_attempts: int = 0  # to compute it, since it was last wanted
    retry: asyncio.TimerHandle | None = None
    waiters: "set[asyncio.Future[QuireError | None]]" = field(default_factory=set)  # None: it is there

    @property
    def key(self) -> str:
        """By which the scheduler's core knows it; names have no slash."""
        return f"{self.name}/{self.tenant}"

    @property
    def num_blocks(self) -> int:
        return len(self.block_hashes)

    @property
    def num_tokens(self) -> int:
        """That are kept."""
        return self.num_blocks * self.block_size

    def cut(self, block_size: int) -> None:
        """Into blocks of this size."""
        self.block_size = block_size
        self.block_hashes = []
        num_blocks = len(self.token_ids) // block_size
        extend_block_hashes(self.block_hashes, self._hash_seed, self.token_ids, block_size, num_blocks)

    def begins(self, sequence: Sequence) -> bool:
        """Whether the sequence begins with it, as far as its blocks are hashed."""
        num_blocks, hashes = len(self.block_hashes), sequence.block_hashes
        return 0 < num_blocks <= len(hashes) and hashes[num_blocks - 1] == self.block_hashes[-1]

    def new_group(self, seq_id: int) -> SequenceGroup:
        """Its tokens, to be computed where they are not cached."""
        sequence = Sequence(
            seq_id=seq_id,
            token_ids=self.token_ids[: self.num_tokens],
            num_prompt_tokens=self.num_tokens,
            max_tokens=1,
            stop_token_ids=frozenset(),
            hash_seed=self._hash_seed,
        )
        return SequenceGroup([sequence], arrival=seq_id)

    def settle(self, error: QuireError | None) -> None:
        """Tells all who wait for it."""
        for waiter in self.waiters:
            if not waiter.done():
                waiter.set_result(error)

    def to_pb(self) -> pb.PinnedPrefix:
        return pb.PinnedPrefix(
            name=self.name,
            tenant=self.tenant,
            cache_salt=self.cache_salt,
            num_tokens=self.num_tokens,
            num_blocks=self.num_blocks,
            worker_ids=sorted(self.worker_ids),
        )

    def to_change(self) -> journal_pb2.PinChange:
        """What the journal keeps of it."""
        return journal_pb2.PinChange(
            tenant=self.tenant,
            name=self.name,
            cache_salt=self.cache_salt,
            token_ids=pack_int32(self.token_ids),
            model_fingerprint=self.fingerprint,
        )

    def restate(self, entry: journal_pb2.JournalEntry) -> None:
        """Says it again in the journal."""
        entry.pins.append(self.to_change())

    @property
    def _hash_seed(self) -> bytes:
        return prefix_hash_seed(self.tenant, self.cache_salt)


def pinned_again(change: journal_pb2.PinChange) -> PrefixPin:
    """One of an earlier scheduler. No worker has it yet; it is cut into blocks when the first of its model comes."""
    prefix = PrefixPin(
        name=change.name,
        tenant=change.tenant,
        cache_salt=change.cache_salt,
        token_ids=unpack_int32(change.token_ids).tolist(),
        fingerprint=change.model_fingerprint,
        is_kept=True,
    )
    prefix.durable.set()
    return prefix
