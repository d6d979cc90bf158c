"""Lives of a process in several shards: it stands by for one, leads some, and hands over what another should lead.

What to do is decided by `leadership.shard_choice`, from what all schedulers see in the store.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

import structlog

from common.waits import end_tasks, is_set_within
from quire.scheduler_settings import SchedulerSettings
from scheduler_svc.composition import Door
from scheduler_svc.journal.keys import deployment_of
from scheduler_svc.journal.leases import Leases
from scheduler_svc.journal.open_store import open_store
from scheduler_svc.journal.store import FencedError, Store, StoreError
from scheduler_svc.leadership.shard_choice import next_roles
from scheduler_svc.leadership.shard_watch import ShardWatch
from scheduler_svc.life import serve_shard
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
    """One per process of a deployment with several shards."""

    def __init__(self, door: Door, watch: ShardWatch, leases: Sequence[Leases]) -> None:
        """`leases`: of each shard, by number."""
        self._door = door
        self._watch = watch
        self._leases = leases
        self._lives: dict[int, _Life] = {}
        self._not_before_s: dict[int, float] = {}  # a shard where a life failed

    async def run(self, end: asyncio.Event) -> None:
        """Take and give shards until told to end; then hand over or drain each. Raises a fault of ours."""
        try:
            await self._watch.until_seen()
            while not end.is_set():
                self._reap()
                self._change_roles()
                await is_set_within(end, _LOOK_S)
            for life in self._lives.values():
                life.end.set()
            await asyncio.gather(*(life.task for life in self._lives.values()), return_exceptions=True)
            self._reap()
        finally:
            await end_tasks(*(life.task for life in self._lives.values()))

    def _change_roles(self) -> None:
        leading = {shard for shard, gate in self._door.gates.gates.items() if gate.is_open}
        standing = set(self._lives) - leading
        roles = next_roles(self._watch.views(), self._door.me.address, standing, leading)
        now_s = asyncio.get_running_loop().time()
        for shard in roles.begin:
            if self._not_before_s.get(shard, 0.0) <= now_s:
                self._begin(shard)
        for shard in (*roles.leave, *roles.hand_over):
            self._lives[shard].end.set()

    def _begin(self, shard: int) -> None:
        end = asyncio.Event()
        task = asyncio.create_task(self._live(shard, end), name=f"shard {shard}")
        self._lives[shard] = _Life(task, end)

    async def _live(self, shard: int, end: asyncio.Event) -> None:
        store = await open_shard_store(self._door.settings, shard)
        try:
            await serve_shard(self._door, shard, store, self._leases[shard], end)
        finally:
            await store.close()

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
