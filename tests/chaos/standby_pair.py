"""Leader, hot standby and two workers; a process that ends is started again as it was.

Each process may have a time of day of its own, and a proxy may stand between schedulers and store.
"""

import asyncio
import time

import quire
from tests.chaos.deployment import Deployment, Life
from tests.chaos.proxy import Proxy
from tests.chaos.stage import STANDARD_WORKERS, Stage
from tests.chaos.wall_clocks import WallClock, WallClocks
from tests.services import free_address

LEASE_S = 1.5
SCHEDULERS = ("scheduler-0", "scheduler-1")
LEADS_TIMEOUT_S = 90.0


class StandbyPair:
    """Two schedulers of one deployment, by number."""

    def __init__(self, deployment: Deployment, clocks: dict[str, WallClock], store_path: Proxy | None) -> None:
        self.deployment = deployment
        self.clocks = clocks  # by name of a process; empty: all have the machine's
        self.store_path = store_path
        self.addresses = (deployment.address, free_address())
        self.schedulers: list[Life] = []
        deployment.worker_scheduler = deployment.client_address = ",".join(self.addresses)

    async def begin(self, *, is_leaders_path: bool = False) -> None:
        """Start all processes; the first scheduler leads, alone behind the proxy if it is the leader's path."""
        for name in STANDARD_WORKERS:
            self.begin_worker(name)
        await self.begin_scheduler(0)
        if is_leaders_path:
            self.deployment.store_url = self.deployment.store.url
        await self.begin_scheduler(1)
        await self.deployment.until_driven(*STANDARD_WORKERS)

    async def begin_scheduler(self, number: int) -> Life:
        """Start the scheduler of that number, or its next life."""
        clock = self.clocks.get(SCHEDULERS[number])
        address = self.addresses[number]
        life = await self.deployment.begin_scheduler(address=address, env=None if clock is None else clock.env)
        self.schedulers[number : number + 1] = [life]
        return life

    def begin_worker(self, name: str) -> Life:
        """Start the worker of that name, or its next life."""
        clock = self.clocks.get(name)
        return self.deployment.begin_worker(name, env=None if clock is None else clock.env)

    async def leader(self) -> int:
        """The number of the scheduler that serves. Raises AssertionError if none does for long."""
        give_up_s = time.monotonic() + LEADS_TIMEOUT_S
        while time.monotonic() < give_up_s:
            for number, address in enumerate(self.addresses):
                if self.schedulers[number].is_over:
                    continue
                async with quire.AsyncClient(address, retries=0, call_timeout_s=2.0) as client:
                    try:
                        await client.stats()
                    except quire.QuireError:
                        continue
                    return number
            await asyncio.sleep(0.05)
        raise AssertionError(f"no scheduler leads within {LEADS_TIMEOUT_S:g} s")

    @property
    def num_ended(self) -> int:
        """Schedulers that have ended, of the two that were started last."""
        return sum(life.is_over for life in self.schedulers)


async def begin_pair(
    stage: Stage, *, own_clocks: bool = False, has_store_path: bool = False, is_leaders_path: bool = False
) -> StandbyPair:
    """Start a pair for this scenario alone, ready and idle. `is_leaders_path`: only the leader goes by the proxy."""
    await stage.reference()
    deployment = stage.own(scheduler_flags=("--standby", "--lease-ms", str(int(LEASE_S * 1000))))
    clocks: dict[str, WallClock] = {}
    if own_clocks:
        making = WallClocks(stage.folder())
        clocks = {name: making.make(name) for name in (*SCHEDULERS, *STANDARD_WORKERS)}
    store_path = await stage.store_path(deployment) if has_store_path else None
    pair = StandbyPair(deployment, clocks, store_path)
    await pair.begin(is_leaders_path=is_leaders_path)
    return pair
