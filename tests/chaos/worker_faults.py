"""Faults of workers: killed, frozen, slow, and steps that break."""

from tests.chaos.deployment import logged
from tests.chaos.scenario import NOTHING_LOST, Figures, speed
from tests.chaos.stage import Scenario, Stage


async def one_of_two_is_killed(stage: Stage) -> Figures:
    deployment = await stage.standard()
    load = stage.load(deployment.address)
    await load.until_flowing()
    struck_s = deployment.workers["worker-0"].kill()
    detected_s = await logged(deployment.scheduler, "worker lost", struck_s)
    recovered_s = await load.all_went_on_after(detected_s)
    return await stage.figures(load, deployment, struck_s=struck_s, detected_s=detected_s, recovered_s=recovered_s)


SCENARIOS = (
    Scenario(
        fault="F01",
        title="worker killed in the middle of decoding, another is there",
        injected="SIGKILL of one of two workers",
        promise="P1 P2 P3 P7",
        play=one_of_two_is_killed,
        targets=(*NOTHING_LOST, speed("detect_s", 0.05), speed("recover_s", 1.0)),
    ),
)
