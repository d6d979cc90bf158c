"""Slowness of this machine against an idle one: measured once in each test process, and what has come since.

A limit is there to end what would never end by itself. So it may be long, and must not be what decides between right
and wrong on a machine that is slow or has other things to do.
"""

import os
import time
from functools import cache

_ROUNDS = 8
_ADDITIONS = 400_000  # of integers, in each round
_NOMINAL_S = 0.15  # that all rounds take alone on a core of an AMD EPYC of 2024
_MOST = 10.0

# Of a test that strikes while requests run: on a busy machine it may come too late, and then has shown nothing.
MOST_ATTEMPTS = 5


@cache
def slowness() -> float:
    """Slowness of this machine, at least 1. QUIRE_TEST_SLOWNESS replaces the measurement."""
    said = os.environ.get("QUIRE_TEST_SLOWNESS")
    if said is not None:
        return max(1.0, float(said))
    began_s = time.perf_counter()
    for _ in range(_ROUNDS):
        _work()
    return min(max(1.0, (time.perf_counter() - began_s) / _NOMINAL_S), _MOST)


def patient(limit_s: float) -> float:
    """A time limit that suffices on an idle machine, as it has to be here and now."""
    return limit_s * present_slowness()


def present_slowness() -> float:
    """Slowness now, at least `slowness`: processes may have come since that wait for a core, or for the disk."""
    if "QUIRE_TEST_SLOWNESS" in os.environ:
        return slowness()
    return max(slowness(), min(os.getloadavg()[0] / (os.cpu_count() or 1), _MOST))


def _work() -> int:
    total = 0
    for number in range(_ADDITIONS):
        total += number * number % 7
    return total
