"""The clocks of a run: one that is true, and for each simulated process those of its machine, which differ from it.

A machine's time of day is off by some offset and may be set; its monotonic clock counts from its boot, and runs a
little too fast or too slow. What code asks is answered by the clocks of the process that it runs in. Knows no loop.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from random import Random

START_NS = 1_000 * 1_000_000_000
UNIX_NS = 1_700_000_000 * 1_000_000_000  # of the moment at which the true clock stands at 0
UPTIMES_S = (0.5, 30.0, 1_000.0, 3_000_000.0)  # of machines when a run begins
MAX_DRIFT_PPM = 300  # of a monotonic clock
APART_S = (0.0, 0.05, 2.0, 20_000.0)  # how far times of day are off at most, by run
MILLION = 1_000_000


class MachineClock:
    """Clock of one machine. Outside of all machines the true clock counts, which is one without an offset."""

    def __init__(self, *, uptime_ns: int = START_NS, drift_ppm: int = 0, ahead_ns: int = 0) -> None:
        """`uptime_ns` is that at the beginning of the run."""
        self.ahead_ns = ahead_ns  # of the time of day
        self._uptime_ns = uptime_ns
        self._pace = MILLION + drift_ppm

    def monotonic_ns(self, now_ns: int) -> int:
        return self._uptime_ns + (now_ns - START_NS) * self._pace // MILLION

    def true_ns(self, monotonic_ns: int) -> int:
        """The first true moment at which the monotonic clock shows this."""
        return START_NS - (self._uptime_ns - monotonic_ns) * MILLION // self._pace

    def true_span_ns(self, span_ns: int) -> int:
        """Least true duration of a span by this clock."""
        return -(-span_ns * MILLION // self._pace)


TRUE = MachineClock()
running_clock: ContextVar[MachineClock] = ContextVar("running_clock", default=TRUE)
_unix_ns: ContextVar[int | None] = ContextVar("unix_ns", default=None)


@contextmanager
def time_of_day(unix_ns: int) -> Iterator[None]:
    """Replace the time of day by that of another process's clock."""
    token = _unix_ns.set(unix_ns)
    try:
        yield
    finally:
        _unix_ns.reset(token)


class VirtualClock:
    """Clock that stands still while code runs. `now_ns` is the true time; the methods are functions of `time`."""

    def __init__(self) -> None:
        self.now_ns = START_NS

    def monotonic(self) -> float:
        return running_clock.get().monotonic_ns(self.now_ns) / 1e9

    def monotonic_ns(self) -> int:
        return running_clock.get().monotonic_ns(self.now_ns)

    def time(self) -> float:
        return self.time_ns() / 1e9

    def time_ns(self) -> int:
        told_ns = _unix_ns.get()
        return UNIX_NS + self.now_ns + running_clock.get().ahead_ns if told_ns is None else told_ns


class Clocks:
    """Clocks of a run's machines, drawn as they are needed."""

    def __init__(self, random_: Random) -> None:
        self._random = random_
        self._apart_s = random_.choice(APART_S)
        self._furthest_ns: dict[str, tuple[int, int]] = {}  # by role: behind, and ahead

    def draw(self, role: str) -> MachineClock:
        """Draw a clock for a process in that role."""
        random_ = self._random
        clock = MachineClock(
            uptime_ns=round(random_.choice(UPTIMES_S) * 1e9),
            drift_ppm=random_.randint(-MAX_DRIFT_PPM, MAX_DRIFT_PPM),
            ahead_ns=round(random_.uniform(-self._apart_s, self._apart_s) * 1e9),
        )
        self._note(role, clock)
        return clock

    def set_ahead(self, role: str, clock: MachineClock, by_ns: int) -> None:
        """Sets a time of day ahead, or back."""
        clock.ahead_ns += by_ns
        self._note(role, clock)

    def span_s(self, role: str) -> float:
        """Span between the earliest and the latest time of day in that role."""
        behind_ns, ahead_ns = self._furthest_ns.get(role, (0, 0))
        return (ahead_ns - behind_ns) / 1e9

    def _note(self, role: str, clock: MachineClock) -> None:
        behind_ns, ahead_ns = self._furthest_ns.get(role, (clock.ahead_ns, clock.ahead_ns))
        self._furthest_ns[role] = (min(behind_ns, clock.ahead_ns), max(ahead_ns, clock.ahead_ns))
