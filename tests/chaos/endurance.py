"""Endurance: every few seconds a fault that the seed draws, on any process and any path, under fifty requests at once.

A leader and a hot standby, two workers and the store; proxies stand between clients and schedulers, between schedulers
and workers, and between schedulers and store; each process has a time of day of its own. What has ended is started
again before the next fault.
"""

import asyncio
import signal
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial

import quire
from tests.chaos.client_load import ClientLoad
from tests.chaos.deployment import Deployment, Life
from tests.chaos.proxy import Direction, Proxy
from tests.chaos.scenario import Figures
from tests.chaos.stage import STANDARD_WORKERS, Stage
from tests.chaos.standby_pair import SCHEDULERS
from tests.chaos.wall_clocks import WallClock, WallClocks
from tests.services import free_address

EVERY_S = 3.0
LEASE_MS = 1500
FROZEN_S = (0.2, 2.5)
APART_S = 2.0
STORE_TROUBLE_S = (0.5, 2.5)
SLOW_WAY_S = (0.025, 0.15)  # in each direction: 50 to 300 ms a command
HOURS = (-6.0, 6.0)  # that a process's time of day is set apart from the machine's
RESTATED_S = 2.5  # after which all that lives is in a new journal: until then an emptied store has no second copy
NUM_BLOCKS = 4096
READY_TIMEOUT_S = 90.0
END_TIMEOUT_S = 600.0

Strike = Callable[[], Awaitable[None]]


@dataclass(slots=True)
class Site:
    """Site of processes and paths that faults can strike."""

    stage: Stage
    deployment: Deployment
    client_paths: list[Proxy]
    step_paths: list[Proxy]
    addresses: list[str]  # of the schedulers
    worker_listens: list[str]
    store_path: Proxy
    clocks: dict[str, WallClock]  # by name of a process
    schedulers: list[Life] = field(default_factory=list)  # beside addresses
    flushed_s: float = 0.0

    async def start_scheduler(self, number: int, *, listens: bool = True) -> None:
        """The scheduler of an address, told to clients by its proxy's."""
        flags = ("--standby", "--lease-ms", str(LEASE_MS), "--advertise", self.client_paths[number].address)
        env, address = self.clocks[SCHEDULERS[number]].env, self.addresses[number]
        life = await self.deployment.begin_scheduler(*flags, address=address, listens=listens, env=env)
        self.schedulers[number : number + 1] = [life]

    def start_worker(self, number: int) -> None:
        """A worker that is dialled through its proxy."""
        listen, path = self.worker_listens[number], self.step_paths[number].address
        name = STANDARD_WORKERS[number]
        self.deployment.begin_worker(name, "--listen", listen, "--advertise", path, env=self.clocks[name].env)

    async def revive(self) -> None:
        """Start ended processes again."""
        await asyncio.to_thread(self.deployment.store.revive)
        for number, life in enumerate(self.schedulers):
            if life.is_over:
                await self.start_scheduler(number, listens=False)
        for number, name in enumerate(STANDARD_WORKERS):
            if self.deployment.workers[name].is_over:
                self.start_worker(number)

    async def until_it_has_memory(self) -> None:
        """Wait until a leader's journal takes entries, and has rewritten what an emptied store lost."""
        async with self.deployment.client() as client, asyncio.timeout(READY_TIMEOUT_S):
            while True:
                try:
                    if not (await client.stats()).journal.degraded:
                        break
                except quire.QuireError:
                    await self.revive()
                await asyncio.sleep(0.05)
        await asyncio.sleep(max(0.0, self.flushed_s + RESTATED_S - time.monotonic()))

    def strikes(self) -> list[Strike]:
        """List all kinds of fault, on each process and each path."""
        lives = (*self.schedulers, *self.deployment.workers.values())
        paths = (*self.client_paths, *self.step_paths)
        return [
            *(partial(self._kill, life) for life in lives),
            *(partial(self._freeze, life) for life in lives),
            *(partial(self._end_in_order, life) for life in lives),
            *(partial(self._set_clock, clock) for clock in self.clocks.values()),
            *(partial(self._cut, path) for path in paths),
            *(partial(self._half_open, path) for path in paths),
            *(partial(self._swallow, path) for path in paths),
            *(partial(self._flip, path) for path in paths),
            self._kill_store,
            self._end_store_in_order,
            self._freeze_store,
            self._slow_store,
            self._hold_store,
            partial(self._refuse_writes, "maxmemory", "1"),
            partial(self._refuse_writes, "min-replicas-to-write", "1"),  # read only, in effect
            self._empty_store,
            self._empty_store_beside_a_newcomer,
        ]

    async def _kill(self, life: Life) -> None:
        if not life.is_over:
            life.kill()

    async def _freeze(self, life: Life) -> None:
        if life.is_over:
            return
        life.send(signal.SIGSTOP)
        await asyncio.sleep(self.stage.rng.uniform(*FROZEN_S))
        life.send(signal.SIGCONT)

    async def _end_in_order(self, life: Life) -> None:
        if not life.is_over:
            life.send(signal.SIGTERM)

    async def _set_clock(self, clock: WallClock) -> None:
        clock.set_ahead(self.stage.rng.uniform(*HOURS))

    async def _cut(self, path: Proxy) -> None:
        path.cut()

    async def _half_open(self, path: Proxy) -> None:
        path.hold(self.stage.rng.choice(("up", "down")))
        await asyncio.sleep(APART_S)
        path.heal()
        path.cut()

    async def _swallow(self, path: Proxy) -> None:
        """Drop data of the path without telling either side, then or later."""
        directions: tuple[Direction, ...] = self.stage.rng.choice((("up",), ("down",), ("up", "down")))
        path.swallow(*directions)
        await asyncio.sleep(APART_S)
        path.heal()

    async def _flip(self, path: Proxy) -> None:
        path.flip(self.stage.rng.choice(("up", "down")), self.stage.rng.randint(1, 3))

    async def _kill_store(self) -> None:
        store = self.deployment.store
        store.kill()
        await asyncio.sleep(self.stage.rng.uniform(0.0, 1.0))
        await asyncio.to_thread(store.start)

    async def _end_store_in_order(self) -> None:
        await asyncio.to_thread(self.deployment.store.stop)
        await asyncio.to_thread(self.deployment.store.start)

    async def _slow_store(self) -> None:
        self.store_path.delay(*SLOW_WAY_S)
        await asyncio.sleep(self.stage.rng.uniform(*STORE_TROUBLE_S))
        self.store_path.heal()

    async def _hold_store(self) -> None:
        self.store_path.hold("up", "down")
        await asyncio.sleep(self.stage.rng.uniform(*STORE_TROUBLE_S))
        self.store_path.heal()

    async def _freeze_store(self) -> None:
        self.deployment.store.freeze()
        await asyncio.sleep(self.stage.rng.uniform(*STORE_TROUBLE_S))
        self.deployment.store.thaw()

    async def _refuse_writes(self, setting: str, value: str) -> None:
        self.deployment.store.command("CONFIG", "SET", setting, value)
        await asyncio.sleep(self.stage.rng.uniform(*STORE_TROUBLE_S))
        self.deployment.store.command("CONFIG", "SET", setting, "0")

    async def _empty_store(self) -> None:
        await self.until_it_has_memory()
        self.deployment.store.command("FLUSHALL")
        self.flushed_s = time.monotonic()

    async def _empty_store_beside_a_newcomer(self) -> None:
        """Start a scheduler and empty the store before it reads it; the other one lives."""
        await self.until_it_has_memory()
        number = await self._standby()
        life = self.schedulers[number]
        if not life.is_over:
            life.kill()
        await self.start_scheduler(number, listens=False)
        await asyncio.sleep(self.stage.rng.uniform(0.0, 0.5))
        self.deployment.store.command("FLUSHALL")
        self.flushed_s = time.monotonic()

    async def _standby(self) -> int:
        """The scheduler that does not lead."""
        for number, address in enumerate(self.addresses):
            async with quire.AsyncClient(address, retries=0, call_timeout_s=2.0) as client:
                try:
                    await client.stats()
                except quire.QuireError:
                    return number
        return 1


