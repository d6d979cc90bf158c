"""Standby: a scheduler that waits until it may lead, when the lease is free or the leader has handed over.

Knows the lease, and that the journal is followed meanwhile; nothing of requests.
"""

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress

import structlog

from common.waits import end_tasks, is_set_within
from scheduler_svc.journal.leases import MOST_LONGER_MS, HeldLease, Lease, Leases
from scheduler_svc.journal.store import StoreUnavailableError
from scheduler_svc.leadership.hot_journal import HotJournal
from scheduler_svc.leadership.seen_leaders import SeenLeaders

log = structlog.get_logger()

_LOOKS = 10  # at the lease, within its life
_ANNOUNCEMENTS = 2  # within the time that each counts
_PRESENT_LEASES = 2  # the time that an announcement counts, in lives of a lease
# Lives of a lease in which its holder rewrites what an emptied store has lost: a leader probes four times in one.
# A leader that begins without that state waits for a whole life before it serves.
_FORGOTTEN_LEASES = 0.5
_LONGEST_LEASES = 2  # lives of a lease that one can have left, with room for settings that are being changed
_AFTER_END_S = 0.002  # a lease is looked at again so soon after it must have ended


class Standby:
    """One per standby process; `wait` may be called again after a failed take-over.

    `on_leader` gets the leader's address whenever that changes; None: there is none.
    """

    def __init__(
        self,
        leases: Leases,
        lease: Lease,
        journal: HotJournal,
        *,
        lease_ms: int,
        on_leader: Callable[[str | None], None],
    ) -> None:
        """`lease` is ours, with no epoch yet."""
        self._leases = leases
        self._lease = lease
        self._journal = journal
        self._lease_ms = lease_ms
        self._longest_ms = _LONGEST_LEASES * lease_ms + MOST_LONGER_MS
        self._on_leader = on_leader
        self._leader: Lease | None = None  # as last seen
        self._seen: Lease | None = None  # the last lease seen, ended or not
        self._seen_until_s = 0.0  # its end, unless it is released before
        self._held_since_s = 0.0  # by the same holder, as seen here
        self.seen_leaders = SeenLeaders()
        self._could_not_look = False
        self._has_lease = False
        self._is_new = True  # no lease was seen, and none waited for
        # Do not take over before: at our own start, after a time without the store, or after a loss in it, the leader
        # may live, and be about to renew.
        self._patient_until_s = 0.0

    async def wait(self) -> bool:
        """Return once this process shall lead: True if the lease is ours.

        False: another holds it, and begins without the entries that were read here. Raises what announcing or
        following ends with before.
        """
        announcing = asyncio.create_task(self._announce())
        following, followed = asyncio.create_task(self._journal.follow()), self._seen
        try:
            while (pause_s := await self._try_to_lead()) is not None:
                if self._seen != followed:  # its entries count now, and an answer for which we wait may never come
                    await end_tasks(following)
                    following, followed = asyncio.create_task(self._journal.follow()), self._seen
                await self._pause(pause_s)
                for task in (announcing, following):
                    if task.done():
                        task.result()
        finally:
            await end_tasks(announcing, following)
            await self._withdraw()
        return self._has_lease

    async def _try_to_lead(self) -> float | None:
        """Take the lease if it may be taken. Returns the seconds until the next look; None: this process shall lead."""
        loop = asyncio.get_running_loop()
        pause_s = self._lease_ms / 1000 / _LOOKS
        try:
            held = await self._leases.read()
            is_ours = held is not None and held.lease.holder == self._lease.holder  # since a time at which we led not
            if held is not None and not is_ours and held.left_ms > self._longest_ms:
                held = await self._shorten(held)
            if held is not None and not is_ours:
                self._record_held(held)
            is_over = self._was_handed_over()
            if held is not None and not is_ours and self._is_forgotten():
                log.warning("another scheduler begins to lead without what this one has read", other=str(held.lease))
                self._has_lease = False
                return None
            if held is not None and not is_ours and not is_over:
                self._could_not_look, self._is_new, self._patient_until_s = False, False, 0.0
                self._set_leader(held.lease)
                return min(pause_s, max(0, held.left_ms) / 1000 + _AFTER_END_S)
            is_doubtful = self._could_not_look or self._is_new or loop.time() < self._seen_until_s
            if is_doubtful and not is_ours and not is_over:
                log.warning("the lease is free; waiting for a leader that may have lost it", lease_ms=self._lease_ms)
                self._could_not_look, self._is_new, self._seen_until_s = False, False, 0.0
                self._patient_until_s = loop.time() + self._lease_ms / 1000
            if loop.time() < self._patient_until_s and not is_over:
                return pause_s
            other = await self._leases.take_lease(self._lease, self._lease_ms, ended_epoch=self._journal.ended_epoch)
        except StoreUnavailableError as error:
            if not self._could_not_look:
                log.warning("the lease cannot be read", reason=error.message)
            self._could_not_look = True
            return pause_s
        self._set_leader(other)
        self._has_lease = other is None
        if other is None:
            log.info("lease taken", handed_over=is_over)
        return None if other is None else pause_s

    def _record_held(self, held: HeldLease) -> None:
        """Record another scheduler's lease."""
        if self._seen is None or self._seen.holder != held.lease.holder:
            self._held_since_s = time.monotonic()
        self._seen, self._seen_until_s = held.lease, asyncio.get_running_loop().time() + held.left_ms / 1000
        self.seen_leaders.record(held.lease)

    async def _shorten(self, held: HeldLease) -> HeldLease:
        """Make a lease end in time though the store's clock was set back: a living leader renews it before."""
        log.warning("the lease would not end in time: the store's clock was set back", left_ms=held.left_ms)
        await self._leases.shorten(held.lease, self._lease_ms)
        return HeldLease(held.lease, self._lease_ms)

    def _was_handed_over(self) -> bool:
        """True if the last lease seen is that of the leader that handed over, which may not have had its epoch yet."""
        if self._seen is None or not self._journal.ended_epoch:
            return False
        if self._seen.epoch == 0:
            return self._seen.leader_id == self._journal.ended_leader_id
        return self._seen.epoch == self._journal.ended_epoch

    def _is_forgotten(self) -> bool:
        """True if the next leader would lose the entries read here, and the lease's holder had time to rewrite them."""
        forgotten_s = self._journal.forgotten_since_s
        if forgotten_s is None:
            return False
        since_s = max(forgotten_s, self._held_since_s)
        return time.monotonic() >= since_s + self._lease_ms / 1000 * _FORGOTTEN_LEASES

    async def _pause(self, seconds: float) -> None:
        """Pause, shorter if the leader hands over meanwhile."""
        await is_set_within(self._journal.has_ended, seconds)
        self._journal.has_ended.clear()

    def _set_leader(self, leader: Lease | None) -> None:
        if leader == self._leader:
            return
        self._leader = leader
        log.info("leader seen" if leader is not None else "no leader seen", leader=leader.address if leader else None)
        self._on_leader(leader.address if leader is not None else None)

    async def _announce(self) -> None:
        """Announce this standby while it is of use, until cancelled.

        A leader hands over to whom it sees here, and every stream would wait for one that still reads the journal.
        Where nobody leads, other schedulers shall see that one comes.
        """
        present_ms = _PRESENT_LEASES * self._lease_ms
        while True:
            if self._journal.has_caught_up.is_set() or (self._leader is None and not self._is_new):
                with suppress(StoreUnavailableError):  # it is repeated, and the look at the lease logs the failure
                    await self._leases.announce(self._lease.address, present_ms)
                await asyncio.sleep(present_ms / 1000 / _ANNOUNCEMENTS)
            else:
                await is_set_within(self._journal.has_caught_up, self._lease_ms / 1000 / _LOOKS)

    async def _withdraw(self) -> None:
        with suppress(StoreUnavailableError):  # the announcement ends soon
            await self._leases.announce(self._lease.address, 0)
