"""Faults of a run and their times: drawn from the seed, before the run.

Knows the names of faults, not how they are done.
"""

from dataclasses import dataclass
from random import Random
from typing import Literal

Kind = Literal[
    "scheduler dies",
    "scheduler dies at entry",
    "scheduler dies at step",
    "scheduler is told to end",
    "scheduler freezes",
    "second leader",
    "standby starts",
    "standby loses the store",
    "standby is told to end",
    "client is unheard",
    "client hears nothing",
    "worker dies",
    "worker is told to end",
    "worker freezes",
    "worker is cut off",
    "worker is slow",
    "line breaks",
    "step fails",
    "store is frozen",
    "store is down",
    "store is full",
    "store is read only",
    "store loses replies",
    "store is slow",
    "store is flushed",
    "store is flushed at death",
    "store is flushed under a newcomer",
    "store fails over",
    "store is told to end",
    "clock jumps",
]

EMPTIED = 0.35  # probability that it is about an emptied store and standbys
WITH_CLIENTS = 0.3  # probability that paths of clients die on one side
WITH_CLOCKS = 0.25  # probability that clocks are set
HANDING_OVER = 0.25  # themes below: schedulers that end have standbys
FAULTS_S = 6.0  # in which they begin
_OF_SCHEDULERS: list[Kind] = [
    "scheduler dies",
    "scheduler dies at entry",
    "scheduler dies at entry",
    "scheduler dies at step",
    "scheduler is told to end",
    "scheduler freezes",
    "second leader",
]
_OF_MORTAL_SCHEDULERS: list[Kind] = ["scheduler dies", "scheduler dies at entry", "scheduler dies at step"]
_OF_WORKERS: list[Kind] = [
    "worker dies",
    "worker dies",
    "worker is told to end",
    "worker freezes",
    "worker is cut off",
    "worker is slow",
    "line breaks",
    "step fails",
]
_OF_STORE: list[Kind] = [
    "store is frozen",
    "store is down",
    "store is full",
    "store is read only",
    "store loses replies",
    "store is slow",
    "store is told to end",
]
_OF_HAND_OVERS: list[Kind] = [
    "standby starts",
    "standby starts",
    "scheduler is told to end",
    "scheduler is told to end",
    "standby is told to end",
]
_OF_CLIENTS: list[Kind] = ["client is unheard", "client hears nothing"]
_OF_CLOCKS: list[Kind] = ["clock jumps"]
_OF_LOSSY_STORE: list[Kind] = ["store is flushed", "store fails over"]
_OF_STANDBYS: list[Kind] = ["standby starts", "standby starts", "standby loses the store"]
_OF_EMPTIED_STORE: list[Kind] = [
    *_OF_STANDBYS,
    "store is flushed",
    "store is flushed",
    "store is flushed at death",
    "store is flushed under a newcomer",
    "store is flushed under a newcomer",
    "second leader",
    "clock jumps",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """`lasts_s` where it is undone after a while; `number` is of a worker, of entries, of steps."""

    kind: Kind
    at_s: float
    lasts_s: float
    number: int


def draw_faults(random_: Random) -> list[Fault]:
    """Draw faults in order of time. If a store lags, schedulers are killed, and live without followers."""
    pools: list[list[Kind]] = []
    theme = random_.random()
    if random_.random() < WITH_CLIENTS:
        pools.append(_OF_CLIENTS)
    if random_.random() < WITH_CLOCKS:
        pools.append(_OF_CLOCKS)
    if random_.random() < EMPTIED:
        pools += [_OF_EMPTIED_STORE, _OF_EMPTIED_STORE, _OF_STORE] if theme < 0.6 else [_OF_EMPTIED_STORE]
        if theme > 0.3:
            pools.append(_OF_MORTAL_SCHEDULERS)
        return _drawn(random_, pools)
    if theme < 0.55:
        pools.append(_OF_SCHEDULERS)
    if theme < HANDING_OVER:
        pools += [_OF_HAND_OVERS, _OF_HAND_OVERS]
    if 0.15 < theme < 0.4 or 0.55 < theme < 0.9:
        pools.append(_OF_WORKERS)
    if 0.3 < theme < 0.5 or 0.7 < theme < 0.95:
        pools.append(_OF_STORE)
    if theme > 0.8:
        pools.append(_OF_LOSSY_STORE)
    if theme > 0.9:
        pools.append(_OF_MORTAL_SCHEDULERS)
    return _drawn(random_, pools)


def _drawn(random_: Random, pools: list[list[Kind]]) -> list[Fault]:
    faults = []
    for _ in range(random_.randrange(1, 7) if pools else 0):
        kind = random_.choice(random_.choice(pools))
        at_s = random_.uniform(0.0, FAULTS_S)
        lasts_s = random_.choice([0.05, 0.5, 1.7, 4.0, 9.0])
        faults.append(Fault(kind=kind, at_s=at_s, lasts_s=lasts_s, number=random_.randrange(1, 30)))
    return sorted(faults, key=lambda fault: fault.at_s)
