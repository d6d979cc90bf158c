"""What can be wrong with an array of a step: an id out of range, one that is not in use, one that is named twice.

Each raises InvalidStepError with the name it was given; none knows what a step is.
"""

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from worker_svc.step_limits import InvalidStepError

Ids = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]


def as_ids(values: Sequence[int]) -> Ids:
    return np.asarray(values, dtype=np.int64)


def as_pairs(values: Sequence[int]) -> Ids:
    return as_ids(values).reshape(-1, 2)


def occurrence(values: Ids) -> Ids:
    """For each value, how many equal ones stand before it."""
    order = np.argsort(values, kind="stable")
    ordered = values[order]
    first = np.searchsorted(ordered, ordered, side="left")
    counts = np.empty_like(values)
    counts[order] = np.arange(len(values)) - first
    return counts


def refuse_where(bad: Flags, message: Callable[[int], str]) -> None:
    if bad.any():
        raise InvalidStepError(message(int(bad.argmax())))


def check_range(name: str, values: Ids, limit: int, kind: str) -> None:
    if len(values) and not 0 <= values.min() <= values.max() < limit:
        bad = values[(values < 0) | (values >= limit)][0]
        raise InvalidStepError(f"{name} names {kind} {bad}: there are {limit}, counted from 0")


def check_live(name: str, slots: Ids, live: Flags) -> None:
    refuse_where(~live[slots], lambda i: f"{name}[{i}] names slot {slots[i]}, which is not in use")


def check_distinct(name: str, values: Ids) -> None:
    ordered = np.sort(values)
    refuse_where(ordered[1:] == ordered[:-1], lambda i: f"{name} names {ordered[i]} twice")
