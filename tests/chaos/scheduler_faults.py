"""Faults of schedulers: killed with and without a standby, frozen, ended in order."""

from tests.chaos.scenario import NOTHING_LOST, Figures, speed
from tests.chaos.stage import Scenario, Stage


async def the_only_one_is_killed(stage: Stage) -> Figures:
    deployment = await stage.standard()
    load = stage.load(deployment.address)
    await load.until_flowing()
    struck_s = deployment.scheduler.kill()
    await deployment.begin_scheduler()
    read = deployment.scheduler.service.wait_for("journal read")
    recovered_s = await load.first_token_after(struck_s + 0.1)  # what was on its way has come by then
    return await stage.figures(
        load, deployment, struck_s=struck_s, recovered_s=recovered_s, recovered_requests=read["num_live"]
    )


SCENARIOS = (
    Scenario(
        fault="F07",
        title="scheduler killed, no standby, started again",
        injected="SIGKILL of the scheduler, another on the same store at once",
        promise="P1 P2 P7",
        play=the_only_one_is_killed,
        targets=(*NOTHING_LOST, speed("recover_s", 3.0)),
    ),
)
