"""What the scheduler asks of the store that outlives it, and how a store says no.

Two implementations: RedisStore, and MemoryStore, which is not durable. Knows nothing of what an entry or a record
means; to a store both are bytes.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from quire.errors import UnavailableError


class EntryId(NamedTuple):
    """Where an entry stands in the journal. Ordered by the leader's epoch, then by the leader's own count."""

    epoch: int
    seq: int

    def __str__(self) -> str:
        return f"{self.epoch}-{self.seq}"


JOURNAL_START = EntryId(0, 0)
RECORD_OVERHEAD = 240  # bytes of the store's memory that a record takes beside its payload and its request_id


@dataclass(frozen=True, slots=True)
class StoredEntry:
    """An entry as the store holds it, not yet verified."""

    entry_id: EntryId
    payload: bytes | None  # None: the entry has no such field
    checksum: bytes | None


class Record(NamedTuple):
    """What is kept of a request after its end."""

    request_id: str
    tenant: str
    ended_unix_ns: int
    payload: bytes

    @property
    def weight(self) -> int:
        """Bytes that it counts for: about what it takes of the store's memory, keys and accounts included."""
        return len(self.payload) + 2 * len(self.request_id.encode()) + RECORD_OVERHEAD


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordLimits:
    """How long records are kept, and how many bytes of them: of one tenant, and of all together.

    Beyond a limit the records go whose requests ended first: of the tenant, or of whichever tenant has the most bytes.
    """

    ttl_s: int = 3600
    max_bytes: int = 1 << 30
    max_tenant_bytes: int = 3 << 28


class StoreError(Exception):
    """Base of what a store can answer instead of doing what was asked."""


class StoreUnavailableError(StoreError, UnavailableError):
    """Not now: no answer, connection lost, no memory, no disk, read-only. It may or may not have happened."""


class StoreConfigurationError(StoreUnavailableError):
    """Not ever, as it is configured: wrong address, wrong password, missing permission."""


class StoreFlushedError(StoreError):
    """There is no journal, though there was one: the store has lost its contents. Nothing was written."""


class StaleEntryError(StoreError):
    """The journal already has an entry with this id or a later one. Nothing was written."""


class FencedError(StoreError):
    """A newer leader writes the journal; this process must stop leading."""


class JournalLostError(StoreError):
    """The store has lost entries that it had acknowledged, or all of them."""


class JournalDamagedError(StoreError):
    """An entry cannot be read back as it was written."""


class Store(Protocol):
    """The journal's stream, the epoch counter and the request records.

    Every method may raise StoreUnavailableError. `append` and `last_entry_id` belong to the one journal writer, and
    are ordered among themselves; the others may run beside them.
    """

    @property
    def kind(self) -> str:
        """Either "redis" or "memory"."""

    @property
    def durable(self) -> bool:
        """Whether what was acknowledged outlives the process."""

    @property
    def durability(self) -> str:
        """What an acknowledgement is worth, in a few words for the log."""

    async def next_epoch(self) -> int:
        """Counts the epoch up and returns it."""

    async def raise_epoch(self, epoch: int) -> None:
        """Sees to it that the epoch is at least this one."""

    async def append(self, entry_id: EntryId, payload: bytes, *, create: bool = False) -> None:
        """Adds one entry; returns once the store keeps it.

        Raises StaleEntryError, or StoreFlushedError unless `create` allows it to begin the stream.
        """

    async def last_entry_id(self) -> EntryId | None:
        """Id of the last entry ever added, trimmed or not. None if there is no journal."""

    async def read_entries(self, first: EntryId, limit: int, *, is_urgent: bool = False) -> Sequence[StoredEntry]:
        """Up to `limit` entries in order, from `first` on, itself included.

        `is_urgent`: a leader may have to know within the life of a lease. A lost reply is not waited for longer than
        that of an `append`.
        """

    async def trim(self, oldest: EntryId) -> None:
        """Drops entries before `oldest`; some of them may stay a while."""

    async def put_records(self, records: Sequence[Record], limits: RecordLimits) -> int:
        """Keeps each record for `ttl_s` from now by the store's clock, as far as there is room.

        Repeating it is harmless. Returns how many were dropped for want of room, of these or of earlier ones.
        """

    async def known_records(self, request_ids: Sequence[str]) -> set[str]:
        """Those of them that have a record."""

    async def dropped_until(self, tenants: Collection[str]) -> Mapping[str, int]:
        """By tenant, of those whose records were dropped for want of room: the latest end (Unix, ns) of such a one.

        What ended before has no record any more and needs none.
        """

    async def get_record(self, request_id: str) -> bytes | None:
        """The payload; None if there is none or it has expired."""

    async def close(self) -> None:
        """Lets go of every connection."""
