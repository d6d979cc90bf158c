import asyncio

import pytest

from tests.simulation.machine_clocks import VirtualClock
from tests.simulation.virtual_loop import Process, StuckError, VirtualLoop, new_loop


def short_loop() -> VirtualLoop:
    return new_loop(VirtualClock(), max_turns=1000)


async def ticking(ticks: list[float], loop: VirtualLoop) -> None:
    while True:
        await asyncio.sleep(1.0)
        ticks.append(round(loop.time() - 1000.0, 3))


def test_an_hour_passes_at_once() -> None:
    loop = short_loop()
    before_s = loop.time()
    loop.run(asyncio.sleep(3600.0))
    assert 3600.0 <= loop.time() - before_s < 3600.1


def test_timers_fire_in_their_order_whenever_they_were_set() -> None:
    loop, fired = short_loop(), list[str]()
    loop.call_later(2.0, fired.append, "late")
    loop.call_later(1.0, fired.append, "early")
    cancelled = loop.call_later(1.5, fired.append, "never")
    cancelled.cancel()
    loop.run(asyncio.sleep(3.0))
    assert fired == ["early", "late"]


def test_a_killed_process_does_nothing_more_not_even_clean_up() -> None:
    loop, ended = short_loop(), list[str]()
    process = Process(loop, "p")

    async def work() -> None:
        try:
            await asyncio.sleep(2.0)
        finally:
            ended.append("cleaned up")

    process.spawn(work())
    loop.outside(1.0, process.kill)
    loop.run(asyncio.sleep(10.0))
    assert not ended
    process.bury()
    loop.drain(10)
    assert ended == ["cleaned up"]


def test_a_frozen_process_goes_on_where_it_was_when_it_is_thawed() -> None:
    loop, ticks = short_loop(), list[float]()
    process = Process(loop, "p")
    process.spawn(ticking(ticks, loop))
    loop.outside(1.5, process.freeze)
    loop.outside(4.5, process.thaw)
    loop.run(asyncio.sleep(6.0))
    assert [round(tick, 2) for tick in ticks] == [1.0, 4.5, 5.5]
    process.bury()
    loop.drain(10)


def test_what_a_process_starts_belongs_to_it() -> None:
    loop, ticks = short_loop(), list[float]()
    process = Process(loop, "p")

    async def parent() -> None:
        child = asyncio.create_task(ticking(ticks, loop))
        await child

    process.spawn(parent())
    loop.outside(1.5, process.kill)
    loop.run(asyncio.sleep(6.0))
    assert len(ticks) == 1
    process.bury()
    loop.drain(10)


def test_waiting_for_nothing_is_found() -> None:
    loop = short_loop()
    with pytest.raises(StuckError, match="no timer"):
        loop.run(asyncio.Event().wait())


def test_turning_without_end_is_found() -> None:
    loop = short_loop()

    async def spin() -> None:
        while True:  # noqa: ASYNC110 - that is the fault
            await asyncio.sleep(0)

    with pytest.raises(StuckError, match="1000 turns"):
        loop.run(spin())
