"""Faults of worker processes: killed, frozen, slow."""

import asyncio
import signal
import statistics
import time

from benchmarks.report import percentile
from tests.chaos.client_load import ClientLoad
from tests.chaos.deployment import Deployment, logged
from tests.chaos.scenario import NOTHING_LOST, Figures, speed
from tests.chaos.stage import STANDARD_WORKERS, Scenario, Stage

AWAY_S = 5.0  # until a killed worker is started again
FROZEN_S = 30.0


async def moments_of_loss(deployment: Deployment, load: ClientLoad, struck_s: float) -> dict[str, float]:
    """Moments at which a worker was struck, was missed, and all that it had computed went on; waits until then."""
    detected_s = await logged(deployment.scheduler, "worker lost", struck_s)
    recovered_s = await load.all_went_on_after(detected_s)
    return {"struck_s": struck_s, "detected_s": detected_s, "recovered_s": recovered_s}


async def one_of_two_is_killed(stage: Stage) -> Figures:
    deployment, load = await stage.flowing()
    victim, num_struck = await deployment.until_busy(*STANDARD_WORKERS)
    moments = await moments_of_loss(deployment, load, deployment.workers[victim].kill())
    return await stage.figures(load, deployment, **moments, struck_sequences=num_struck)


async def the_only_one_is_killed(stage: Stage) -> Figures:
    deployment = await stage.standard()
    gone_s = deployment.workers["worker-1"].kill()
    await logged(deployment.scheduler, "worker lost", gone_s)
    load = stage.load(deployment.address)
    await load.until_flowing()
    struck_s = deployment.workers["worker-0"].kill()
    detected_s = await logged(deployment.scheduler, "worker lost", struck_s)
    await asyncio.sleep(AWAY_S)
    deployment.begin_worker("worker-0")
    ready_s = await logged(deployment.scheduler, "worker ready", detected_s)
    recovered_s = await load.first_token_after(ready_s)
    return await stage.figures(
        load,
        deployment,
        struck_s=struck_s,
        detected_s=detected_s,
        recovered_s=recovered_s,
        token_after_ready_s=recovered_s - ready_s,
    )


async def one_is_frozen(stage: Stage) -> Figures:
    deployment, load = await stage.flowing()
    victim, num_struck = await deployment.until_busy(*STANDARD_WORKERS)
    frozen = deployment.workers[victim]
    struck_s = frozen.send(signal.SIGSTOP)
    moments = await moments_of_loss(deployment, load, struck_s)
    await asyncio.sleep(max(0.0, struck_s + FROZEN_S - time.monotonic()))
    thawed_s = frozen.send(signal.SIGCONT)
    await logged(deployment.scheduler, "worker ready", thawed_s)  # it is used again
    await load.until_flowing()
    return await stage.figures(load, deployment, **moments, struck_sequences=num_struck)


async def one_is_slow(stage: Stage) -> Figures:
    await stage.reference()
    deployment = stage.own()
    flag = stage.folder() / "slow"
    env = {"CHAOS_FAULT": "slow", "CHAOS_FLAG": str(flag)}
    deployment.begin_worker("worker-0")
    deployment.begin_worker("worker-1", module="tests.chaos.faulty_worker", env=env)
    await deployment.begin_scheduler()
    await deployment.until_driven("worker-0", "worker-1")
    load = stage.load(deployment.address)
    began_s = time.monotonic()
    await load.until_flowing(2000)
    _, num_struck = await deployment.until_busy("worker-1")
    struck_s = time.monotonic()
    flag.touch()
    before = load.gaps(began_s, struck_s)
    usual_s = statistics.median(gap for gaps in before for gap in gaps)
    await load.until_flowing(2500)
    now_s = time.monotonic()
    others = [gaps for gaps in load.gaps(struck_s, now_s) if statistics.median(gaps) < 3 * usual_s]
    ratio = _p99(others) / _p99(before)
    flag.unlink()
    return await stage.figures(load, deployment, others_p99_ratio=ratio, struck_sequences=num_struck)


def _p99(gaps: list[list[float]]) -> float:
    return percentile([gap for each in gaps for gap in each], 99)


SCENARIOS = (
    Scenario(
        fault="F01",
        title="worker killed in the middle of decoding, another is there",
        injected="SIGKILL of one of two workers",
        promise="P1 P2 P3 P7",
        play=one_of_two_is_killed,
        targets=(*NOTHING_LOST, speed("detect_s", 0.05), speed("recover_s", 1.0)),
    ),
    Scenario(
        fault="F02",
        title="the only worker killed, started again after 5 s",
        injected="SIGKILL, another process with the same name after 5 s",
        promise="P1 P2 P3 P7",
        play=the_only_one_is_killed,
        targets=(*NOTHING_LOST, speed("token_after_ready_s", 1.0)),
    ),
    Scenario(
        fault="F03",
        title="worker frozen for 30 s, then it goes on",
        injected="SIGSTOP, SIGCONT after 30 s",
        promise="P1 P2 P3 P7",
        play=one_is_frozen,
        targets=(*NOTHING_LOST, speed("detect_s", 2.0)),
    ),
    Scenario(
        fault="F04",
        title="one of two workers is ten times slower",
        injected="a runner around its runner that sleeps",
        promise="P2 P6",
        play=one_is_slow,
        targets=(*NOTHING_LOST, speed("others_p99_ratio", 1.2)),
    ),
)