async def make_site(stage: Stage) -> Site:
    """Start all processes; the first scheduler leads."""
    deployment = stage.own(num_blocks=NUM_BLOCKS)
    addresses = [free_address(), free_address()]
    listens = [free_address() for _ in STANDARD_WORKERS]
    clients = [await stage.proxy(each) for each in addresses]
    steps = [await stage.proxy(each) for each in listens]
    deployment.client_address = ",".join(each.address for each in clients)
    deployment.worker_scheduler = ",".join(addresses)
    store_path = await stage.store_path(deployment)
    clocks = WallClocks(stage.folder())
    by_name = {name: clocks.make(name) for name in (*SCHEDULERS, *STANDARD_WORKERS)}
    site = Site(stage, deployment, clients, steps, addresses, listens, store_path, by_name)
    for number in range(len(STANDARD_WORKERS)):
        site.start_worker(number)
    for number in range(len(addresses)):
        await site.start_scheduler(number)
    await deployment.until_driven(*STANDARD_WORKERS)
    return site


async def anything_goes_wrong(stage: Stage) -> Figures:
    """A fault every `EVERY_S`, for as long as the extent says."""
    await stage.reference()
    site = await make_site(stage)
    load = stage.load(site.deployment.client_address, reconnect_timeout_s=300.0)
    await load.until_flowing()
    began_s = time.monotonic()
    counts: dict[str, int] = {}
    while time.monotonic() < began_s + stage.extent.campaign_s:
        struck_s = time.monotonic()
        strike = stage.rng.choice(site.strikes())
        await strike()
        name = getattr(strike, "func", strike).__name__.strip("_")
        counts[name] = counts.get(name, 0) + 1
        await _let_run(load, struck_s + EVERY_S)
        await site.revive()
    await site.until_it_has_memory()
    await site.deployment.until_driven(*STANDARD_WORKERS)
    figures = await stage.figures(
        load,
        site.deployment,
        records_since_s=site.flushed_s + RESTATED_S if site.flushed_s else 0.0,
        end_timeout_s=END_TIMEOUT_S,
    )
    flipped = sum(each.num_flipped for each in (*site.client_paths, *site.step_paths))
    figures.more = {
        "seconds": stage.extent.campaign_s,
        "faults": sum(counts.values()),
        "tokens": load.history.num_tokens,
        "bits_flipped": flipped,
        **dict(sorted(counts.items())),
    }
    return figures


async def _let_run(load: ClientLoad, until_s: float) -> None:
    await load.until(lambda: time.monotonic() >= until_s, "time passes")
