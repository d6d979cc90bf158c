"""Replaces the clocks of the module `time` by virtual ones for the duration of a run.

Everywhere else doubles are handed in. Clocks are replaced because production code rightly takes the time from where
it is, in some thirty places, and one that was forgotten would make a run depend on the machine. Runs have a process
of their own, so that nobody else's time stands still.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager

from tests.simulation.machine_clocks import VirtualClock

_NAMES = ("monotonic", "monotonic_ns", "time", "time_ns")


@contextmanager
def virtual_clocks(clock: VirtualClock) -> Iterator[None]:
    real = {name: getattr(time, name) for name in _NAMES}
    for name in _NAMES:
        setattr(time, name, getattr(clock, name))
    try:
        yield
    finally:
        for name, function in real.items():
            setattr(time, name, function)
