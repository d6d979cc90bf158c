"""Interface to the store that outlives the scheduler, and the errors of a store.

Two implementations: RedisStore, and MemoryStore, which is not durable. Entries and records are bytes here.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from quire.errors import UnavailableError


class EntryId(NamedTuple):
    """Position of an entry in the journal. Ordered by the leader's epoch, then by the leader's own count."""

    epoch: int
    seq: int

    def __str__(self) -> str:
        return f"{self.epoch}-{self.seq}"


JOURNAL_START = EntryId(0, 0)
RECORD_OVERHEAD = 240  # bytes of the store's memory that a record takes beside its payload and its request_id


@dataclass(frozen=True, slots=True)
class StoredEntry:
    """Entry as the store holds it, not yet verified."""

    entry_id: EntryId
    payload: bytes | None  # None: the entry has no such field
    checksum: bytes | None


class Record(NamedTuple):
    """Record of an ended request."""

    request_id: str
    tenant: str
    ended_unix_ns: int
    payload: bytes
    replaces: bool = False  # what the store has of this request_id; else that stays

    @property
    def weight(self) -> int:
        """Bytes that it counts for: about its memory in the store, keys and accounts included."""
        return len(self.payload) + 2 * len(self.request_id.encode()) + RECORD_OVERHEAD


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordLimits:
    """Limits of records: time to live, and bytes of one tenant and of all together.

    Above a limit records of the requests that ended first are dropped: of the tenant, or of the one with most bytes.
    """

    ttl_s: int = 3600
    max_bytes: int = 1 << 30
    max_tenant_bytes: int = 3 << 28


class StoreError(Exception):
    """Base of the errors of a store."""


class StoreUnavailableError(StoreError, UnavailableError):
    """Temporary failure: no answer, connection lost, no memory, no disk, read-only. The command may have been done.

    `message` is what the store or its client library said, with addresses and users. It is for the log alone.
    """

    @property
    def public_message(self) -> str:
        return "the journal is not available at the moment; repeat the call, which does no harm"


class StoreTimeoutError(StoreUnavailableError):
    """No answer in time. The command may have been done."""


class StoreConfigurationError(StoreUnavailableError):
    """Lasting failure of the configuration: wrong address, wrong password, missing permission."""


class StoreFlushedError(StoreError):
    """The journal is gone: the store has lost its contents. Nothing was written."""


class StaleEntryError(StoreError):
    """The journal already has an entry with this id or a later one. Nothing was written."""


class FencedError(StoreError):
    """A newer leader writes the journal; this process must stop leading."""


class AnotherLeaderError(StoreError):
    """A living scheduler leads already, and this process may not take over from it."""


class JournalLostError(StoreError):
    """The store has lost entries that it had acknowledged, or all of them."""


class JournalDamagedError(StoreError):
    """An entry cannot be read back as it was written."""


class Store(Protocol):
    """Journal stream, epoch counter and request records.

    Every method may raise StoreUnavailableError. `append` and `last_entry_id` belong to the one journal writer, and
    are ordered among themselves; the others may run beside them.
    """

    @property
    def kind(self) -> str:
        """Either "redis" or "memory"."""

    @property
    def durable(self) -> bool:
        """True if acknowledged data outlives the process."""

    @property
    def durability(self) -> str:
        """Durability of an acknowledgement, in a few words for the log."""

    async def next_epoch(self) -> int:
        """Increment the epoch and return it."""

    async def raise_epoch(self, epoch: int) -> None:
        """Raise the epoch to at least this one."""

    async def append(self, entry_id: EntryId, payload: bytes, *, create: bool = False) -> None:
        """Append one entry; returns once the store keeps it.

        Raises StaleEntryError, or StoreFlushedError unless `create` allows it to begin the stream.
        """

    async def last_entry_id(self) -> EntryId | None:
        """Id of the last entry ever added, trimmed or not. None if there is no journal."""

    async def read_entries(self, first: EntryId, limit: int, *, is_urgent: bool = False) -> Sequence[StoredEntry]:
        """Read up to `limit` entries in order, from `first` on, itself included; fewer are all there are.

        `is_urgent`: a leader needs them within the life of a lease, so a lost reply is waited for no longer than that
        of an `append`.
        """

    async def first_entry_id(self, first: EntryId, *, is_urgent: bool = False) -> EntryId | None:
        """Id of the first entry from `first` on, itself included; None if there is none.

        Costs the same however long the entry is. `is_urgent`: as in `read_entries`.
        """

    async def trim(self, oldest: EntryId) -> None:
        """Drop entries before `oldest`; some of them may stay a while."""

    async def put_records(self, records: Sequence[Record], limits: RecordLimits) -> int:
        """Keep each record for `ttl_s` from now by the store's clock, as far as there is room.

        Leaves a record that is there as it is, unless one comes that `replaces` it. So repeating it is harmless, and so
        is a write that comes late. Returns the number of records dropped for want of room, of these or earlier ones.
        """

    async def known_records(self, request_ids: Sequence[str]) -> set[str]:
        """Request ids, of these, that have a record."""

    async def dropped_until(self, tenants: Collection[str]) -> Mapping[str, int]:
        """Latest end (Unix, ns) of a record dropped for want of room, by tenant; tenants without one are left out.

        Requests of the tenant that ended before have no record any more and need none.
        """

    async def get_record(self, request_id: str) -> bytes | None:
        """Payload of a record; None if there is none or it has expired."""

    async def close(self) -> None:
        """Close every connection."""
