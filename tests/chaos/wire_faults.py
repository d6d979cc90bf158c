"""Faults of the network: partitions between scheduler and worker, flipped bits, cut and slow connections."""

import asyncio
import time
from collections.abc import Sequence
from functools import partial

from tests.chaos.client_load import ClientLoad
from tests.chaos.deployment import Deployment
from tests.chaos.proxy import Direction, Proxy
from tests.chaos.scenario import NOTHING_LOST, Figures, speed
from tests.chaos.stage import Scenario, Stage
from tests.chaos.worker_faults import moments_of_loss
from tests.services import free_address

APART_S = 10.0  # longer than a worker's lease
NUM_FLIPS = 12
FLIPS_TIMEOUT_S = 90.0
NUM_CUTS = 5
HALF_OPEN_S = 12.0  # longer than keepalive, and than a reader waits for a silent stream


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
    _, num_struck = await deployment.until_busy("worker-1")
    struck_s = time.monotonic()
    wires.steps.hold(*directions)
    if and_registrations:
        wires.registrations.hold(*directions)
    moments = await moments_of_loss(deployment, load, struck_s)
    await asyncio.sleep(max(0.0, struck_s + APART_S - time.monotonic()))
    wires.steps.heal()
    wires.registrations.heal()
    await deployment.until_driven("worker-0", "worker-1")
    await load.until_flowing()
    return await stage.figures(load, deployment, **moments, struck_sequences=num_struck)


async def steps_are_damaged(stage: Stage) -> Figures:
    return await _damaged(stage, "up")


async def answers_are_damaged(stage: Stage) -> Figures:
    return await _damaged(stage, "down")


async def _damaged(stage: Stage, direction: Direction) -> Figures:
    """Flip one bit after another, in what either worker is sent or sends, each once both workers have been back.

    Either, since requests follow their cached prefixes: one of the workers may have no requests for minutes.
    """
    await stage.reference()
    deployment = stage.own()
    wires: list[Proxy] = []
    for number in range(2):
        listen = free_address()
        wires.append(await stage.proxy(listen))
        deployment.begin_worker(f"worker-{number}", "--listen", listen, "--advertise", wires[-1].address)
    await deployment.begin_scheduler()
    await deployment.until_driven("worker-0", "worker-1")
    load = stage.load(deployment.address)
    await load.until_flowing()
    for _ in range(NUM_FLIPS):
        num_before = _num_flipped(wires)
        for wire in wires:
            wire.flip(direction)
        await load.until(partial(_have_flipped, wires, num_before + 1), "a bit is flipped", FLIPS_TIMEOUT_S)
        for wire in wires:
            wire.flip(direction, 0)
        await load.until_flowing(60)
        await deployment.until_driven("worker-0", "worker-1")
    return await stage.figures(load, deployment, bits_flipped=_num_flipped(wires))


def _have_flipped(wires: Sequence[Proxy], number: int) -> bool:
    return _num_flipped(wires) >= number


def _num_flipped(wires: Sequence[Proxy]) -> int:
    return sum(wire.num_flipped for wire in wires)


async def the_worker_is_far(stage: Stage) -> Figures:
    wires = await wired(stage)
    load = stage.load(wires.deployment.address)
    wires.steps.delay(0.02)
    wires.steps.throttle(200_000)
    _, num_slowed = await wires.deployment.until_busy("worker-1")
    await load.until_flowing(600)
    return await stage.figures(load, wires.deployment, struck_sequences=num_slowed)


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
    """Hold a connection half-open for a while, then cut it: meanwhile clients receive nothing and get no error."""
    wire.hold("down")
    await asyncio.sleep(3.0)
    wire.heal()
    wire.cut()
    await load.until_flowing()


async def nothing_goes_up(stage: Stage) -> Figures:
    return await _half_open(stage, "up")


async def nothing_comes_down(stage: Stage) -> Figures:
    return await _half_open(stage, "down")


async def nothing_passes(stage: Stage) -> Figures:
    return await _half_open(stage, "up", "down")


async def what_is_open_is_lost(stage: Stage) -> Figures:
    deployment = await stage.standard()
    wire = await stage.proxy(deployment.address)
    load = stage.load(wire.address)
    anew_after_s = await _lose_what_is_open(load, wire, "up", "down")
    return await stage.figures(load, deployment, connected_anew_after_s=anew_after_s)


async def _half_open(stage: Stage, *directions: Direction) -> Figures:
    """First break open connections silently while new ones pass; then, for long, let no new one pass."""
    deployment = await stage.standard()
    wire = await stage.proxy(deployment.address)
    load = stage.load(wire.address)
    anew_after_s = await _lose_what_is_open(load, wire, *directions)
    wire.swallow(*directions)
    await asyncio.sleep(HALF_OPEN_S)
    wire.heal()
    healed_s = time.monotonic()
    recovered_s = await load.first_token_after(healed_s)
    await load.until_flowing()
    return await stage.figures(
        load,
        deployment,
        connected_anew_after_s=anew_after_s,
        token_after_heal_s=recovered_s - healed_s,
    )


async def _lose_what_is_open(load: ClientLoad, wire: Proxy, *directions: Direction) -> float:
    """Break open connections silently; return the time until every client had reconnected."""
    await load.until_flowing()
    num_anew = wire.num_connections + len(load.clients)
    struck_s = time.monotonic()
    wire.swallow(*directions)
    await load.until(lambda: wire.num_half_open >= len(load.clients) * len(directions), "every path is half-open")
    wire.heal()
    await load.until(lambda: wire.num_connections >= num_anew, "every client connects anew")
    anew_s = time.monotonic()
    await load.until_flowing()
    return anew_s - struck_s


HALF_OPEN = Scenario(
    fault="F10",
    title="half-open: connections of clients die without a word, and new ones pass",
    injected="a proxy that swallows both directions of what is open, and never resets it",
    promise="P1 P2",
    play=what_is_open_is_lost,
    targets=(*NOTHING_LOST, speed("connected_anew_after_s", 5.0)),
)

SCENARIOS = (
    HALF_OPEN,
    Scenario(
        fault="F10",
        title="connections of clients cut, then half-open for 3 s",
        injected="a proxy that resets every connection, five times; then holds what the scheduler says",
        promise="P1 P2",
        play=clients_are_cut_off,
        targets=(*NOTHING_LOST, speed("longest_resume_s", 1.0)),
    ),
    *(
        Scenario(
            fault="F10",
            title=f"half-open: {what}",
            injected="a proxy that swallows it, on what is open, then on everything for 12 s; nothing is ever reset",
            promise="P1 P2",
            play=play,
            targets=(*NOTHING_LOST, speed("connected_anew_after_s", 5.0), speed("token_after_heal_s", 5.0)),
        )
        for what, play in (
            ("nothing of what clients say arrives", nothing_goes_up),
            ("nothing of what clients are told arrives", nothing_comes_down),
            ("nothing between clients and scheduler arrives", nothing_passes),
        )
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
