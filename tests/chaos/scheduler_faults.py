"""Faults of schedulers: killed with and without a standby, frozen beyond the lease, ended in order."""

import asyncio
import signal
import time

from tests.chaos.client_load import ClientLoad
from tests.chaos.deployment import Deployment, Life
from tests.chaos.journal_tail import ONE_LEADER, JournalTail, figures_of_leaders, following
from tests.chaos.scenario import NOTHING_LOST, Figures, Target, nothing, speed
from tests.chaos.stage import STANDARD_WORKERS, Scenario, Stage
from tests.chaos.standby_pair import LEASE_S, begin_pair

NUM_ROUNDS = 2
ON_ITS_WAY_S = 0.1  # what a scheduler had sent before its death has come by then
FROZEN_LEADER_S = 4 * LEASE_S
OLD_LEADER_END_S = 20.0


async def the_only_one_is_killed(stage: Stage) -> Figures:
    deployment, load = await stage.flowing()
    struck_s = deployment.scheduler.kill()
    await deployment.begin_scheduler()
    read = deployment.scheduler.service.wait_for("journal read")
    recovered_s = await load.first_token_after(struck_s + ON_ITS_WAY_S)
    return await stage.figures(
        load, deployment, struck_s=struck_s, recovered_s=recovered_s, recovered_requests=read["num_live"]
    )


async def with_standby(stage: Stage) -> Deployment:
    """Two schedulers, the first of which leads, and two workers that know both."""
    return (await begin_pair(stage)).deployment


async def the_leader_is_killed(stage: Stage) -> Figures:
    deployment = await with_standby(stage)
    async with following(deployment.store.url) as tail:
        load = stage.load(deployment.client_address)
        await load.until_flowing()
        struck_s = deployment.schedulers[0].kill()
        recovered_s = await load.first_token_after(struck_s + ON_ITS_WAY_S)
        figures = await stage.figures(load, deployment, struck_s=struck_s, recovered_s=recovered_s)
        figures.more = {
            **await figures_of_leaders(load, tail),
            "recover_leases": (recovered_s - struck_s) / LEASE_S,
        }
    return figures


async def the_leader_is_frozen(stage: Stage) -> Figures:
    deployment = await with_standby(stage)
    async with following(deployment.store.url) as tail:
        load = stage.load(deployment.client_address)
        await load.until_flowing()
        old = deployment.schedulers[0]
        struck_s = old.send(signal.SIGSTOP)
        recovered_s = await _first_token_of_another_leader(load, tail, struck_s)
        await asyncio.sleep(max(0.0, struck_s + FROZEN_LEADER_S - time.monotonic()))
        old.send(signal.SIGCONT)
        await load.until(lambda: old.is_over, "the old leader ends", OLD_LEADER_END_S)
        await load.until_flowing()
        figures = await stage.figures(load, deployment, struck_s=struck_s, recovered_s=recovered_s)
        figures.more = {**await figures_of_leaders(load, tail), "old_leader_not_refused": _was_not_refused(old)}
    return figures


async def the_leader_alone_is_cut_off_from_the_store(stage: Stage) -> Figures:
    """Clients and workers still reach it. What it had sent arrives at the store after another has led for long."""
    pair = await begin_pair(stage, has_store_path=True, is_leaders_path=True)
    deployment, path = pair.deployment, pair.store_path
    assert path is not None
    async with following(deployment.store.url) as tail:
        load = stage.load(deployment.client_address)
        await load.until_flowing()
        old = deployment.schedulers[0]
        struck_s = time.monotonic()
        path.hold("up", "down")
        recovered_s = await _first_token_of_another_leader(load, tail, struck_s)
        await load.until_flowing()
        path.heal()
        await load.until(lambda: old.is_over, "the old leader ends", OLD_LEADER_END_S)
        await load.until_flowing()
        figures = await stage.figures(load, deployment, struck_s=struck_s, recovered_s=recovered_s)
        figures.more = {**await figures_of_leaders(load, tail), "old_leader_not_refused": _was_not_refused(old)}
    return figures


async def _first_token_of_another_leader(load: ClientLoad, tail: JournalTail, struck_s: float) -> float:
    """Time of the first token that no leader but the next one can have sent."""
    await load.until(lambda: len(tail.not_begun_s) > 1, "another leader begins")
    begins_s = tail.not_begun_s[max(tail.not_begun_s)]
    return await load.first_token_after(max(begins_s, struck_s + ON_ITS_WAY_S))


def _was_not_refused(old: Life) -> int:
    """0 if an old leader ended since the journal told it that a newer one writes there."""
    return int(not any("a newer scheduler took over" in line["reason"] for line in old.logged("scheduler ends")))


