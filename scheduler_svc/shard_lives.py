"""Lives of a process in the shards: it stands by for one, leads some, and hands over what another should lead.

What to do is decided by `leadership.shard_choice`, from what all schedulers see in the store. While there is one shard,
its life is the process's; when there are several, the process goes on with that life as with any other.
"""

import asyncio
from dataclasses import dataclass

import structlog

from common.waits import before, end_tasks, is_set_within
from quire.scheduler_settings import SchedulerSettings
from scheduler_svc.composition import Door
from scheduler_svc.journal.keys import deployment_of
from scheduler_svc.journal.open_store import open_store
from scheduler_svc.journal.store import FencedError, Store, StoreError
from scheduler_svc.leadership.shard_choice import next_roles
from scheduler_svc.leadership.shard_watch import ShardWatch
from scheduler_svc.life import open_server, serve_shard
from scheduler_svc.workers.worker_loop import SupersededError

log = structlog.get_logger()

_LOOK_S = 0.25
_AGAIN_S = 3.0  # after a life in a shard that failed


@dataclass(frozen=True, slots=True)
class _Life:
    """A life in one shard: `end` ends it in order."""

    task: "asyncio.Task[None]"
    end: asyncio.Event


class ShardLives:
    """One per process whose store other processes reach."""

    def __init__(self, door: Door, watch: ShardWatch, store: Store) -> None:
        """`store`: of shard 0, for its life while it is the only one."""
        self._door = door
        self._watch = watch
        self._store = store
        self._lives: dict[int, _Life] = {}
        self._not_before_s: dict[int, float] = {}  # a shard where a life failed

    async def run(self, end: asyncio.Event) -> None:
        """Take and give shards until told to end; then hand over or drain each.

        Raises a fault of ours, and while there is one shard what ends its life.
        """
        try:
            if not self._watch.is_several and await self._has_lived_alone(end):
                return
            await open_server(self._door)  # for the calls that every scheduler answers
            await self._watch.until_seen()
            while not end.is_set():
                self._reap()
                self._change_roles()
                await is_set_within(end, _LOOK_S)
            self._watch.end_streams()
            for life in self._lives.values():
                life.end.set()
            await asyncio.gather(*(life.task for life in self._lives.values()), return_exceptions=True)
            self._reap()
        finally:
            await end_tasks(*(life.task for life in self._lives.values()))

    async def _has_lived_alone(self, end: asyncio.Event) -> bool:
        """Live in the one shard until there are several. True: that life has ended. Raises what ended it."""
        self._begin(0, self._store)
        life, becoming = self._lives[0], asyncio.create_task(self._watch.several.wait())
        ending = asyncio.create_task(end.wait())
        try:
            await asyncio.wait([life.task, becoming, ending], return_when=asyncio.FIRST_COMPLETED)
            if end.is_set():
                self._watch.end_streams()
                life.end.set()
                await asyncio.wait([life.task])
        finally:
            await end_tasks(becoming, ending)
        if life.task.done():
            del self._lives[0]
            life.task.result()
            return True
        return False

    def _change_roles(self) -> None:
        views = self._watch.views()
        for shard, life in self._lives.items():
            if shard >= len(views):  # nothing is left of it
                life.end.set()
        present = {shard for shard in self._lives if shard < len(views)}
        leading = {shard for shard, gate in self._door.gates.gates.items() if gate.is_open and shard in present}
        roles = next_roles(views, self._door.me.address, present - leading, leading)
        now_s = asyncio.get_running_loop().time()
        for shard in roles.begin:
            if self._not_before_s.get(shard, 0.0) <= now_s:
                self._begin(shard)
        for shard in (*roles.leave, *roles.hand_over):
            self._lives[shard].end.set()

    def _begin(self, shard: int, store: Store | None = None) -> None:
        """Begin a life in a shard. `store`: of the shard; None: it is opened, and closed at the end."""
        end = asyncio.Event()
        task = asyncio.create_task(self._live(shard, end, store), name=f"shard {shard}")
        self._lives[shard] = _Life(task, end)

    async def _live(self, shard: int, end: asyncio.Event, given: Store | None) -> None:
        store = given or await before(open_shard_store(self._door.settings, shard), end.wait())
        if store is None:
            return
        try:
            await serve_shard(self._door, shard, store, self._watch.store.leases(shard), end)
        finally:
            if given is None:
                await store.close()
            await self._watch.store.close_leases(shard)

    def _reap(self) -> None:
        """Forget the lives that have ended. One that lost its shard is no reason to leave the others."""
        for shard, life in list(self._lives.items()):
            if not life.task.done():
                continue
            del self._lives[shard]
            try:
                life.task.result()
            except (SupersededError, FencedError, StoreError) as error:
                log.error("shard lost", shard=shard, reason=str(error))
                self._not_before_s[shard] = asyncio.get_running_loop().time() + _AGAIN_S


async def open_shard_store(settings: SchedulerSettings, shard: int) -> Store:
    """Open the store of one shard. Raises StoreError."""
    deployment = deployment_of(settings.deployment, shard)
    return await open_store(
        settings.store,
        deployment=deployment,
        patience_s=settings.store_timeout_s,
        replicas=settings.store_replicas,
    )
