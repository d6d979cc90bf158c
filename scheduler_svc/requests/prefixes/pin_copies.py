"""Copies of pins among shards: the pins of shard 0 count, and every other shard keeps the same.

So a pin that was made before a shard was added is there, too, and one that was removed while a shard was gone does not
come back with it. Clients pin and unpin in all shards themselves; a difference that lasts is mended here, from the
journal of shard 0. What a client has pinned here stays while shard 0 may still compute it for the same call. Knows no
client, and not where that journal is.
"""

from collections.abc import Awaitable, Callable, Sequence

import structlog

from quire.params import PIN_TIMEOUT_S
from quire.v1 import journal_pb2
from scheduler_svc.journal.journal_entry import decode
from scheduler_svc.journal.store import (
    JOURNAL_START,
    EntryId,
    JournalDamagedError,
    StoredEntry,
    StoreUnavailableError,
)
from scheduler_svc.requests.prefixes.prefix_keeper import PrefixKeeper
from scheduler_svc.requests.prefixes.prefix_pin import digest_of_pins
from scheduler_svc.requests.recovery.journal_replay import JournalReplay

PATIENCE_S = 2.0  # while a client pins in one shard after the other; twice as long after each attempt in vain
MOST_PATIENCE_S = 64.0
_PAGE = 64  # entries

Pins = Sequence[journal_pb2.PinChange]

log = structlog.get_logger()


class PinCopies:
    """One per leader of a shard other than 0."""

    def __init__(self, keeper: PrefixKeeper, read_pins: Callable[[], Awaitable[Pins]]) -> None:
        """Take the pins of this shard, and the way to read those of shard 0 from its journal.

        `read_pins` may raise StoreUnavailableError and JournalDamagedError.
        """
        self._keeper = keeper
        self._read_pins = read_pins
        self._differs_since_s: float | None = None
        self._patience_s = PATIENCE_S

    async def update(self, read_digest: Callable[[], int | None], now_s: float) -> None:
        """Make the pins of this shard those of shard 0, if they have differed for a while.

        What was read counts only if it is what the leader of shard 0 says that it has: its last changes may not be in
        the journal yet, and of a journal that is being restated a part is missing.

        Args:
            read_digest: returns `digest_of_pins` of shard 0, as its leader said lately; None: it is not known.
            now_s: seconds of the event loop's clock.
        """
        digest = read_digest()
        if digest is None or digest == self._keeper.digest:
            self._differs_since_s, self._patience_s = None, PATIENCE_S
            return
        if self._differs_since_s is None:
            self._differs_since_s = now_s
        if now_s - self._differs_since_s < self._patience_s:
            return
        self._differs_since_s, self._patience_s = now_s, min(2 * self._patience_s, MOST_PATIENCE_S)
        try:
            pins = await self._read_pins()
        except (StoreUnavailableError, JournalDamagedError) as error:
            log.warning("pins of shard 0 not read", reason=str(error))
            return
        if digest_of_pins(pins) == read_digest():  # which may be another one by now
            self._keeper.replace_pins(pins, asked_before_s=now_s - PIN_TIMEOUT_S)


async def read_pins(read_after: Callable[[EntryId, int], Awaitable[Sequence[StoredEntry]]]) -> Pins:
    """Read the pins of another shard from its journal, whatever else is there.

    `read_after` returns so many entries behind one. Raises JournalDamagedError, and what `read_after` raises.
    """
    replay, last = JournalReplay(), JOURNAL_START
    while page := await read_after(last, _PAGE):
        for stored in page:
            _replay_pins(replay, stored)
        last = page[-1].entry_id
        if len(page) < _PAGE:
            break
    return [each.change for each in replay.pins.values()]


def _replay_pins(replay: JournalReplay, stored: StoredEntry) -> None:
    """Apply an entry without its requests."""
    entry = decode(stored)
    is_start = entry.HasField("leader_start")
    if not is_start and not entry.pins and entry.restatements:
        return  # a leader is restating everything still
    of_pins = journal_pb2.JournalEntry(pins=entry.pins)
    if is_start:
        of_pins.leader_start.CopyFrom(entry.leader_start)
    replay.apply(stored.entry_id, of_pins)