async def the_leader_hands_over(stage: Stage) -> Figures:
    deployment = await with_standby(stage)
    load = stage.load(deployment.client_address)
    await load.until_flowing()
    struck_s = deployment.schedulers[0].send(signal.SIGTERM)
    recovered_s = await load.first_token_after(struck_s + ON_ITS_WAY_S)
    code = await asyncio.to_thread(deployment.schedulers[0].service.wait)
    await load.until_flowing()
    return await stage.figures(load, deployment, struck_s=struck_s, recovered_s=recovered_s, exit_code=code)


async def everything_is_restarted_in_turn(stage: Stage) -> Figures:
    """Standby, leader, workers and store, each by SIGTERM, each started again; all of it twice."""
    pair = await begin_pair(stage)
    deployment = pair.deployment
    load = stage.load(deployment.client_address)
    await load.until_flowing()
    unclean = []
    for _ in range(NUM_ROUNDS):
        leader = await pair.leader()
        for number in (1 - leader, leader):
            unclean += await _ended_unclean(pair.schedulers[number])
            await pair.begin_scheduler(number)
            await load.until_flowing()
        for name in STANDARD_WORKERS:
            unclean += await _ended_unclean(deployment.workers[name])
            pair.begin_worker(name)
            await deployment.until_driven(name)
            await load.until_flowing()
        await asyncio.to_thread(deployment.store.stop)
        await asyncio.to_thread(deployment.store.start)
        await load.until_flowing()
    unclean += [f"{life.name} has ended by itself" for life in pair.schedulers if life.is_over]
    figures = await stage.figures(load, deployment, unclean_ends=len(unclean))
    figures.reasons += unclean
    return figures


async def _ended_unclean(life: Life) -> list[str]:
    """Describe how a process ended by SIGTERM, if not cleanly."""
    life.send(signal.SIGTERM)
    code = await asyncio.to_thread(life.service.wait)
    return [f"{life.name} ended with {code}: {life.service.raw[-1]}"] if code else []


async def the_only_scheduler_is_restarted(stage: Stage) -> Figures:
    """Restart without a standby: after SIGTERM running requests end; new ones wait in their clients."""
    deployment, load = await stage.flowing()
    struck_s = deployment.scheduler.send(signal.SIGTERM)
    code = await asyncio.to_thread(deployment.scheduler.service.wait)
    await deployment.begin_scheduler()
    recovered_s = await load.first_token_after(time.monotonic())
    return await stage.figures(load, deployment, struck_s=struck_s, recovered_s=recovered_s, exit_code=code)


SCENARIOS = (
    Scenario(
        fault="F07",
        title="scheduler killed, no standby, started again",
        injected="SIGKILL of the scheduler, another on the same store at once",
        promise="P1 P2 P7",
        play=the_only_one_is_killed,
        targets=(*NOTHING_LOST, speed("recover_s", 3.0)),
    ),
    Scenario(
        fault="F08",
        title="leader killed, hot standby",
        injected="SIGKILL of the leader; lease 1.5 s",
        promise="P1 P2 P4 P7",
        play=the_leader_is_killed,
        targets=(*NOTHING_LOST, *ONE_LEADER, speed("recover_leases", 1.5)),
    ),
    Scenario(
        fault="F09",
        title="split brain: leader frozen beyond its lease, then it goes on",
        injected="SIGSTOP of the leader for four leases, SIGCONT",
        promise="P1 P2 P4 P7",
        play=the_leader_is_frozen,
        targets=(*NOTHING_LOST, *ONE_LEADER, *nothing("old_leader_not_refused")),
    ),
    Scenario(
        fault="F09",
        title="split brain: leader alone cut off from the store, and reached again once another leads",
        injected="a proxy between the leader and the store that holds both directions",
        promise="P1 P2 P4 P7",
        play=the_leader_alone_is_cut_off_from_the_store,
        targets=(
            *NOTHING_LOST,
            *ONE_LEADER,
            *nothing("old_leader_not_refused"),
            speed("recover_s", 12.0),
        ),
    ),
    Scenario(
        fault="F30",
        title="rolling restart of standby, leader, workers and store, twice around",
        injected="SIGTERM of each in turn, each started again",
        promise="P1 P2 P4 P7",
        play=everything_is_restarted_in_turn,
        targets=(*NOTHING_LOST, Target(figure="unclean_ends", at_most=0)),
    ),
    Scenario(
        fault="F30",
        title="planned hand-over to a standby",
        injected="SIGTERM of the leader",
        promise="P1 P2 P4 P7",
        play=the_leader_hands_over,
        targets=(*NOTHING_LOST, Target(figure="exit_code", at_most=0), speed("recover_s", 1.0)),
    ),
    Scenario(
        fault="F30",
        title="restart of the only scheduler",
        injected="SIGTERM, another process once it has ended",
        promise="P1 P2 P7",
        play=the_only_scheduler_is_restarted,
        targets=(*NOTHING_LOST, Target(figure="exit_code", at_most=0)),
    ),
)
