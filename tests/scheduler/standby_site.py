"""A standby on a real store, from standing by to leading: all parts of its take-over, and nothing that serves.

Knows how they are put together, as `scheduler_svc.__main__` does it, and nothing of clients or workers.
"""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.scheduler_config import SchedulerConfig
from scheduler_svc.journal.journal import Journal
from scheduler_svc.journal.leases import Lease
from scheduler_svc.journal.records import Records
from scheduler_svc.journal.redis_leases import RedisLeases
from scheduler_svc.journal.redis_store import RedisStore
from scheduler_svc.journal.redis_tail import RedisTail
from scheduler_svc.leadership.hot_journal import HotJournal
from scheduler_svc.leadership.standby import Standby
from scheduler_svc.leadership.take_over import Attempt, Leading, TakeOver
from scheduler_svc.requests.live.engine import Engine
from scheduler_svc.requests.live.readers import Readers
from scheduler_svc.requests.recovery.recovery import Recovery
from tests.scheduler.renewed_leases import RenewedLeases

LEASE_MS = 400
STORE_TIMEOUT_S = 5.0  # none runs out here, on a slow machine either: a stall ends with a cut
TTL_S = 60


@dataclass
class StandbySite:
    """`stands_by`: else it tries to lead at once. `on_attempt` is called as each attempt to lead begins."""

    name: str
    store: RedisStore
    leases: RedisLeases
    hot: HotJournal
    lease_ms: int
    stands_by: bool = True
    on_attempt: Callable[[], None] = lambda: None
    attempts: list[Attempt] = field(default_factory=list)

    async def lead(self) -> Leading:
        me = Lease(self.name, f"{self.name}:1")
        standby = Standby(self.leases, me, self.hot, lease_ms=self.lease_ms, on_leader=lambda leader: None)
        taking_over = TakeOver(
            self._new_attempt,
            self.store,
            self.leases,
            me,
            lease_ms=self.lease_ms,
            store_timeout_s=STORE_TIMEOUT_S,
            standby=standby if self.stands_by else None,
            hot=self.hot if self.stands_by else None,
        )
        return await taking_over.lead()

    def has_read(self, *numbers: int) -> bool:
        return set(numbers) <= self.hot.replay.requests.keys()

    def _new_attempt(self) -> Attempt:
        self.on_attempt()
        journal, records = Journal(self.store, leader_id=self.name), Records(self.store)
        engine = Engine(Scheduler(SchedulerConfig()), journal, records)
        readers = Readers(engine, grace_s=30.0)
        attempt = Attempt(
            journal=journal, records=records, engine=engine, readers=readers, recovery=Recovery(engine, readers)
        )
        self.attempts.append(attempt)
        return attempt


@asynccontextmanager
async def standby_site(
    url: str,
    *,
    name: str = "us",
    deployment: str = "default",
    timeout_s: float = STORE_TIMEOUT_S,
    lease_ms: int = LEASE_MS,
) -> AsyncIterator[StandbySite]:
    """A standby that does nothing yet."""
    store = RedisStore(url, deployment=deployment, timeout_s=timeout_s)
    leases = RenewedLeases(url, deployment=deployment, timeout_s=timeout_s)
    hot = HotJournal(RedisTail(url, deployment=deployment), store, record_ttl_s=TTL_S)
    site = StandbySite(name, store, leases, hot, lease_ms)
    try:
        yield site
    finally:
        for attempt in site.attempts:
            await attempt.recovery.close()
        await hot.close()
        await leases.close()
        await store.close()
