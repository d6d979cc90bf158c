"""Store in Redis (7.0 or later) or Valkey (8 or later), in one server or a cluster.

The journal has a connection of its own, so that no command waits before an entry. Knows commands and keys, not the
contents of entries and records.
"""

import asyncio
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from typing import Any
from zlib import crc32

import structlog

from quire.redaction import without_passwords
from scheduler_svc.journal.entry_pages import EntryPages, asking_first_id, entry_id_of
from scheduler_svc.journal.keys import Keys
from scheduler_svc.journal.links import open_link
from scheduler_svc.journal.record_reads import RecordReads
from scheduler_svc.journal.record_script import MOST_DROPPED, RECORDS_AT_ONCE, putting
from scheduler_svc.journal.redis_link import Packed, pack
from scheduler_svc.journal.replica_wait import ReplicaWait
from scheduler_svc.journal.store import (
    EntryId,
    Record,
    RecordLimits,
    StoreConfigurationError,
    StoredEntry,
    StoreFlushedError,
    StoreUnavailableError,
)
from scheduler_svc.journal.store_checks import UNKNOWN, check_nodes

log = structlog.get_logger()

_CONNECT_PAUSE_S = 0.2
_SIDE_TIMEOUT_S = 5.0
_KEYS_AT_ONCE = 500
_READ_ATTEMPTS = 3  # of what must be confirmed: the node may be gone, and the next one told by an old map
_WAIT_PART = 0.5  # of the time limit of an entry, for replicas
# KEYS: journal. What is known of the stream comes with its first and its last entry, which stay there.
_LAST_ID = b"""#!lua flags=no-writes
local known = redis.call('XINFO', 'STREAM', KEYS[1])
for i = 1, #known, 2 do
  if known[i] == 'last-generated-id' then return known[i + 1] end
end
"""


