"""Faults of the store: killed, frozen, full, emptied, and replies that are lost."""

import asyncio
import time
from functools import partial

import quire
from tests.chaos.chaos_store import SmallDiskStore
from tests.chaos.client_load import ClientLoad
from tests.chaos.deployment import Deployment
from tests.chaos.journal_tail import ONE_LEADER, figures_of_leaders, following
from tests.chaos.proxy import Proxy
from tests.chaos.scenario import NOTHING_LOST, Figures, Target, speed
from tests.chaos.scheduler_faults import with_standby
from tests.chaos.stage import STANDARD_WORKERS, Scenario, Stage
from tests.chaos.standby_pair import LEASE_S

FROZEN_S = 5.0
FULL_S = 3.0
REFUSAL_TIMEOUT_S = 3.0
RESTATED_S = 2.0  # after which all that lives is in the new journal
NUM_DROPS = 5
ON_ITS_WAY_S = 0.1


async def it_is_killed(stage: Stage) -> Figures:
    deployment, load = await stage.flowing()
    struck_s = time.monotonic()
    deployment.store.kill()
    await asyncio.to_thread(deployment.store.start)
    answers_s = time.monotonic()
    recovered_s = await load.first_token_after(answers_s)
    return await stage.figures(
        load, deployment, struck_s=struck_s, recovered_s=recovered_s, token_after_restart_s=recovered_s - answers_s
    )


async def it_is_frozen(stage: Stage) -> Figures:
    deployment, load = await stage.flowing()
    struck_s = time.monotonic()
    deployment.store.freeze()
    try:
        trouble = await _in_trouble(deployment, load, FROZEN_S, struck_s)
    finally:
        deployment.store.thaw()
    thawed_s = time.monotonic()
    recovered_s = await load.first_token_after(thawed_s)
    return await stage.figures(
        load,
        deployment,
        struck_s=struck_s,
        detected_s=trouble.degraded_s,
        recovered_s=recovered_s,
        token_after_thaw_s=recovered_s - thawed_s,
        refused_after_s=trouble.refused_after_s,
        steps_meanwhile=trouble.num_steps,
    )


async def its_memory_is_full(stage: Stage) -> Figures:
    deployment, load = await stage.flowing()
    struck_s = time.monotonic()
    deployment.store.command("CONFIG", "SET", "maxmemory", "1")
    trouble = await _in_trouble(deployment, load, FULL_S, struck_s)
    deployment.store.command("CONFIG", "SET", "maxmemory", "0")
    recovered_s = await load.first_token_after(time.monotonic())
    return await stage.figures(
        load,
        deployment,
        struck_s=struck_s,
        detected_s=trouble.degraded_s,
        recovered_s=recovered_s,
        refused_after_s=trouble.refused_after_s,
    )


async def its_disk_is_full(stage: Stage) -> Figures:
    await stage.reference()
    store = SmallDiskStore()
    deployment = stage.own(store=store)
    await deployment.begin(*STANDARD_WORKERS)
    load = stage.load(deployment.address)
    await load.until_flowing()
    struck_s = time.monotonic()
    store.fill()
    trouble = await _in_trouble(deployment, load, FULL_S, struck_s)
    store.make_room()
    has_ended = not store.is_running
    await asyncio.to_thread(store.revive)
    recovered_s = await load.first_token_after(time.monotonic())
    return await stage.figures(
        load,
        deployment,
        struck_s=struck_s,
        detected_s=trouble.degraded_s,
        recovered_s=recovered_s,
        store_ended=has_ended,
    )


async def it_is_emptied(stage: Stage) -> Figures:
    deployment, load = await stage.flowing()
    struck_s = time.monotonic()
    deployment.store.command("FLUSHALL")
    recovered_s = await load.first_token_after(struck_s + ON_ITS_WAY_S)
    await load.until_flowing()
    return await stage.figures(
        load, deployment, struck_s=struck_s, recovered_s=recovered_s, records_since_s=struck_s + RESTATED_S
    )


async def it_is_emptied_and_the_scheduler_killed(stage: Stage) -> Figures:
    deployment, load = await stage.flowing()
    flushed_s = time.monotonic()
    deployment.store.command("FLUSHALL")
    await asyncio.sleep(RESTATED_S)
    struck_s = deployment.scheduler.kill()
    await deployment.begin_scheduler()
    recovered_s = await load.first_token_after(struck_s + ON_ITS_WAY_S)
    return await stage.figures(
        load, deployment, struck_s=struck_s, recovered_s=recovered_s, records_since_s=flushed_s + RESTATED_S
    )


async def it_is_emptied_beside_a_standby(stage: Stage) -> Figures:
    deployment = await with_standby(stage)
    load = stage.load(deployment.client_address)
    await load.until_flowing()
    struck_s = time.monotonic()
    deployment.store.command("FLUSHALL")
    await asyncio.sleep(2 * LEASE_S)  # a standby that took the lost lease for a free one would lead by then
    recovered_s = await load.first_token_after(struck_s + ON_ITS_WAY_S)
    await load.until_flowing()
    return await stage.figures(
        load,
        deployment,
        struck_s=struck_s,
        recovered_s=recovered_s,
        records_since_s=struck_s + RESTATED_S,
        leaders_ended=int(deployment.schedulers[0].is_over),
    )


