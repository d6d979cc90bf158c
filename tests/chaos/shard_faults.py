"""Faults of a deployment with two shards: its schedulers, workers and store die in turn, and leaders hand over.

Three schedulers, of which one is to spare, and three workers; a process that ends is started again as it was.
"""

import asyncio
import signal
import time

from tests.chaos.deployment import Deployment, Life
from tests.chaos.scenario import NOTHING_LOST, Figures, Target, speed
from tests.chaos.stage import Scenario, Stage
from tests.services import free_address

NUM_SHARDS = 2
LEASE_MS = 1500
WORKERS = ("worker-0", "worker-1", "worker-2")
NUM_ROUNDS = 3
LED_TIMEOUT_S = 60.0


class Shards:
    """The schedulers by number, and who leads which shard, as their logs say. `num_shards` are waited for."""

    def __init__(self, deployment: Deployment, num_shards: int = NUM_SHARDS) -> None:
        self.deployment = deployment
        self.num_shards = num_shards
        self.addresses = (deployment.address, *(free_address() for _ in range(max(num_shards, 2))))  # some to spare
        self.schedulers: list[Life] = []
        deployment.worker_scheduler = deployment.client_address = ",".join(self.addresses)

    async def begin(self) -> None:
        """Start all processes, and wait until both shards are led and all workers serve."""
        for name in WORKERS:
            self.deployment.begin_worker(name)
        for number in range(len(self.addresses)):
            await self.begin_scheduler(number)
        await self.until_led()
        await self.deployment.until_driven(*WORKERS)

    async def begin_scheduler(self, number: int) -> Life:
        """Start the scheduler of that number, or its next life."""
        life = await self.deployment.begin_scheduler(address=self.addresses[number])
        self.schedulers[number : number + 1] = [life]
        return life

    def leaders(self) -> dict[int, int]:
        """Numbers of the living schedulers that lead, by shard."""
        found: dict[int, tuple[int, int]] = {}
        for number, life in enumerate(self.schedulers):
            for line in [] if life.is_over else life.logged("leading"):
                shard = line.get("shard", 0)  # while there is one shard, it is not named
                found[shard] = max(found.get(shard, (0, 0)), (line["epoch"], number))
        return {shard: number for shard, (_, number) in found.items()}

    async def until_led(self) -> dict[int, int]:
        """Wait until each of the first `num_shards` shards has a leader, and return `leaders`. Raises TimeoutError."""
        async with asyncio.timeout(LED_TIMEOUT_S):
            while True:
                leaders = self.leaders()
                if set(range(self.num_shards)) <= leaders.keys():
                    return leaders
                await asyncio.sleep(0.02)


async def begin_shards(stage: Stage, *, num_shards: int = NUM_SHARDS, store_url: str | None = None) -> Shards:
    """Begin a deployment of shards; `store_url`: of another store than its own."""
    await stage.reference()
    flags = ("--shards", str(num_shards), "--lease-ms", str(LEASE_MS))
    deployment = stage.own(scheduler_flags=flags)
    deployment.store_url = store_url or deployment.store_url
    shards = Shards(deployment, num_shards)
    await shards.begin()
    return shards


async def everything_dies_in_turn(stage: Stage) -> Figures:
    """Each leader, the spare scheduler, each worker, and the store, by SIGKILL; all of it three times."""
    shards = await begin_shards(stage)
    deployment = shards.deployment
    load = stage.load(deployment.client_address)
    await load.until_flowing()
    num_killed = 0
    for _ in range(NUM_ROUNDS):
        for shard in range(NUM_SHARDS):
            leaders = await shards.until_led()
            await kill_and_start_again(shards, leaders[shard])
            await load.until_flowing()
        leaders = await shards.until_led()
        for number in set(range(len(shards.addresses))) - set(leaders.values()):
            await kill_and_start_again(shards, number)
        for name in WORKERS:
            deployment.workers[name].kill()
            deployment.begin_worker(name)
            await load.until_flowing()
        await asyncio.to_thread(deployment.store.kill)
        await asyncio.to_thread(deployment.store.start)
        await load.until_flowing()
        num_killed += NUM_SHARDS + len(WORKERS) + 2
    return await stage.figures(load, deployment, killed=num_killed)


async def leaders_hand_over(stage: Stage) -> Figures:
    """The leaders are told to end in turn, again and again; the spare scheduler follows each."""
    shards = await begin_shards(stage)
    load = stage.load(shards.deployment.client_address)
    await load.until_flowing()
    unclean, longest_s = 0, 0.0
    for round_number in range(2 * NUM_ROUNDS):
        number = (await shards.until_led())[round_number % NUM_SHARDS]
        struck_s = shards.schedulers[number].send(signal.SIGTERM)
        unclean += await asyncio.to_thread(shards.schedulers[number].service.wait) != 0
        await shards.begin_scheduler(number)
        await shards.until_led()
        longest_s = max(longest_s, time.monotonic() - struck_s)
        await load.until_flowing()
    return await stage.figures(load, shards.deployment, unclean_ends=unclean, longest_change_s=longest_s)


async def kill_and_start_again(shards: Shards, number: int) -> None:
    """Kill a scheduler, and start its next life."""
    shards.schedulers[number].kill()
    await shards.begin_scheduler(number)


SCENARIOS = (
    Scenario(
        fault="F34",
        title="two shards: leaders, spare scheduler, workers and store killed in turn, three times around",
        injected="SIGKILL of each, each started again; lease 1.5 s",
        promise="P1 P2 P4 P7",
        play=everything_dies_in_turn,
        targets=NOTHING_LOST,
    ),
    Scenario(
        fault="F34",
        title="two shards: leaders told to end in turn, six times",
        injected="SIGTERM of the leader of a shard, while a spare scheduler stands by for any",
        promise="P1 P2 P4 P7",
        play=leaders_hand_over,
        targets=(*NOTHING_LOST, Target(figure="unclean_ends", at_most=0), speed("worst_stall_s", 3.0)),
    ),
)
