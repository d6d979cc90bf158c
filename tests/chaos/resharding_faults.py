"""Faults while the number of shards changes: shards are added and removed under load, again and again.

Three schedulers and three workers. With the calm scenario nothing dies; in the other a scheduler or a worker is killed
at each change, as soon as it has begun, and started again.
"""

import asyncio
import itertools
import time
from collections import Counter
from collections.abc import Sequence

import redis

from tests.chaos.client_load import ClientLoad
from tests.chaos.deployment import Deployment
from tests.chaos.scenario import NOTHING_LOST, Figures, Target, speed
from tests.chaos.shard_faults import LEASE_MS, WORKERS, Shards, kill_and_start_again
from tests.chaos.stage import Scenario, Stage

NUMBERS = (2, 3, 2, 1, 3, 1)  # of shards, one after another
CHANGED_TIMEOUT_S = 90.0
POLL_S = 0.05
RECORD = ":record:"


async def begin_one(stage: Stage) -> Shards:
    """Start a deployment of one shard: a leader, two standbys, three workers."""
    await stage.reference()
    flags = ("--standby", "--lease-ms", str(LEASE_MS))
    shards = Shards(stage.own(scheduler_flags=flags), num_shards=1)
    await shards.begin()
    return shards


async def nothing_dies(stage: Stage) -> Figures:
    """Shards come and go; all processes live."""
    return await _play(stage, ())


async def everything_dies(stage: Stage) -> Figures:
    """At each change a leader, another scheduler or a worker is killed as soon as the change has begun."""
    return await _play(stage, ("leader", "worker", "other", "leader"))


async def _play(stage: Stage, strikes: Sequence[str]) -> Figures:
    shards = await begin_one(stage)
    load = stage.load(shards.deployment.client_address)
    await load.until_flowing()
    struck, longest_s, num_killed = itertools.cycle(strikes), 0.0, 0
    for number in NUMBERS:
        began_s = time.monotonic()
        async with shards.deployment.client() as client:
            await client.set_shards(number)
        if strikes:
            await _strike(shards, next(struck), num_killed)
            num_killed += 1
        await _until_taking(shards.deployment, number)
        longest_s = max(longest_s, time.monotonic() - began_s)
        await load.until_flowing()
    figures = await stage.figures(
        load, shards.deployment, changes=len(NUMBERS), killed=num_killed, longest_change_s=longest_s
    )
    figures.more |= await asyncio.to_thread(_places, shards.deployment, load)
    return figures


async def _strike(shards: Shards, what: str, number: int) -> None:
    """Kill a process that has a part in the change, and start it again."""
    if what == "worker":
        name = WORKERS[number % len(WORKERS)]
        shards.deployment.workers[name].kill()
        shards.deployment.begin_worker(name)
        return
    leader = (await shards.until_led())[0]
    await kill_and_start_again(shards, leader if what == "leader" else (leader + 1) % len(shards.schedulers))


async def _until_taking(deployment: Deployment, number: int) -> None:
    """Wait until so many shards take requests, and each has a leader. Raises TimeoutError."""
    async with asyncio.timeout(CHANGED_TIMEOUT_S), deployment.client() as client:
        while True:
            taking = [shard for shard in await client.shards() if shard.takes_requests]
            if len(taking) == number and (number == 1 or all(shard.leader for shard in taking)):
                return
            await asyncio.sleep(POLL_S)


def _places(deployment: Deployment, load: ClientLoad) -> dict[str, int]:
    """Count the ids of the load that have records in two shards, each of one acceptance; and the records of new shards.

    A run in which no new shard had a request would show nothing.
    """
    with redis.Redis(unix_socket_path=str(deployment.store.socket_path)) as store:
        keys = [key.decode().partition(RECORD) for key in store.scan_iter(f"*{RECORD}*", count=1000)]
    found = Counter(request_id for _, _, request_id in keys)
    in_new = sum("/" in shard for shard, _, _ in keys)
    twice = sum(found[request_id] > 1 for request_id in load.history.requests)
    return {"accepted_twice": twice, "in_new_shards": in_new, "without_new_shards": int(not in_new)}


_TARGETS = (
    *NOTHING_LOST,
    *(Target(figure=name, at_most=0) for name in ("accepted_twice", "without_new_shards")),
)

SCENARIOS = (
    Scenario(
        fault="F36",
        title="shards added and removed under load, six times",
        injected="1 → 2 → 3 → 2 → 1 → 3 → 1 shards, by SetShards",
        promise="P1 P2 P4 P7",
        play=nothing_dies,
        targets=(*_TARGETS, speed("worst_stall_s", 3.0)),
    ),
    Scenario(
        fault="F36",
        title="shards added and removed under load, while leaders, standbys and workers are killed",
        injected="1 → 2 → 3 → 2 → 1 → 3 → 1 shards, and at each change SIGKILL of a leader, another scheduler or a "
        "worker; lease 1.5 s",
        promise="P1 P2 P3 P4 P7",
        play=everything_dies,
        targets=_TARGETS,
    ),
)
