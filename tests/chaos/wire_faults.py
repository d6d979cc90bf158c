"""Faults of the network: partitions between scheduler and worker, flipped bits, cut and slow connections."""

import asyncio
import time
from functools import partial

from tests.chaos.client_load import ClientLoad
from tests.chaos.deployment import Deployment, logged
from tests.chaos.proxy import Direction, Proxy
from tests.chaos.scenario import NOTHING_LOST, Figures, speed
from tests.chaos.stage import Scenario, Stage
from tests.services import free_address

APART_S = 10.0  # longer than a worker's lease
NUM_FLIPS = 12
FLIPS_TIMEOUT_S = 90.0
NUM_CUTS = 5


class Wires:
    """Worker-1 behind two proxies: its steps, and its registrations; worker-0 has none."""

    def __init__(self, deployment: Deployment, steps: Proxy, registrations: Proxy) -> None:
        self.deployment = deployment
        self.steps = steps
        self.registrations = registrations


async def wired(stage: Stage) -> Wires:
    """Two workers, one of them behind proxies."""
    await stage.reference()
    deployment = stage.own()
    listen = free_address()
    wires = Wires(deployment, await stage.proxy(listen), await stage.proxy(deployment.address))
    deployment.begin_worker("worker-0")
    deployment.begin_worker(
        "worker-1",
        *("--listen", listen, "--advertise", wires.steps.address),
        scheduler=wires.registrations.address,
    )
    await deployment.begin_scheduler()
    await deployment.until_driven("worker-0", "worker-1")
    return wires


async def apart(stage: Stage) -> Figures:
    return await _apart(stage, ("up", "down"), and_registrations=True)


async def steps_do_not_arrive(stage: Stage) -> Figures:
    return await _apart(stage, ("up",), and_registrations=False)


async def answers_do_not_arrive(stage: Stage) -> Figures:
    return await _apart(stage, ("down",), and_registrations=False)


async def _apart(stage: Stage, directions: tuple[Direction, ...], *, and_registrations: bool) -> Figures:
    wires = await wired(stage)
    deployment = wires.deployment
    load = stage.load(deployment.address)
    await load.until_flowing()
    struck_s = time.monotonic()
    wires.steps.hold(*directions)
    if and_registrations:
        wires.registrations.hold(*directions)
    detected_s = await logged(deployment.scheduler, "worker lost", struck_s)
    recovered_s = await load.all_went_on_after(detected_s)
    await asyncio.sleep(max(0.0, struck_s + APART_S - time.monotonic()))
    wires.steps.heal()
    wires.registrations.heal()
    await deployment.until_driven("worker-0", "worker-1")
    await load.until_flowing()
    return await stage.figures(load, deployment, struck_s=struck_s, detected_s=detected_s, recovered_s=recovered_s)


async def steps_are_damaged(stage: Stage) -> Figures:
    return await _damaged(stage, "up")


async def answers_are_damaged(stage: Stage) -> Figures:
    return await _damaged(stage, "down")


async def _damaged(stage: Stage, direction: Direction) -> Figures:
    """One bit after another, each once the worker has been back."""
    wires = await wired(stage)
    load = stage.load(wires.deployment.address)
    await load.until_flowing()
    for number in range(NUM_FLIPS):
        wires.steps.flip(direction)
        await load.until(partial(_has_flipped, wires.steps, number + 1), "a bit is flipped", FLIPS_TIMEOUT_S)
        await load.until_flowing(60)
        await wires.deployment.until_driven("worker-0", "worker-1")
    return await stage.figures(load, wires.deployment, bits_flipped=wires.steps.num_flipped)


def _has_flipped(wire: Proxy, number: int) -> bool:
    return wire.num_flipped >= number


async def the_worker_is_far(stage: Stage) -> Figures:
    wires = await wired(stage)
    load = stage.load(wires.deployment.address)
    wires.steps.delay(0.02)
    wires.steps.throttle(200_000)
    await load.until_flowing(600)
    return await stage.figures(load, wires.deployment)


async def clients_are_cut_off(stage: Stage) -> Figures:
    deployment = await stage.standard()
    wire = await stage.proxy(deployment.address)
    load = stage.load(wire.address)
    longest_s = 0.0
    for _ in range(NUM_CUTS):
        await load.until_flowing(200)
        struck_s = time.monotonic()
        wire.cut()
        longest_s = max(longest_s, await load.first_token_after(struck_s + 0.05) - struck_s)
    await _pass_by(load, wire)
    return await stage.figures(load, deployment, longest_resume_s=longest_s)


async def _pass_by(load: ClientLoad, wire: Proxy) -> None:
    """A half-open connection: what clients hear stops, and nobody is told, for a while."""
    wire.hold("down")
    await asyncio.sleep(3.0)
    wire.heal()
    wire.cut()
    await load.until_flowing()


SCENARIOS = (
    Scenario(
        fault="F10",
        title="connections of clients cut, then half-open for 3 s",
        injected="a proxy that resets every connection, five times; then holds what the scheduler says",
        promise="P1 P2",
        play=clients_are_cut_off,
        targets=(*NOTHING_LOST, speed("longest_resume_s", 1.0)),
    ),
    Scenario(
        fault="F19",
        title="scheduler and worker apart for 10 s",
        injected="proxies that hold both directions, of steps and registrations",
        promise="P1 P2 P3 P4",
        play=apart,
        targets=(*NOTHING_LOST, speed("detect_s", 2.5)),
    ),
    Scenario(
        fault="F19",
        title="steps do not reach a worker for 10 s",
        injected="a proxy that holds what goes to the worker; its registrations arrive",
        promise="P1 P2 P3 P4",
        play=steps_do_not_arrive,
        targets=(*NOTHING_LOST, speed("detect_s", 2.5)),
    ),
    Scenario(
        fault="F19",
        title="answers of a worker do not arrive for 10 s",
        injected="a proxy that holds what comes from the worker; its registrations arrive",
        promise="P1 P2 P3 P4",
        play=answers_do_not_arrive,
        targets=(*NOTHING_LOST, speed("detect_s", 2.5)),
    ),
    Scenario(
        fault="F20",
        title="steps damaged on their way",
        injected="a proxy that flips one bit, twelve times, anywhere in what goes to the worker",
        promise="P2 P3",
        play=steps_are_damaged,
    ),
    Scenario(
        fault="F20",
        title="answers damaged on their way",
        injected="a proxy that flips one bit, twelve times, anywhere in what comes from the worker",
        promise="P2 P3",
        play=answers_are_damaged,
    ),
    Scenario(
        fault="F04",
        title="a worker behind a slow network",
        injected="a proxy that delays by 20 ms and passes 200 kB/s",
        promise="P2 P6",
        play=the_worker_is_far,
    ),
)
