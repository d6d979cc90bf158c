"""A scheduler's side of the simulated store: connections with one command at a time on each, as RedisStore has them.

The way of one scheduler to the store can be cut at a command that is counted out, which then may have arrived or not.
"""

import asyncio
import time
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from zlib import crc32

from scheduler_svc.journal.store import EntryId, Record, RecordLimits, StoredEntry, StoreUnavailableError
from tests.simulation.store_server import Command, LossyStore, StoreServer

JOURNAL_TIMEOUT_S = 1.0
SIDE_TIMEOUT_S = 5.0


@dataclass(slots=True)
class Way:
    """Connection of one scheduler to the store. Cut at the command that brings `num_left` to 0, for `cut_s`.

    `before_command` is called before each.
    """

    server: StoreServer
    num_left: int = 0
    cut_s: float = 0.0
    before_command: Callable[[], None] = lambda: None
    _cut_until_s: float = 0.0

    def cut_at(self, num_commands: int, cut_s: float) -> None:
        self.num_left, self.cut_s = num_commands, cut_s

    @property
    def is_cut(self) -> bool:
        """True if nothing gets through now."""
        return self.server.now_s < self._cut_until_s

    def lets_pass(self) -> bool:
        """True if one more command and its reply get through."""
        self.before_command()
        if self.num_left:
            self.num_left -= 1
            if not self.num_left:
                self._cut_until_s = self.server.now_s + self.cut_s
        return not self.is_cut

    def is_cut_now(self) -> bool:
        """True if the command that was counted last cut it."""
        return self.server.now_s + self.cut_s == self._cut_until_s


class Link:
    """Connects when it is used, and again after any failure. A command without a reply in time may still be done."""

    def __init__(self, way: Way, timeout_s: float) -> None:
        self._way = way
        self._server = way.server
        self._timeout_s = timeout_s
        self._lock = asyncio.Lock()
        self._connected_to: int | None = None

    async def call(
        self,
        name: str,
        work: Callable[[LossyStore], Coroutine[Any, Any, Any]],
        *,
        is_write: bool = False,
        taken: tuple[EntryId, bytes] | None = None,
    ) -> Any:
        async with self._lock:
            reply: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
            if not self._way.lets_pass():
                if self._way.is_cut_now():  # its reply is what is lost
                    self._server.send(Command(name, work, is_write, reply, self._server.server, taken))
                reply.cancel()
                self._connected_to = None
                raise StoreUnavailableError("connection reset by peer")
            server = self._server.server if self._connected_to is None else self._connected_to
            self._connected_to = None
            self._server.send(Command(name, work, is_write, reply, server, taken))
            try:
                async with asyncio.timeout(self._timeout_s):
                    result = await reply
            except TimeoutError as error:
                raise StoreUnavailableError(f"no answer within {self._timeout_s:g} s") from error
            self._connected_to = server
            return result


class StoreClient:
    """Implements Store."""

    kind = "redis"
    durable = True
    durability = "simulated"

    def __init__(self, way: Way) -> None:
        self._journal = Link(way, JOURNAL_TIMEOUT_S)
        self._side = Link(way, SIDE_TIMEOUT_S)

    async def next_epoch(self) -> int:
        epoch: int = await self._journal.call("incr", lambda store: store.next_epoch(), is_write=True)
        return epoch

    async def raise_epoch(self, epoch: int) -> None:
        await self._journal.call(f"raise {epoch}", lambda store: store.raise_epoch(epoch), is_write=True)

    async def append(self, entry_id: EntryId, payload: bytes, *, create: bool = False) -> None:
        name = f"append {entry_id} {len(payload)} {crc32(payload)}"
        await self._journal.call(
            name,
            lambda store: store.append(entry_id, payload, create=create),
            is_write=True,
            taken=(entry_id, payload),
        )

    async def last_entry_id(self) -> EntryId | None:
        last: EntryId | None = await self._journal.call("last", lambda store: store.last_entry_id())
        return last

    async def read_entries(self, first: EntryId, limit: int, *, is_urgent: bool = False) -> Sequence[StoredEntry]:
        link = self._journal if is_urgent else self._side
        entries: Sequence[StoredEntry] = await link.call(
            f"read {first}", lambda store: store.read_entries(first, limit)
        )
        return entries

    async def first_entry_id(self, first: EntryId, *, is_urgent: bool = False) -> EntryId | None:
        link = self._journal if is_urgent else self._side
        found: EntryId | None = await link.call(f"first {first}", lambda store: store.first_entry_id(first))
        return found

    async def trim(self, oldest: EntryId) -> None:
        await self._side.call(f"trim {oldest}", lambda store: store.trim(oldest), is_write=True)

    async def put_records(self, records: Sequence[Record], limits: RecordLimits) -> int:
        kept, unix_ns = list(records), time.time_ns()
        name = f"put {sorted(each.request_id for each in kept)}"
        num_dropped: int = await self._side.call(
            name, lambda store: store.put_records_at(unix_ns, kept, limits), is_write=True
        )
        return num_dropped

    async def dropped_until(self, tenants: Collection[str]) -> Mapping[str, int]:
        asked = list(tenants)
        dropped_until: Mapping[str, int] = await self._side.call("dropped", lambda store: store.dropped_until(asked))
        return dropped_until

    async def known_records(self, request_ids: Sequence[str]) -> set[str]:
        known: set[str] = await self._side.call("known", lambda store: store.known_records(request_ids))
        return known

    async def get_record(self, request_id: str) -> bytes | None:
        payload: bytes | None = await self._side.call(f"get {request_id}", lambda store: store.get_record(request_id))
        return payload

    async def close(self) -> None:
        """Do nothing: there is nothing to release."""
