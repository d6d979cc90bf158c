"""One seed, from nothing to its verdict."""

import asyncio
import gc
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from quire.errors import NotFoundError
from quire.v1 import inference_pb2 as pb
from scheduler_svc.journal.store import StoreUnavailableError
from scheduler_svc.requests.live.computations import SAMPLING
from tests.simulation.faults import Fault, draw_faults
from tests.simulation.history import History, keep_log
from tests.simulation.inflicting import Inflicting
from tests.simulation.machine_clocks import START_NS, VirtualClock
from tests.simulation.scheduler_life import SchedulerLife
from tests.simulation.verdict import faults_of_record, faults_of_rest
from tests.simulation.virtual_clocks import virtual_clocks
from tests.simulation.virtual_loop import StuckError, new_loop, until
from tests.simulation.world import World

MAX_TURNS = 2_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Outcome of one seed."""

    seed: int
    digest: str
    violations: list[str]
    num_events: int
    num_lives: int  # of schedulers
    num_entries: int  # that the store took
    num_finished: int  # requests whose clients saw an end
    faults: list[str]  # their kinds
    effects: dict[str, int]  # what they came to
    virtual_s: float


def run_seed(
    seed: int, *, is_traced: bool = False, forgets: float = 0.0, instead: Sequence[Fault] | None = None
) -> Outcome:
    """The same seed is the same run, event by event. With `forgets` the store breaks its word: see StoreServer.

    `instead` of the faults that the seed has, others may be given, in order of time.
    """
    clock = VirtualClock()
    loop = new_loop(clock, max_turns=MAX_TURNS)
    history = History(clock, is_traced=is_traced)
    draw = Random(seed)
    keep_log(history)
    gc.disable()
    try:
        with virtual_clocks(clock):
            world = World(loop, draw, history)
            faults = draw_faults(draw) if instead is None else list(instead)
            world.store.forgets = forgets
            try:
                loop.run(_run(world, Inflicting(world, faults)))
            except (StuckError, TimeoutError) as error:
                history.violate(f"P1: {type(error).__name__} {error}: {world.unserved()}")
            except Exception as error:  # whatever it is: the seed is to be named
                history.violate(f"the run itself failed: {error!r}")
            for fault in loop.faults:
                history.violate(f"nobody caught: {fault}")
            virtual_s = (clock.now_ns - START_NS) / 1e9
            keep_log(None)
            for process in [
                *(life.process for life in [*world.lives, *world.standbys]),
                *(each.process for each in world.workers.values()),
            ]:
                process.bury()
            loop.drain(200)
    finally:
        gc.enable()
        keep_log(None)
    return Outcome(
        seed=seed,
        digest=history.digest,
        violations=history.violations,
        num_events=history.num_events,
        num_lives=len(world.lives),
        num_entries=world.truth.num_entries,
        num_finished=sum(order.finished is not None for order in world.orders),
        faults=[fault.kind for fault in faults],
        effects=dict(history.effects),
        virtual_s=virtual_s,
    )


async def _run(world: World, inflicting: Inflicting) -> None:
    inflicting.begin()
    await world.serve()
    inflicting.end()
    await _take_stock(world)
    if not world.store.has_lost_data:
        world.start_scheduler()
        await until(lambda: world.life.serves, 0.01)
        if world.life.recovery.num_waiting:
            world.history.violate(f"P1: {world.life.recovery.num_waiting} requests that have ended are recovered again")
        await _take_stock(world)  # another one may follow it: a standby, too, waits for its turn


async def _take_stock(world: World) -> None:
    """Audit the scheduler that leads. It may find meanwhile that it leads no more; then the next one is audited."""
    while True:
        await until(world.is_quiet, 0.5)
        life = world.life
        # A pin whose worker went may be on its way again: that is no request, and nobody waits for it.
        num_samplings = sum(each is not SAMPLING for each in life.engine.sampling_of.values())
        for fault in faults_of_rest(life.engine.scheduler, num_samplings):
            world.history.violate(fault)
        audit = life.process.spawn(_audit(world, life))
        await until(lambda audit=audit, life=life: audit.done() or life.process.is_dead, 0.01)  # type: ignore[misc]
        if audit.done():
            return await audit


async def _answered(life: SchedulerLife, request_id: str) -> pb.GetRequestResponse:
    """A client would ask again, too: the connection may turn out to have broken long ago."""
    while True:
        try:
            return await life.control.response(request_id)
        except StoreUnavailableError:
            await asyncio.sleep(0.1)


async def _audit(world: World, life: SchedulerLife) -> None:
    """Assert that everything accepted has an end, and that its record equals what was seen."""
    for order in world.orders:
        if world.is_excused(order):
            continue
        admitted = world.truth.owner(order.request_id)
        if admitted is None or order.rival_of is not None:
            if order.is_accepted and order.rival_of is None:
                world.history.violate(f"P1: {order.request_id} was accepted, and is not in the journal")
            continue
        try:
            response = await _answered(life, order.request_id)
        except NotFoundError:
            if not world.store.has_lost_data:
                world.history.violate(f"P1: {order.request_id} has no record")
            continue
        if response.state != admitted.state:
            world.history.violate(f"P1: {order.request_id} is {response.state}, the journal says {admitted.state}")
        for fault in faults_of_record(order, response, has_lost_data=world.store.has_lost_data):
            world.history.violate(fault)
