"""Faults while requests move between workers all the time: with their blocks, by drains, roles, and workers that go.

Four workers, of which one computes prompts and one only what follows; all blocks are fetched. A mover drains one worker
after another and undoes it. Each worker is behind a proxy, which carries its steps and what others read of its blocks.
"""

import asyncio
import contextlib
import itertools
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import quire
from common.waits import end_tasks
from tests.chaos.client_load import ClientLoad
from tests.chaos.deployment import Deployment
from tests.chaos.proxy import Proxy
from tests.chaos.scenario import NOTHING_LOST, Figures, Target
from tests.chaos.stage import Scenario, Stage
from tests.services import free_address

ROLES = {"prefill-0": "prefill", "mixed-0": "mixed", "mixed-1": "mixed", "decode-0": "decode"}
NUM_BLOCKS = 160  # of each worker: too few to keep what all requests have had, which would have to move no more
DRAINED_S = 0.4
FROZEN_S = 2.5
APART_S = 2.0
NUM_ROUNDS = 3
NUM_FLIPS = 2  # at a time
BLOCKS_FROM_BYTES = 8192  # of a piece on a path
FLOW_TOKENS = 150  # after each fault

Strike = Callable[["Movers", str], Awaitable[None]]


@dataclass(slots=True)
class Movers:
    """The workers with their paths, and what has moved so far."""

    deployment: Deployment
    listens: dict[str, str]
    paths: dict[str, Proxy]
    num_drains: int = 0
    num_fetched_blocks: int = 0  # seen after each drain; those of a worker that was lost before are not in it
    _last: dict[str, int] = field(default_factory=dict)  # blocks that each worker had fetched since it came

    def begin_worker(self, name: str) -> None:
        """Start a worker, or its next life, behind its path."""
        where = ("--listen", self.listens[name], "--advertise", self.paths[name].address)
        self.deployment.begin_worker(name, *where, "--role", ROLES[name])

    async def move_on(self) -> None:
        """Drain one worker after another, each for a while, for ever. A scheduler that is away is waited for."""
        for name in itertools.cycle(ROLES):
            with contextlib.suppress(quire.QuireError):
                async with self.deployment.client() as client:
                    await client.drain_worker(name)
                    self.num_drains += 1
                    await asyncio.sleep(DRAINED_S)
                    await client.drain_worker(name, undo=True)
                    self._note(await client.stats())
            await asyncio.sleep(DRAINED_S / 4)

    async def undo_drains(self) -> None:
        """Open all workers, so that the load can end."""
        async with self.deployment.client() as client:
            for name in ROLES:
                with contextlib.suppress(quire.NotFoundError):
                    await client.drain_worker(name, undo=True)
            self._note(await client.stats())

    def _note(self, stats: quire.Stats) -> None:
        for worker in stats.workers:
            before = self._last.get(worker.worker_id, 0)
            is_anew = worker.fetched_blocks < before  # it was lost, or another scheduler leads
            self.num_fetched_blocks += worker.fetched_blocks - (0 if is_anew else before)
            self._last[worker.worker_id] = worker.fetched_blocks


@asynccontextmanager
async def moving(stage: Stage) -> AsyncIterator[tuple[Movers, ClientLoad]]:
    """Workers and a load whose requests move until the block ends."""
    await stage.reference()
    deployment = stage.own(scheduler_flags=("--block-fetch", "always"), num_blocks=NUM_BLOCKS)
    listens = {name: free_address() for name in ROLES}
    paths = {name: await stage.proxy(listen) for name, listen in listens.items()}
    movers = Movers(deployment, listens, paths)
    for name in ROLES:
        movers.begin_worker(name)
    await deployment.begin_scheduler()
    await deployment.until_driven(*ROLES)
    load = stage.load(deployment.address)
    await load.until_flowing()
    mover = asyncio.create_task(movers.move_on())
    try:
        yield movers, load
        assert not mover.done(), "the mover has failed"
    finally:
        await end_tasks(mover)
    await deployment.until_driven(*ROLES)
    await movers.undo_drains()


async def kill_worker(movers: Movers, name: str) -> None:
    """Kill a worker; it is started again at once."""
    movers.deployment.workers[name].kill()
    movers.begin_worker(name)


