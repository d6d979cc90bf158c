"""A store that is slow: every command takes long, then nothing is answered for seconds. With and without a standby."""

import asyncio
import time

from tests.chaos.client_load import ClientLoad
from tests.chaos.deployment import Deployment
from tests.chaos.journal_tail import ONE_LEADER, figures_of_leaders, following
from tests.chaos.proxy import Proxy
from tests.chaos.scenario import NOTHING_LOST, Figures, nothing
from tests.chaos.stage import STANDARD_WORKERS, Scenario, Stage
from tests.chaos.standby_pair import begin_pair

WAY_S = (0.025, 0.15)  # in each direction: 50 to 300 ms a command
STALLS_S = (2.0, 4.0)  # longer than a lease
SLOW_TOKENS = 200
NUM_NEW = 5  # requests that are submitted and accepted while every command is slow


async def it_is_slow(stage: Stage) -> Figures:
    await stage.reference()
    deployment = stage.own()
    path = await stage.store_path(deployment)
    await deployment.begin(*STANDARD_WORKERS)
    return await _slow(stage, deployment, path)


async def it_is_slow_beside_a_standby(stage: Stage) -> Figures:
    pair = await begin_pair(stage, has_store_path=True)
    assert pair.store_path is not None
    return await _slow(stage, pair.deployment, pair.store_path)


async def _slow(stage: Stage, deployment: Deployment, path: Proxy) -> Figures:
    async with following(deployment.store.url) as tail:
        load = stage.load(deployment.client_address)
        await load.until_flowing()
        struck_s = time.monotonic()
        path.delay(*WAY_S)
        num_accepted = await _flow_with_new_ones(load, struck_s)
        for stall_s in STALLS_S:
            path.hold("up", "down")
            await asyncio.sleep(stall_s)
            path.heal()
            path.delay(*WAY_S)
            await load.until_flowing(SLOW_TOKENS)
        path.heal()
        recovered_s = await load.first_token_after(time.monotonic())
        await load.until_flowing()
        figures = await stage.figures(load, deployment, struck_s=struck_s, recovered_s=recovered_s)
        of_leaders = await figures_of_leaders(load, tail)
        changes = len(set(tail.epochs)) - 1
        figures.more = {
            "accepted_while_slow": num_accepted,
            "changes_of_leader": changes,
            "ended_without_another_leader": max(0, sum(life.is_over for life in deployment.schedulers) - changes),
            **of_leaders,
        }
    return figures


async def _flow_with_new_ones(load: ClientLoad, struck_s: float) -> int:
    """Wait for new tokens and for newly submitted requests to be accepted. Returns the number of these requests."""

    def new_ones() -> int:
        submitted = (told for told in load.history.requests.values() if told.submitted_s > struck_s)
        return sum(told.accepted_s is not None for told in submitted)

    await load.until_flowing(SLOW_TOKENS)
    await load.until(lambda: new_ones() >= NUM_NEW, "requests are accepted while the store is slow")
    return new_ones()


TARGETS = (*NOTHING_LOST, *ONE_LEADER, *nothing("ended_without_another_leader"))

SCENARIOS = (
    Scenario(
        fault="F13",
        title="store slow, then silent for 2 s and 4 s",
        injected="a proxy that delays each command by 50 to 300 ms, and holds all of them twice",
        promise="P1 P2 P5",
        play=it_is_slow,
        targets=TARGETS,
    ),
    Scenario(
        fault="F13",
        title="store slow, then silent for 2 s and 4 s, beside a hot standby",
        injected="the same between the store and both schedulers; lease 1.5 s",
        promise="P1 P2 P4 P5",
        play=it_is_slow_beside_a_standby,
        targets=TARGETS,
    ),
)