class RedisStore:
    """Each method is one command, or one pipeline of commands or scripts that do not depend on each other.

    Acknowledged entries and records are as durable as the server is configured to be: with `appendonly yes` and
    `appendfsync always` they survive the loss of any process and of power. With `replicas` they are acknowledged once
    so many replicas have them, too, as far as there are so many.
    """

    kind = "redis"
    durable = True

    def __init__(self, url: str, *, deployment: str = "default", timeout_s: float = 1.0, replicas: int = 0) -> None:
        """Take the address; `connect` tries it. `replicas`: to wait for.

        Raises StoreConfigurationError (the address) or ValueError (the deployment) if it is malformed.
        """
        self.address = without_passwords(url)
        self.durability = UNKNOWN
        self._keys = Keys.of(deployment)
        keys, side_s = [self._keys.journal], max(timeout_s, _SIDE_TIMEOUT_S)
        self._journal = open_link(url, keys, timeout_s=timeout_s, repeatable=False, reports_moves=True)
        self._side = open_link(url, keys, timeout_s=side_s, repeatable=True)
        self._records = self._side
        if replicas:  # what is asked behind a write is of the node that did it, so no other call may follow a move
            self._records = open_link(url, keys, timeout_s=side_s, repeatable=False, reports_moves=True)
        self._pages, self._urgent_pages = EntryPages(self._side, keys[0]), EntryPages(self._journal, keys[0])
        self._replicas = ReplicaWait(replicas, timeout_s * _WAIT_PART)  # of the journal's link
        self._record_replicas = ReplicaWait(replicas, timeout_s * _WAIT_PART, logs_changes=False)
        self._records_lock = asyncio.Lock()  # a write and what is asked behind it
        self._write_of_nothing = pack("INCRBY", self._keys.epoch, 0)  # replicas confirm it like any write
        self._record_reads = RecordReads(self._get_records)
        self._append_head = _head(9 - 1, "XADD", self._keys.journal, "NOMKSTREAM")
        self._create_head = _head(8 - 1, "XADD", self._keys.journal)

    async def connect(self, patience_s: float) -> None:
        """Waits until the server answers, and warns of settings that would lose acknowledged entries.

        Raises StoreConfigurationError at once, or StoreUnavailableError after `patience_s`, with a sentence for
        people.
        """
        loop = asyncio.get_running_loop()
        give_up_at = loop.time() + patience_s
        is_waiting = False
        while True:
            try:
                await self._side.call(pack("EXISTS", self._keys.epoch))  # a node may answer, and not for our keys
                self.durability = await check_nodes(self._side, self.address)
                break
            except StoreConfigurationError as error:
                raise StoreConfigurationError(f"the store at {self.address} refuses us: {error}") from error
            except StoreUnavailableError as error:
                if loop.time() + _CONNECT_PAUSE_S >= give_up_at:
                    raise StoreUnavailableError(_unreachable(self.address, patience_s, error)) from error
                if not is_waiting:
                    log.warning("waiting for the store", store=self.address, reason=error.message)
                    is_waiting = True
                await asyncio.sleep(_CONNECT_PAUSE_S)
        await self._look_for_replicas()

    async def _look_for_replicas(self) -> None:
        """Learn how many replicas there are to wait for."""
        if not self._replicas.wanted:
            return
        with suppress(StoreUnavailableError):  # it is learned with the first entry, then
            info = await self._side.call(pack("INFO", "replication"))
            self._replicas.learn(info)
            self._record_replicas.learn(info)
            self.durability += f"; replicas that must have an entry: {self._replicas.expected}"

    async def next_epoch(self) -> int:
        return int(await self._journal.call(pack("INCR", self._keys.epoch)))

    async def raise_epoch(self, epoch: int) -> None:
        # Two commands: who counts up in between only makes it higher.
        known = int(await self._journal.call(pack("INCRBY", self._keys.epoch, 0)))
        if known < epoch:
            await self._journal.call(pack("INCRBY", self._keys.epoch, epoch - known))

    async def append(self, entry_id: EntryId, payload: bytes, *, create: bool = False) -> None:
        name = b"%d-%d" % entry_id
        command = b"%b$%d\r\n%b\r\n$1\r\ne\r\n$%d\r\n%b\r\n$1\r\nc\r\n$8\r\n%08x\r\n" % (
            self._create_head if create else self._append_head,
            len(name),
            name,
            len(payload),
            payload,
            crc32(payload),
        )
        waiting = self._replicas.begin()
        added, *replies = await self._journal.call_many([command], then=waiting.commands)
        if added is None:
            raise StoreFlushedError(f"{self._keys.journal} is gone from {self.address}")
        if self._replicas.wanted:
            await self._replicas.check(waiting, replies, self._journal)

    async def last_entry_id(self) -> EntryId | None:
        show = pack("EVAL", _LAST_ID, 1, self._keys.journal)
        try:
            if self._replicas.is_unconfirmed:
                reply = await self._confirmed(show)
            else:
                reply = await self._urgent_pages.look(show)
        except StoreUnavailableError as error:
            if "no such key" in error.message:
                return None
            raise
        return entry_id_of(reply)

    async def _confirmed(self, show: Packed) -> Any:
        """Reply to this command once the replicas have what it shows, too, which may be an entry that we doubt.

        Replicas answer for the last write of a connection, and there may have been none on this one.
        """
        waiting = self._replicas.begin()
        _, reply, *replies = await self._journal.call_many([self._write_of_nothing, show], then=waiting.commands)
        await self._replicas.check(waiting, replies, self._journal)
        return reply

    async def read_entries(self, first: EntryId, limit: int, *, is_urgent: bool = False) -> Sequence[StoredEntry]:
        def ask(last: EntryId | None, count: int) -> Packed:
            start = first if last is None else EntryId(last.epoch, last.seq + 1)
            return pack("XRANGE", self._keys.journal, str(start), "+", "COUNT", count)

        pages = self._urgent_pages if is_urgent else self._pages
        return await pages.read(ask, list, limit, is_urgent=is_urgent)

    async def first_entry_id(self, first: EntryId, *, is_urgent: bool = False) -> EntryId | None:
        pages = self._urgent_pages if is_urgent else self._pages
        found = await pages.look(asking_first_id(self._keys.journal, first))
        return entry_id_of(found) if found is not None else None

    async def trim(self, oldest: EntryId) -> None:
        await self._side.call(pack("XTRIM", self._keys.journal, "MINID", "~", str(oldest)))

    async def put_records(self, records: Sequence[Record], limits: RecordLimits) -> int:
        now_ns = time.time_ns()
        commands = [
            putting(self._keys, records[start : start + RECORDS_AT_ONCE], limits, now_ns)
            for start in range(0, len(records), RECORDS_AT_ONCE)
        ]
        # A record that is there is not written again, but may be one that the replicas lack.
        always = [self._write_of_nothing] if self._record_replicas.wanted else []
        num_dropped = 0
        async with self._records_lock:
            while commands:
                replies = (await self._replicate([*commands, *always]))[: len(commands)]
                num_dropped += sum(replies)
                commands = [each for each, dropped in zip(commands, replies, strict=True) if dropped == MOST_DROPPED]
        return num_dropped

    async def _replicate(self, commands: Sequence[Packed]) -> list[Any]:
        """Replies to these commands, the last of which writes, once the replicas have what the node has then."""
        waiting = self._record_replicas.begin()
        replies = await self._records.call_many(commands, then=waiting.commands)
        await self._record_replicas.check(waiting, replies[len(commands) :], self._records)
        return replies[: len(commands)]

    async def _read_confirmed(self, commands: Sequence[Packed]) -> list[Any]:
        """Replies to these reads once the replicas have what they show.

        A node that was frozen may show what no other has, until it is told that it is a replica now.
        """
        if not self._record_replicas.wanted:
            return await self._side.call_many(commands)
        for attempt in range(_READ_ATTEMPTS):
            try:
                async with self._records_lock:
                    replies = await self._records.call_many(commands)
                    await self._replicate([self._write_of_nothing])
                return replies
            except StoreUnavailableError as error:
                if attempt + 1 == _READ_ATTEMPTS or isinstance(error, StoreConfigurationError):
                    raise
        raise AssertionError("there is one attempt at least")

    async def dropped_until(self, tenants: Collection[str]) -> Mapping[str, int]:
        asked, ends = list(tenants), list[float | None]()
        for start in range(0, len(asked), _KEYS_AT_ONCE):
            page = asked[start : start + _KEYS_AT_ONCE]
            (found,) = await self._read_confirmed([pack("ZMSCORE", self._keys.records_dropped, *page)])
            ends += found
        return {tenant: int(end) * 1000 + 999 for tenant, end in zip(asked, ends, strict=True) if end is not None}

    async def known_records(self, request_ids: Sequence[str]) -> set[str]:
        known: set[str] = set()
        for start in range(0, len(request_ids), _KEYS_AT_ONCE):
            page = request_ids[start : start + _KEYS_AT_ONCE]
            replies = await self._read_confirmed([pack("EXISTS", self._keys.record(each)) for each in page])
            known.update(each for each, exists in zip(page, replies, strict=True) if exists)
        return known

    async def get_record(self, request_id: str) -> bytes | None:
        return await self._record_reads.get(request_id)

    async def _get_records(self, request_ids: Sequence[str]) -> Sequence[bytes | None]:
        return await self._side.call_many([pack("GET", self._keys.record(each)) for each in request_ids])

    async def close(self) -> None:
        self._record_reads.close()
        await self._journal.close()
        await self._side.close()
        await self._records.close()


def _head(num_words: int, *words: str) -> bytes:
    """The part of a command that is always the same."""
    return pack(*words).replace(b"*%d" % len(words), b"*%d" % num_words)


def _unreachable(address: str, patience_s: float, error: StoreUnavailableError) -> str:
    return (
        f"the store at {address} did not answer within {patience_s:g} s ({error.message}): start Redis or Valkey "
        "there, give the address of one that runs, or use the store `memory`, which is not durable"
    )
