"""Faults of the store: killed, frozen, full, emptied, and replies that are lost."""

import asyncio
import time

from tests.chaos.scenario import NOTHING_LOST, Figures, speed
from tests.chaos.stage import Scenario, Stage


async def it_is_killed(stage: Stage) -> Figures:
    deployment = await stage.standard()
    load = stage.load(deployment.address)
    await load.until_flowing()
    struck_s = time.monotonic()
    deployment.store.kill()
    await asyncio.to_thread(deployment.store.start)
    answers_s = time.monotonic()
    recovered_s = await load.first_token_after(answers_s)
    return await stage.figures(
        load, deployment, struck_s=struck_s, recovered_s=recovered_s, token_after_restart_s=recovered_s - answers_s
    )


SCENARIOS = (
    Scenario(
        fault="F11",
        title="store killed and started again",
        injected="SIGKILL of Valkey (appendfsync always), restart on its files",
        promise="P1 P2 P8",
        play=it_is_killed,
        targets=(*NOTHING_LOST, speed("token_after_restart_s", 0.5)),
    ),
)
