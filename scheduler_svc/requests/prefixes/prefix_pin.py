"""Pin of one prefix: its tokens and blocks, the workers that have it, its waiters. Decides nothing.

Only the tokens of full blocks are kept, so their number depends on the workers' block size.
"""

import asyncio
import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from hashlib import blake2b

from common.arrays import pack_int32, unpack_int32
from quire.errors import QuireError
from quire.v1 import inference_pb2 as pb
from quire.v1 import journal_pb2
from scheduler_svc.core.block_hash import extend_block_hashes
from scheduler_svc.core.sequence import Sequence, SequenceGroup
from scheduler_svc.requests.live.new_request import prefix_hash_seed
from scheduler_svc.requests.recovery.journal_replay import JournaledPin


@dataclass(slots=True, kw_only=True, eq=False)
class PrefixPin:
    """Pin from the first PinPrefix on. `is_kept` once a worker has had the prefix, until it is unpinned."""

    name: str
    tenant: str
    cache_salt: str
    token_ids: list[int]
    fingerprint: str  # of the model whose tokens they are
    block_size: int = 0
    block_hashes: list[bytes] = field(default_factory=list)  # of its full blocks
    worker_ids: set[str] = field(default_factory=set)  # of workers that have it
    journaled: JournaledPin | None = None  # of an earlier leader, by which the journal knows it
    is_kept: bool = False
    durable: asyncio.Event = field(default_factory=asyncio.Event)  # the journal has it
    gone: asyncio.Event = field(default_factory=asyncio.Event)  # the journal has its removal
    is_unsure: bool = False  # a client was not told whether it is gone
    is_missed: bool = False  # no worker has it, and that was logged
    group: SequenceGroup | None = None  # that computes it now
    has_failed: bool = False  # its computation failed: it may be what crashes workers
    num_attempts: int = 0  # to compute it, since it was last wanted
    asked_s: float = -math.inf  # by the event loop's clock: when a client last called PinPrefix for it
    retry: asyncio.TimerHandle | None = None
    waiters: "set[asyncio.Future[QuireError | None]]" = field(default_factory=set)  # None: it is there
    _digest: int | None = None

    @property
    def key(self) -> str:
        """Key by which the scheduler's core knows it; names have no slash."""
        return f"{self.name}/{self.tenant}"

    @property
    def num_blocks(self) -> int:
        return len(self.block_hashes)

    @property
    def num_tokens(self) -> int:
        """Number of tokens kept: those of full blocks."""
        return self.num_blocks * self.block_size

    @property
    def digest(self) -> int:
        """Digest of the pin alone, as `digest_of_pins` makes it."""
        if self._digest is None:
            self._digest = digest_of_pins([self.to_change()])
        return self._digest

    def cut_into_blocks(self, block_size: int) -> None:
        """Cut the tokens into blocks of this size."""
        self.block_size = block_size
        self.block_hashes = []
        num_blocks = len(self.token_ids) // block_size
        extend_block_hashes(self.block_hashes, self._hash_seed, self.token_ids, block_size, num_blocks)

    def is_prefix_of(self, sequence: Sequence) -> bool:
        """True if the sequence begins with it, as far as its blocks are hashed."""
        num_blocks, hashes = len(self.block_hashes), sequence.block_hashes
        return 0 < num_blocks <= len(hashes) and hashes[num_blocks - 1] == self.block_hashes[-1]

    def new_group(self, seq_id: int) -> SequenceGroup:
        """Group of one sequence that computes the tokens where they are not cached."""
        sequence = Sequence(
            seq_id=seq_id,
            token_ids=self.token_ids[: self.num_tokens],
            num_prompt_tokens=self.num_tokens,
            max_tokens=1,
            stop_token_ids=frozenset(),
            hash_seed=self._hash_seed,
        )
        return SequenceGroup([sequence], arrival=seq_id)

    def resolve_waiters(self, error: QuireError | None) -> None:
        """Resolve all waiters, with an error or None."""
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
        """Journal entry of the pin."""
        return journal_pb2.PinChange(
            tenant=self.tenant,
            name=self.name,
            cache_salt=self.cache_salt,
            token_ids=pack_int32(self.token_ids),
            model_fingerprint=self.fingerprint,
        )

    def restate(self, entry: journal_pb2.JournalEntry) -> None:
        """Add the pin to an entry that restates pins."""
        entry.pins.append(self.to_change())

    @property
    def _hash_seed(self) -> bytes:
        return prefix_hash_seed(self.tenant, self.cache_salt)


def digest_of_pins(pins: Iterable[journal_pb2.PinChange]) -> int:
    """Digest of 64 bits that is equal for equal pins, in any order; 0 of none."""
    digest = 0
    for each in pins:
        names = (each.tenant, each.name, each.cache_salt, each.model_fingerprint)
        data = b"\0".join([*(name.encode() for name in names), each.token_ids])
        digest ^= int.from_bytes(blake2b(data, digest_size=8).digest())
    return digest


def restored_pin(change: journal_pb2.PinChange, journaled: JournaledPin | None = None) -> PrefixPin:
    """Pin of another scheduler. No worker has it yet; the first worker of its model decides the block size.

    `journaled`: it is one of an earlier leader, which the journal needs already.
    """
    prefix = PrefixPin(
        name=change.name,
        tenant=change.tenant,
        cache_salt=change.cache_salt,
        token_ids=unpack_int32(change.token_ids).tolist(),
        fingerprint=change.model_fingerprint,
        journaled=journaled,
        is_kept=True,
    )
    prefix.durable.set()
    return prefix