async def end_worker(movers: Movers, name: str) -> None:
    """Tell a worker to end; it drains first, and is started again."""
    worker = movers.deployment.workers[name]
    worker.send(signal.SIGTERM)
    await asyncio.to_thread(worker.service.wait)
    movers.begin_worker(name)


async def freeze_worker(movers: Movers, name: str) -> None:
    """Freeze a worker for so long that it is given up."""
    worker = movers.deployment.workers[name]
    worker.send(signal.SIGSTOP)
    await asyncio.sleep(FROZEN_S)
    worker.send(signal.SIGCONT)


async def cut_path(movers: Movers, name: str) -> None:
    """Break all connections to a worker: steps, fetches and reads."""
    movers.paths[name].cut()


async def hold_path(movers: Movers, name: str) -> None:
    """Let nothing pass to and from a worker for a while."""
    movers.paths[name].hold("up", "down")
    await asyncio.sleep(APART_S)
    movers.paths[name].heal()


async def flip_bits(movers: Movers, name: str) -> None:
    """Damage what comes from a worker: the next pieces, whatever they are, and the next large one, which has blocks."""
    movers.paths[name].edit("down", _damage_blocks)
    movers.paths[name].flip("down", NUM_FLIPS)
    await asyncio.sleep(APART_S)
    movers.paths[name].flip("down", 0)


def _damage_blocks(data: bytes) -> bytes:
    """Flip a bit of a piece that is larger than answers are."""
    if len(data) < BLOCKS_FROM_BYTES:
        return data
    middle = len(data) // 2
    return data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]


async def kill_scheduler(movers: Movers, _: str) -> None:
    """Kill the scheduler, whose drains and fetches are forgotten; it is started again at once."""
    movers.deployment.scheduler.kill()
    await movers.deployment.begin_scheduler()


async def _play(stage: Stage, strikes: Sequence[Strike], num_rounds: int) -> Figures:
    """Strike each worker by each fault, round after round, while requests move."""
    num_strikes = 0
    async with moving(stage) as (movers, load):
        for round_number in range(num_rounds):
            for index, strike in enumerate(strikes):
                name = list(ROLES)[(index + round_number) % len(ROLES)]
                await movers.deployment.until_driven(*ROLES)
                await strike(movers, name)
                num_strikes += 1
                await load.until_flowing(FLOW_TOKENS)
    figures = await stage.figures(load, movers.deployment)
    paths = movers.paths.values()
    damage = {"bits_flipped": sum(p.num_flipped for p in paths), "blocks_damaged": sum(p.num_edited for p in paths)}
    figures.more = {
        "faults": num_strikes,
        "drains": movers.num_drains,
        "fetched_blocks": movers.num_fetched_blocks,
        "without_fetches": int(movers.num_fetched_blocks == 0),
        **(damage if flip_bits in strikes else {}),
    }
    return figures


async def processes_go(stage: Stage) -> Figures:
    """Workers are killed, frozen and told to end, and the scheduler is killed."""
    return await _play(stage, (kill_worker, freeze_worker, end_worker, kill_scheduler, kill_worker), NUM_ROUNDS)


async def paths_break(stage: Stage) -> Figures:
    """Paths to workers are cut, held and damaged."""
    return await _play(stage, (cut_path, flip_bits, hold_path, cut_path, flip_bits), NUM_ROUNDS)


_TARGETS = (*NOTHING_LOST, Target(figure="without_fetches", at_most=0))

SCENARIOS = (
    Scenario(
        fault="F35",
        title="requests move between four workers all the time, and processes die, freeze and end",
        injected="one worker after another drained for 0.4 s, roles prefill, mixed and decode; meanwhile SIGKILL, "
        "SIGSTOP for 2.5 s and SIGTERM of workers, SIGKILL of the scheduler",
        promise="P1 P2 P3 P7",
        play=processes_go,
        targets=_TARGETS,
    ),
    Scenario(
        fault="F35",
        title="requests move between four workers all the time, and paths to them break",
        injected="one worker after another drained for 0.4 s, roles prefill, mixed and decode; meanwhile proxies cut, "
        "hold for 2 s, or flip bits of steps, answers and blocks on their way",
        promise="P1 P2 P3 P7",
        play=paths_break,
        targets=_TARGETS,
    ),
)
