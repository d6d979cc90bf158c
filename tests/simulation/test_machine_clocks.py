import asyncio
import time
from random import Random

from tests.simulation.machine_clocks import START_NS, Clocks, MachineClock, VirtualClock, time_of_day
from tests.simulation.virtual_clocks import virtual_clocks
from tests.simulation.virtual_loop import Process, new_loop

FAST = MachineClock(uptime_ns=5_000_000_000, drift_ppm=1000, ahead_ns=7_200_000_000_000)


def test_each_process_asks_the_clocks_of_its_own_machine() -> None:
    clock = VirtualClock()
    loop = new_loop(clock, max_turns=1000)
    fast, true = Process(loop, "fast", FAST), Process(loop, "true")
    seen: dict[str, tuple[float, int]] = {}

    async def look(name: str) -> None:
        await asyncio.sleep(0)
        seen[name] = (time.monotonic(), time.time_ns())

    with virtual_clocks(clock):
        fast.spawn(look("fast"))
        true.spawn(look("true"))
        loop.run(asyncio.sleep(1.0))
    assert round(seen["true"][0] - seen["fast"][0]) == START_NS // 1_000_000_000 - 5
    assert seen["fast"][1] - seen["true"][1] == FAST.ahead_ns


def test_timers_go_by_the_clock_of_their_process_and_messages_by_the_true_one() -> None:
    """A clock that is faster by 1/1000 has waited 1000 s after 999 true ones."""
    loop = new_loop(VirtualClock(), max_turns=1000)
    process, fired = Process(loop, "fast", FAST), list[float]()

    async def wait() -> None:
        try:
            async with asyncio.timeout(1000.0):
                await asyncio.Event().wait()
        except TimeoutError:
            fired.append(loop.now_s)

    process.spawn(wait())
    process.call_later(1000.0, lambda: fired.append(loop.now_s))
    began_s = loop.now_s
    loop.run(asyncio.sleep(2000.0))
    assert [round(at_s - began_s, 2) for at_s in fired] == [999.0, 1000.0]


def test_a_timer_is_never_early_by_its_own_clock() -> None:
    random_ = Random(1)
    for _ in range(1000):
        clock = MachineClock(uptime_ns=random_.randrange(10**16), drift_ppm=random_.randint(-300, 300))
        due_ns = random_.randrange(10**16)
        true_ns = clock.true_ns(due_ns)
        assert clock.monotonic_ns(true_ns) >= due_ns > clock.monotonic_ns(true_ns - 2)


def test_a_clock_that_is_set_changes_the_time_of_day_alone() -> None:
    clocks, clock, virtual = Clocks(Random(3)), MachineClock(), VirtualClock()
    other = clocks.draw("scheduler")
    before_ns, span_s = clock.monotonic_ns(virtual.now_ns), clocks.span_s("scheduler")
    clocks.set_ahead("scheduler", clock, -(10**13))
    assert clock.monotonic_ns(virtual.now_ns) == before_ns
    assert clock.ahead_ns == -(10**13)
    assert clocks.span_s("scheduler") > span_s
    assert clocks.span_s("store") == 0
    assert other is not clock


def test_somebody_elses_time_of_day_counts_inside_alone() -> None:
    clock = VirtualClock()
    before_ns = clock.time_ns()
    with time_of_day(12):
        assert clock.time_ns() == 12
    assert clock.time_ns() == before_ns
