"""Faults of clocks: the time of day of single processes set hours ahead and back, while they run, between leaders."""

import asyncio

import quire
from tests.chaos.client_load import ClientLoad
from tests.chaos.journal_tail import ONE_LEADER, figures_of_leaders, following
from tests.chaos.scenario import NOTHING_LOST, Figures, Target, speed
from tests.chaos.stage import Scenario, Stage
from tests.chaos.standby_pair import LEASE_S, begin_pair

AHEAD_HOURS = 5.0
BEHIND_HOURS = -4.0  # nine hours back from there
SUCCESSORS_HOURS = (0.0, -5.0, 5.0)  # of each leader after the first, whose clock is `AHEAD_HOURS` ahead
STORE_WAY_S = (0.02, 0.06)  # in each direction, so that leaders die between an end and its record
FLOW_TOKENS = 100
ON_ITS_WAY_S = 0.1
DEADLINE_S = 200.0  # of a request that runs through all jumps: long, and less than any of them
DEADLINE_TOKENS = 900


async def clocks_jump(stage: Stage) -> Figures:
    """Set the clocks of leader, standby and workers, one after another, hours ahead, then hours back."""
    pair = await begin_pair(stage, own_clocks=True)
    deployment = pair.deployment
    async with following(deployment.store.url) as tail:
        load = stage.load(deployment.client_address)
        await load.until_flowing()
        async with deployment.client() as client:
            stream = client.stream(
                [5, 6, 7], max_tokens=DEADLINE_TOKENS, ignore_eos=True, timeout_s=DEADLINE_S, request_id="in-time"
            )
            await stream.accepted()  # its deadline must be set before the leader's clock jumps ahead
            in_time = asyncio.create_task(_expires(stream))
            for hours in (AHEAD_HOURS, BEHIND_HOURS):
                for clock in pair.clocks.values():
                    clock.set_ahead(hours)
                    await load.until_flowing(FLOW_TOKENS)
            ended_before = in_time.done()
            expired = await in_time
        figures = await stage.figures(load, deployment)
        await tail.catch_up()
        figures.more = {
            "jumps": sum(clock.num_jumps for clock in pair.clocks.values()),
            "processes_ended": pair.num_ended + sum(life.is_over for life in deployment.workers.values()),
            "workers_lost": sum(len(life.logged("worker lost")) for life in pair.schedulers),
            "changes_of_leader": len(set(tail.epochs)) - 1,
            "false_expiries": expired,
            "ended_before_the_last_jump": int(ended_before and not expired),
        }
    return figures


async def _expires(stream: quire.CompletionStream) -> int:
    """1 if a request with a deadline that is far away does not finish in time."""
    try:
        completion = await stream.completion()
    except quire.RequestExpiredError:
        return 1
    return int(len(completion.samples[0].token_ids) != DEADLINE_TOKENS)


async def leaders_clocks_differ(stage: Stage) -> Figures:
    """One leader after another is killed, and its successor's time of day is hours behind or ahead of its own."""
    pair = await begin_pair(stage, own_clocks=True, has_store_path=True)
    deployment = pair.deployment
    assert pair.store_path is not None
    pair.store_path.delay(*STORE_WAY_S)
    worst_s = 0.0
    async with following(deployment.store.url) as tail:
        load = stage.load(deployment.client_address)
        await load.until_flowing()
        pair.clocks["scheduler-0"].set_ahead(AHEAD_HOURS)
        leader = 0
        for hours in SUCCESSORS_HOURS:
            pair.clocks[f"scheduler-{1 - leader}"].set_ahead(hours)
            await load.until_flowing()
            worst_s = max(worst_s, await _kill_leader(load, pair.schedulers[leader].kill()))
            await pair.begin_scheduler(leader)
            leader = 1 - leader
        figures = await stage.figures(load, deployment)
        figures.more = {
            **await figures_of_leaders(load, tail),
            "leaders": len(set(tail.epochs)),
            "recover_leases": worst_s / LEASE_S,
        }
    return figures


async def _kill_leader(load: ClientLoad, struck_s: float) -> float:
    """Kill the leader; return the longest time without a token."""
    return await load.first_token_after(struck_s + ON_ITS_WAY_S) - struck_s


SCENARIOS = (
    Scenario(
        fault="F31",
        title="clocks of leader, standby and workers jump by hours",
        injected="the time of day of one process after another set 5 h ahead, then 9 h back, by a preloaded library",
        promise="P1 P2 P4",
        play=clocks_jump,
        targets=(
            *NOTHING_LOST,
            *(
                Target(figure=name, at_most=0)
                for name in (
                    *("processes_ended", "workers_lost", "changes_of_leader"),
                    *("false_expiries", "ended_before_the_last_jump"),
                )
            ),
        ),
    ),
    Scenario(
        fault="F31",
        title="leaders killed whose successors' clocks are hours behind or ahead",
        injected="SIGKILL of three leaders in turn, each standby's time of day 5 h behind or 10 h ahead; lease 1.5 s, "
        "and a store that takes 40 to 120 ms for a command",
        promise="P1 P2 P4 P7",
        play=leaders_clocks_differ,
        targets=(
            *NOTHING_LOST,
            *ONE_LEADER,
            speed("recover_leases", 3.0),
        ),
    ),
)
