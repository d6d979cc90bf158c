"""Store in Redis (7.0 or later) or Valkey (8 or later).

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
from scheduler_svc.journal.keys import Keys
from scheduler_svc.journal.record_reads import RecordReads
from scheduler_svc.journal.record_script import RECORDS_AT_ONCE, putting
from scheduler_svc.journal.redis_link import RedisLink, pack
from scheduler_svc.journal.store import (
    EntryId,
    Record,
    RecordLimits,
    StoreConfigurationError,
    StoredEntry,
    StoreFlushedError,
    StoreUnavailableError,
)

log = structlog.get_logger()

_CONNECT_PAUSE_S = 0.2
_SIDE_TIMEOUT_S = 5.0
_KEYS_AT_ONCE = 500
_SHOWN_ENTRIES = 2  # the first and the last come with what is known of the stream
_WORTH = {
    "always": "fsync always: it outlives every process and the loss of power",
    "everysec": "fsync everysec: the last two seconds may be lost with the store's process or with power",
    "no": "fsync by the system's choice: half a minute may be lost with power, and some with the store's process",
}


class RedisStore:
    """Each method is one command, or one pipeline of commands or scripts that do not depend on each other.

    Acknowledged entries and records are as durable as the server is configured to be: with `appendonly yes` and
    `appendfsync always` they survive the loss of any process and of power.
    """

    kind = "redis"
    durable = True

    def __init__(self, url: str, *, deployment: str = "default", timeout_s: float = 1.0) -> None:
        """Take the address; `connect` tries it.

        Raises StoreConfigurationError (the address) or ValueError (the deployment) if it is malformed.
        """
        self.address = without_passwords(url)
        self.durability = "unknown: the store does not show its configuration"
        self._keys = Keys.of(deployment)
        self._journal = RedisLink(url, timeout_s=timeout_s, repeatable=False)
        self._side = RedisLink(url, timeout_s=max(timeout_s, _SIDE_TIMEOUT_S), repeatable=True)
        self._record_reads = RecordReads(self._get_records)
        self._longest_bytes = 0  # of the entries sent
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
                persistence, memory = await self._side.call_many([pack("INFO", "persistence"), pack("INFO", "memory")])
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
        self._warn_of_loss(_info(persistence), _info(memory))
        await self._learn_durability(_info(persistence))

    async def _learn_durability(self, persistence: dict[str, str]) -> None:
        """Learn how durable an acknowledgement of the server is, if it allows the question."""
        if persistence.get("aof_enabled") == "0":
            self.durability = "none: accepted requests end with the store's process"
            return
        with suppress(StoreUnavailableError):
            reply = await self._side.call(pack("CONFIG", "GET", "appendfsync"))
            mode = reply.get(b"appendfsync", b"").decode()
            self.durability = _WORTH.get(mode, self.durability)

    def _warn_of_loss(self, persistence: dict[str, str], memory: dict[str, str]) -> None:
        if persistence.get("aof_enabled") == "0":
            log.warning(
                "NOT DURABLE: the store keeps no append-only file, what was accepted dies with it; set appendonly yes",
                store=self.address,
            )
        if memory.get("maxmemory", "0") != "0" and memory.get("maxmemory_policy") != "noeviction":
            log.warning("the store may evict the journal: set maxmemory-policy noeviction", store=self.address)

    async def next_epoch(self) -> int:
        return int(await self._journal.call(pack("INCR", self._keys.epoch)))

    async def raise_epoch(self, epoch: int) -> None:
        # Two commands: who counts up in between only makes it higher.
        known = int(await self._journal.call(pack("INCRBY", self._keys.epoch, 0)))
        if known < epoch:
            await self._journal.call(pack("INCRBY", self._keys.epoch, epoch - known))

    async def append(self, entry_id: EntryId, payload: bytes, *, create: bool = False) -> None:
        self._longest_bytes = max(self._longest_bytes, len(payload))
        name = b"%d-%d" % entry_id
        command = b"%b$%d\r\n%b\r\n$1\r\ne\r\n$%d\r\n%b\r\n$1\r\nc\r\n$8\r\n%08x\r\n" % (
            self._create_head if create else self._append_head,
            len(name),
            name,
            len(payload),
            payload,
            crc32(payload),
        )
        if await self._journal.call(command) is None:
            raise StoreFlushedError(f"{self._keys.journal} is gone from {self.address}")

    async def last_entry_id(self) -> EntryId | None:
        try:
            reply = await self._journal.call(
                pack("XINFO", "STREAM", self._keys.journal), answer_bytes=_SHOWN_ENTRIES * self._longest_bytes
            )
        except StoreUnavailableError as error:
            if "no such key" in error.message:
                return None
            raise
        return _entry_id(reply[b"last-generated-id"])

    async def read_entries(self, first: EntryId, limit: int, *, is_urgent: bool = False) -> Sequence[StoredEntry]:
        command = pack("XRANGE", self._keys.journal, str(first), "+", "COUNT", limit)
        link = self._journal if is_urgent else self._side
        return [stored_entry(*item) for item in await link.call(command)]

    async def trim(self, oldest: EntryId) -> None:
        await self._side.call(pack("XTRIM", self._keys.journal, "MINID", "~", str(oldest)))

    async def put_records(self, records: Sequence[Record], limits: RecordLimits) -> int:
        now_ns = time.time_ns()
        commands = [
            putting(self._keys, records[start : start + RECORDS_AT_ONCE], limits, now_ns)
            for start in range(0, len(records), RECORDS_AT_ONCE)
        ]
        return sum(await self._side.call_many(commands))

    async def dropped_until(self, tenants: Collection[str]) -> Mapping[str, int]:
        asked, ends = list(tenants), list[float | None]()
        for start in range(0, len(asked), _KEYS_AT_ONCE):
            page = asked[start : start + _KEYS_AT_ONCE]
            ends += await self._side.call(pack("ZMSCORE", self._keys.records_dropped, *page))
        return {tenant: int(end) * 1000 + 999 for tenant, end in zip(asked, ends, strict=True) if end is not None}

    async def known_records(self, request_ids: Sequence[str]) -> set[str]:
        known: set[str] = set()
        for start in range(0, len(request_ids), _KEYS_AT_ONCE):
            page = request_ids[start : start + _KEYS_AT_ONCE]
            replies = await self._side.call_many([pack("EXISTS", self._keys.record(each)) for each in page])
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


def _head(num_words: int, *words: str) -> bytes:
    """The part of a command that is always the same."""
    return pack(*words).replace(b"*%d" % len(words), b"*%d" % num_words)


def _info(reply: bytes) -> dict[str, str]:
    lines = reply.decode().splitlines()
    return dict(line.partition(":")[::2] for line in lines if ":" in line)


def _entry_id(name: bytes) -> EntryId:
    epoch, _, seq = name.partition(b"-")
    return EntryId(int(epoch), int(seq))


def stored_entry(name: bytes, flat_fields: list[Any]) -> StoredEntry:
    fields = dict(zip(flat_fields[::2], flat_fields[1::2], strict=True))
    return StoredEntry(_entry_id(name), fields.get(b"e"), fields.get(b"c"))


def _unreachable(address: str, patience_s: float, error: StoreUnavailableError) -> str:
    return (
        f"the store at {address} did not answer within {patience_s:g} s ({error.message}): start Redis or Valkey "
        "there, give the address of one that runs, or use the store `memory`, which is not durable"
    )
