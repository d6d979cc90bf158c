"""Long runs: a process is killed every few seconds, under fifty requests at once."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from functools import partial

from tests.chaos.client_load import ClientLoad
from tests.chaos.deployment import Deployment
from tests.chaos.endurance import anything_goes_wrong
from tests.chaos.rank_faults import RANKS_DIE
from tests.chaos.scenario import Figures
from tests.chaos.stage import STANDARD_WORKERS, Extent, Scenario, Stage

EXTENT = Extent(num_asks=50, min_tokens=60, max_tokens=140, concurrency=50, num_clients=2)
NUM_BLOCKS = 4096
EVERY_S = 5.0
KILLABLE_TIMEOUT_S = 90.0
END_TIMEOUT_S = 600.0

Strike = Callable[[Deployment], Awaitable[None]]


async def kill_scheduler(deployment: Deployment) -> None:
    """Kill the scheduler; it is started again at once."""
    deployment.scheduler.kill()
    await deployment.begin_scheduler()


async def kill_worker(deployment: Deployment, name: str) -> None:
    """Kill a worker once it has requests again since its last death; it is started again at once."""
    await deployment.until_busy(name, timeout_s=KILLABLE_TIMEOUT_S)
    deployment.workers[name].kill()
    deployment.begin_worker(name)


async def kill_store(deployment: Deployment) -> None:
    """Kill the store; it is started again on its files at once."""
    deployment.store.kill()
    await asyncio.to_thread(deployment.store.start)


WORKER_STRIKES: list[Strike] = [partial(kill_worker, name=name) for name in STANDARD_WORKERS]


async def _campaign(stage: Stage, strikes: list[Strike], *, at_random: bool) -> Figures:
    """Play a campaign: faults in turn, or as the seed draws them."""
    await stage.reference()
    deployment = stage.own(num_blocks=NUM_BLOCKS)
    await deployment.begin(*STANDARD_WORKERS)
    load = stage.load(deployment.address, reconnect_timeout_s=120.0)
    await load.until_flowing()
    began_s = time.monotonic()
    num_strikes = 0
    while time.monotonic() < began_s + stage.extent.campaign_s:
        strike = stage.rng.choice(strikes) if at_random else strikes[num_strikes % len(strikes)]
        struck_s = time.monotonic()
        await strike(deployment)
        num_strikes += 1
        await _let_run(load, struck_s + EVERY_S)
    await deployment.until_driven(*STANDARD_WORKERS)
    figures = await stage.figures(load, deployment, end_timeout_s=END_TIMEOUT_S)
    figures.more = {"seconds": stage.extent.campaign_s, "kills": num_strikes, "tokens": load.history.num_tokens}
    return figures


async def _let_run(load: ClientLoad, until_s: float) -> None:
    await load.until(lambda: time.monotonic() >= until_s, "time passes")


async def schedulers_die(stage: Stage) -> Figures:
    return await _campaign(stage, [kill_scheduler], at_random=False)


async def workers_die(stage: Stage) -> Figures:
    return await _campaign(stage, WORKER_STRIKES, at_random=False)


async def stores_die(stage: Stage) -> Figures:
    return await _campaign(stage, [kill_store], at_random=False)


async def anything_dies(stage: Stage) -> Figures:
    return await _campaign(stage, [kill_scheduler, *WORKER_STRIKES, kill_store], at_random=True)


def _scenario(number: str, victim: str, play: Callable[[Stage], Awaitable[Figures]]) -> Scenario:
    return Scenario(
        fault=number,
        title=f"{victim}, again and again under fifty mixed requests",
        injected="kill -9 every 5 s, started again at once",
        promise="P1 P2 P3 P6 P7",
        play=play,
    )


CAMPAIGNS = {
    "scheduler": _scenario("C1", "the scheduler dies", schedulers_die),
    "workers": _scenario("C2", "both workers die in turn", workers_die),
    "store": _scenario("C3", "the store dies", stores_die),
    "all": _scenario("C4", "scheduler, workers and store die at random", anything_dies),
    "endurance": Scenario(
        fault="C5",
        title="anything goes wrong, again and again under fifty mixed requests",
        injected="every 3 s, drawn: leader, standby, worker or store killed, frozen or ended by SIGTERM; the clock of "
        "one of them set hours off; a path of clients or steps cut, half-open, silent for good, or with flipped bits; "
        "the store slow, silent, out of memory, read only, or emptied, with and without a newcomer",
        promise="P1 P2 P3 P4 P5 P6 P7 P8",
        play=anything_goes_wrong,
    ),
    "ranks": RANKS_DIE,
}
