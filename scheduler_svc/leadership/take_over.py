"""Take-over of leadership: take an epoch, read the journal, declare the start.

Nothing is served before that: if the store fails on the way, the attempt is dropped and a new one begins from nothing.
Knows no gRPC.
"""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

import structlog

from common.waits import end_tasks
from scheduler_svc.journal.journal import Journal
from scheduler_svc.journal.journal_entry import decode, is_news
from scheduler_svc.journal.leases import Lease, Leases
from scheduler_svc.journal.records import Records
from scheduler_svc.journal.store import (
    AnotherLeaderError,
    FencedError,
    JournalDamagedError,
    JournalLostError,
    Store,
    StoreConfigurationError,
    StoreUnavailableError,
)
from scheduler_svc.leadership.hot_journal import HotJournal
from scheduler_svc.leadership.lease_keeper import LeaseKeeper
from scheduler_svc.leadership.living_leader import find_living_leader
from scheduler_svc.leadership.seen_leaders import SeenLeaders
from scheduler_svc.leadership.standby import Standby
from scheduler_svc.requests.live.engine import Engine
from scheduler_svc.requests.live.readers import Readers
from scheduler_svc.requests.recovery.recovery import JournalContents, Recovery

log = structlog.get_logger()

_RETRY_S = 0.1
_LOOK_S = 0.25
# Lives of a lease to wait for a leader that was seen here, and may come back to an emptied store: it may be frozen, or
# cut off from the store.
_RETURN_LEASES = 8
_RETURN_LOOKS = 5  # at the journal, two commands each: as long as a leader needs to begin again
_TOLD_S = 1.0  # a longer wait is told anew from so much on
_RETRIED_S = 1.5  # a leader that was refused by the store, or not answered, tries again within a second


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """Parts that hold requests, made anew for each attempt to lead."""

    journal: Journal
    records: Records
    engine: Engine
    readers: Readers
    recovery: Recovery


@dataclass(frozen=True, slots=True, kw_only=True)
class Leading:
    """Attempt that succeeded. `keeping_lease` runs until it is cancelled."""

    attempt: Attempt
    epoch: int
    lease: LeaseKeeper
    keeping_lease: "asyncio.Task[None]"