async def replies_are_lost(stage: Stage) -> Figures:
    await stage.reference()
    deployment = stage.own()
    wire = await stage.store_path(deployment)
    await deployment.begin(*STANDARD_WORKERS)
    async with following(deployment.store.url) as tail:
        load = stage.load(deployment.address)
        await load.until_flowing()
        for number in range(NUM_DROPS):
            wire.drop_reply()
            await load.until(partial(_has_dropped, wire, number + 1), "a reply is dropped")
            await load.until_flowing(100)
        figures = await stage.figures(load, deployment)
        figures.more = {"replies_lost": wire.num_dropped, **await figures_of_leaders(load, tail)}
    return figures


def _has_dropped(wire: Proxy, number: int) -> bool:
    return wire.num_dropped >= number


class Trouble:
    """Store trouble, and a scheduler's reaction to it."""

    def __init__(self) -> None:
        self.degraded_s: float | None = None  # when it said so
        self.refused_after_s = REFUSAL_TIMEOUT_S  # how long a new request waited for its refusal
        self.num_steps = 0  # that the workers made meanwhile


async def _in_trouble(deployment: Deployment, load: ClientLoad, seconds: float, struck_s: float) -> Trouble:
    """Observe the trouble for this long."""
    trouble = Trouble()
    async with quire.AsyncClient(deployment.address, retries=0, call_timeout_s=2.0) as client:
        steps_before = await _num_steps(client)
        while time.monotonic() < struck_s + seconds:
            stats = await client.stats()
            if stats.journal.degraded and trouble.degraded_s is None:
                trouble.degraded_s = time.monotonic()
                trouble.refused_after_s = await _time_to_refusal(client)
            load.update()
            await asyncio.sleep(0.02)
        trouble.num_steps = await _num_steps(client) - steps_before
    return trouble


async def _num_steps(client: quire.AsyncClient) -> int:
    return sum(worker.num_steps for worker in (await client.stats()).workers)


async def _time_to_refusal(client: quire.AsyncClient) -> float:
    """Time until a request is refused; REFUSAL_TIMEOUT_S if it is not refused by then, or is accepted."""
    began_s = time.monotonic()
    try:
        async with asyncio.timeout(REFUSAL_TIMEOUT_S):
            await client.stream([5, 6, 7], max_tokens=1).accepted()
    except (quire.OverloadedError, quire.UnavailableError):
        return time.monotonic() - began_s
    except TimeoutError:
        pass
    return REFUSAL_TIMEOUT_S


SCENARIOS = (
    Scenario(
        fault="F11",
        title="store killed and started again",
        injected="SIGKILL of Valkey (appendfsync always), restart on its files",
        promise="P1 P2 P8",
        play=it_is_killed,
        targets=(*NOTHING_LOST, speed("token_after_restart_s", 0.5)),
    ),
    Scenario(
        fault="F13",
        title="store frozen for 5 s",
        injected="SIGSTOP, SIGCONT",
        promise="P1 P2 P5",
        play=it_is_frozen,
        targets=(*NOTHING_LOST, speed("detect_s", 1.5), speed("refused_after_s", 0.5)),
    ),
    Scenario(
        fault="F14",
        title="store out of memory for 3 s",
        injected="CONFIG SET maxmemory 1, noeviction; then 0",
        promise="P1 P2 P5 P8",
        play=its_memory_is_full,
        targets=(*NOTHING_LOST, speed("detect_s", 1.0), speed("refused_after_s", 0.5)),
    ),
    Scenario(
        fault="F14",
        title="store's disk full for 3 s",
        injected="its files on a tmpfs of 8 MB, filled up; room again, and Valkey started if it had ended",
        promise="P1 P2 P5 P8",
        play=its_disk_is_full,
    ),
    Scenario(
        fault="F15",
        title="store emptied while the scheduler lives",
        injected="FLUSHALL",
        promise="P1 P2",
        play=it_is_emptied,
    ),
    Scenario(
        fault="F15",
        title="store emptied, then the scheduler killed and started again",
        injected="FLUSHALL; SIGKILL 2 s later",
        promise="P1 P2",
        play=it_is_emptied_and_the_scheduler_killed,
    ),
    Scenario(
        fault="F15",
        title="store emptied beside a hot standby",
        injected="FLUSHALL; the lease and the epoch are lost, too",
        promise="P1 P2",
        play=it_is_emptied_beside_a_standby,
        targets=(*NOTHING_LOST, Target(figure="leaders_ended", at_most=0)),
    ),
    Scenario(
        fault="F18",
        title="replies of the store lost",
        injected="a proxy that swallows five replies, each with its connection",
        promise="P1 P2 P8",
        play=replies_are_lost,
        targets=(*NOTHING_LOST, *ONE_LEADER),
    ),
)
