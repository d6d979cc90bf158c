"""Ranks of tensor-parallel workers are killed at random moments: any of them, rank 0 included, in the midst of steps.

Each death ends the whole group, which is started again as one, as `quire serve` does. The other group goes on.
"""

import asyncio
import os
import signal
import time

from tests.chaos.client_load import ClientLoad
from tests.chaos.deployment import logged
from tests.chaos.scenario import NOTHING_LOST, Figures, speed
from tests.chaos.stage import STANDARD_WORKERS, Scenario, Stage
from tests.rank_processes import assert_gone, ranks_of

NUM_KILLS = 30
NUM_RANKS = 2
PAUSE_S = (0.0, 3.0)  # of steps that go on, before a kill
NUM_BLOCKS = 4096
READY_TIMEOUT_S = 120.0
END_TIMEOUT_S = 600.0


async def any_rank_is_killed(stage: Stage) -> Figures:
    """Kill ranks until both the number and the seconds of the campaign are reached."""
    deployment = stage.own(num_blocks=NUM_BLOCKS)
    deployment.worker_flags += ["--dtype", "float32"]  # sums of two ranks part from one process's at near ties alone
    await deployment.begin(*STANDARD_WORKERS)
    await stage.judge_by(deployment)
    deployment.worker_flags += ["--tensor-parallel", str(NUM_RANKS)]
    for name in STANDARD_WORKERS:
        replaced_s = deployment.workers[name].kill()
        await logged(deployment.scheduler, "worker lost", replaced_s)
        deployment.begin_worker(name)
        await deployment.until_driven(name)
    load = stage.load(deployment.address, reconnect_timeout_s=120.0)
    await load.until_flowing()
    began_s = time.monotonic()
    num_kills, slowest_end_s, of_rank_0 = 0, 0.0, 0
    while num_kills < NUM_KILLS or time.monotonic() < began_s + stage.extent.campaign_s:
        name = stage.rng.choice(STANDARD_WORKERS)
        await asyncio.wait_for(deployment.until_driven(name), READY_TIMEOUT_S)
        await _let_run(load, stage.rng.uniform(*PAUSE_S))
        deployment.workers[name].is_struck_inside = True
        worker = deployment.workers[name].service
        group = [worker.process.pid, *ranks_of(worker)]
        victim = stage.rng.randrange(NUM_RANKS)
        struck_s = time.monotonic()
        os.kill(group[victim], signal.SIGKILL)
        await asyncio.to_thread(worker.wait)
        await asyncio.to_thread(assert_gone, group)
        slowest_end_s = max(slowest_end_s, time.monotonic() - struck_s)
        deployment.begin_worker(name)
        num_kills, of_rank_0 = num_kills + 1, of_rank_0 + (victim == 0)
    await deployment.until_driven(*STANDARD_WORKERS)
    figures = await stage.figures(load, deployment, end_timeout_s=END_TIMEOUT_S)
    figures.more = {
        "kills": num_kills,
        "of_rank_0": of_rank_0,
        "slowest_end_s": slowest_end_s,
        "tokens": load.history.num_tokens,
    }
    return figures


async def _let_run(load: ClientLoad, seconds: float) -> None:
    until_s = time.monotonic() + seconds
    await load.until(lambda: time.monotonic() >= until_s, "time passes")


RANKS_DIE = Scenario(
    fault="C6",
    title="any rank of two tensor-parallel workers is killed, under fifty mixed requests",
    injected=f"kill -9 of one of {NUM_RANKS} ranks of one of two workers, {NUM_KILLS} times at random moments; the "
    "group is started again at once",
    promise="P1 P2 P3 P6 P7",
    play=any_rank_is_killed,
    is_logged=True,
    targets=(*NOTHING_LOST, speed("slowest_end_s", 5.0)),
)