class TakeOver:
    """Tries until this process leads: a standby for ever, others as long as `store_timeout_s`.

    A standby goes back to stand by after a failed attempt, and keeps the journal that it has read.
    """

    def __init__(
        self,
        new_attempt: Callable[[], Attempt],
        store: Store,
        leases: Leases,
        me: Lease,
        *,
        lease_ms: int,
        store_timeout_s: float,
        standby: Standby | None = None,
        hot: HotJournal | None = None,
        gives_way: bool = False,
    ) -> None:
        """`standby` and `hot` come together: the standby, and the journal that it follows meanwhile.

        `gives_way`: without a standby end if a living scheduler leads; else it is taken over from.
        """
        self._new_attempt = new_attempt
        self._store = store
        self._leases = leases
        self._me = me
        self._lease_ms = lease_ms
        self._store_timeout_s = store_timeout_s
        self._standby = standby
        self._hot = hot
        self._gives_way = gives_way
        self._seen_leaders = standby.seen_leaders if standby is not None else SeenLeaders()

    async def lead(self) -> Leading:
        """Return once this process leads, and may serve.

        Raises JournalDamagedError if an entry of the journal is damaged; without `standby` also StoreUnavailableError,
        FencedError and AnotherLeaderError.
        """
        loop = asyncio.get_running_loop()
        give_up_s = loop.time() + self._store_timeout_s
        told = ""
        while True:
            has_lease = self._standby is None or await self._standby.wait()
            try:
                if self._gives_way and self._standby is None:
                    await self._check_alone()
                return await self._try(is_only_for_loss=not has_lease)
            except (StoreUnavailableError, JournalLostError, FencedError) as error:
                is_final = isinstance(error, FencedError | StoreConfigurationError) or loop.time() > give_up_s
                if self._standby is None and is_final:
                    raise
                if str(error) != told:
                    told = str(error)
                    log.warning("not leading yet: the take-over failed, trying again", reason=told)
            await asyncio.sleep(_RETRY_S)

    async def _check_alone(self) -> None:
        """Raise AnotherLeaderError if a living scheduler leads: two that restart would fence each other for ever."""
        other = await find_living_leader(self._leases, self._me, lease_ms=self._lease_ms)
        if other is not None:
            raise AnotherLeaderError(
                f"the scheduler at {other.address} leads this deployment in the same store: give another --deployment, "
                "or end that one"
            )

    async def _try(self, *, is_only_for_loss: bool) -> Leading:
        attempt = self._new_attempt()
        journal = attempt.journal
        lease = LeaseKeeper(
            self._leases,
            self._me,
            lease_ms=self._lease_ms,
            epoch=lambda: journal.stats.epoch,
            on_other=journal.look_for_leader,
            seen_leaders=self._seen_leaders,
        )
        keeping_lease = asyncio.create_task(lease.keep_lease())
        try:
            if self._standby is None and self._store.durable:
                await self._let_other_begin()
            contents = await open_journal(
                journal,
                attempt.recovery,
                self._store,
                self._hot,
                after_epoch=self._seen_leaders.latest_epoch,
                is_only_for_loss=is_only_for_loss,
            )
            lease.renew_now()
            if contents is not JournalContents.SETTLED and self._store.durable:
                await self._wait_for_leader(journal, lease, is_empty=contents is JournalContents.EMPTY)
            await journal.begin()
        except BaseException as error:
            await end_tasks(keeping_lease)
            await attempt.recovery.close()
            if isinstance(error, FencedError):
                await lease.release()  # another process was faster
            raise
        return Leading(attempt=attempt, epoch=journal.stats.epoch, lease=lease, keeping_lease=keeping_lease)

    async def _let_other_begin(self) -> None:
        """Wait while a living scheduler begins to lead in an empty journal: it may be waiting for one that knows more.

        Without this, two that are started again when they are fenced would fence each other for ever. Wait no longer
        than the other may: a dead scheduler's lease outlives it if the store's clock is set back.
        """
        loop = asyncio.get_running_loop()
        until_s = loop.time() + self._lease_ms / 1000 * (_RETURN_LEASES + 1)
        while loop.time() < until_s:
            held = await self._leases.read()
            if held is None or held.lease.holder == self._me.holder:
                return
            self._seen_leaders.record(held.lease)
            if await _is_ready(self._store):
                return
            await asyncio.sleep(_LOOK_S)

    async def _wait_for_leader(self, journal: Journal, lease: LeaseKeeper, *, is_empty: bool) -> None:
        """Wait for a living leader that may know more than the journal has. Raises FencedError once one begins.

        One life of a lease. If the journal is empty though this process has seen another scheduler lead, a store was
        emptied, and nobody else may know what the other has accepted: then some more. The time counts anew from when
        the store takes writes again, if it took none: nobody could begin in it. Where the store is slow, the other
        needs longer to find that it was emptied and to begin in it.
        """
        loop = asyncio.get_running_loop()
        lease_s = self._lease_ms / 1000
        began_s, least_s, told_s, slowest_s = loop.time(), 0.0, 0.0, 0.0
        while True:
            if lease.is_late:
                began_s, least_s = loop.time(), _RETRIED_S
            is_emptied = is_empty and self._seen_leaders.has_any
            patience_s = max(least_s, lease_s * (_RETURN_LEASES if is_emptied else 1)) + _RETURN_LOOKS * slowest_s
            if patience_s > told_s:
                epoch, told_s = journal.stats.epoch, patience_s + _TOLD_S
                log.info(
                    "waiting for a leader that may know more than the journal has", seconds=patience_s, epoch=epoch
                )
            left_s = began_s + patience_s - loop.time()
            if left_s <= 0:
                return
            await asyncio.sleep(min(left_s, _LOOK_S))
            looked_s = loop.time()
            with suppress(StoreUnavailableError):
                await journal.confirm_leading()
                slowest_s = max(slowest_s, loop.time() - looked_s)


async def open_journal(
    journal: Journal,
    recovery: Recovery,
    store: Store,
    hot: HotJournal | None,
    *,
    after_epoch: int,
    is_only_for_loss: bool = False,
) -> JournalContents:
    """Fence earlier leaders and read what they left.

    Args:
        journal: not opened yet.
        recovery: takes the requests that have not ended.
        store: the journal's.
        hot: the journal as read before, if this was a standby.
        after_epoch: the latest epoch of another leader that is known otherwise: the store may have lost it.
        is_only_for_loss: another holds the lease, and is fenced only if it begins without what `hot` has read. Two that
            have read it would else fence each other for ever.

    Raises StoreUnavailableError, JournalLostError or FencedError if the take-over fails, JournalDamagedError if an
    entry of the journal is damaged.
    """
    says_all_again = hot is not None and await hot.outlives_journal()
    if is_only_for_loss and not says_all_again:
        raise FencedError("another scheduler says everything again meanwhile, or was ready")
    epoch = await journal.open(
        after_epoch=max(after_epoch, hot.last.epoch if hot is not None else 0), says_all_again=says_all_again
    )
    if says_all_again:  # though another one may have said it meanwhile: who reads it then counts on that
        journal.rewrite_on_begin()
    begun = await hot.begun(epoch) if hot is not None else None
    if hot is not None:
        journal.count_followed(hot.num_entries, hot.num_bytes)
    return await recovery.read(store, begun)


async def _is_ready(store: Store) -> bool:
    """True if the last leader in the journal was ready, False if there is none. Raises StoreUnavailableError."""
    last = await store.last_entry_id()
    entries = await store.read_entries(last, 1) if last is not None else []
    try:
        return bool(entries) and is_news(decode(entries[0]))
    except JournalDamagedError:
        return True  # reading the whole journal will report it
