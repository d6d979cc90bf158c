"""What can be wrong with an array of a step: an id out of range, one that is not in use, one that is named twice.

Each raises InvalidStepError with the name it was given; none knows what a step is. Nothing here sorts: numpy gives up
the interpreter's lock while it sorts, however little, and a step on its way to the device waits to get it back.
"""

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from worker_svc.steps.step_limits import InvalidStepError

Ids = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]


def as_ids(values: Sequence[int]) -> Ids:
    return np.asarray(values, dtype=np.int64)


def as_pairs(values: Sequence[int]) -> Ids:
    return as_ids(values).reshape(-1, 2)


def occurrence(values: Ids) -> Ids:
    """For each value, how many equal ones stand before it."""
    seen: dict[int, int] = {}
    counts = np.empty_like(values)
    for index, value in enumerate(values.tolist()):
        counts[index] = seen[value] = seen.get(value, -1) + 1
    return counts


def refuse_where(bad: Flags, message: Callable[[int], str]) -> None:
    if np.count_nonzero(bad):  # half the time of any()
        raise InvalidStepError(message(int(bad.argmax())))


def check_range(name: str, values: Ids, limit: int, kind: str) -> None:
    refuse_where(
        values.view(np.uint64) >= limit,  # what is below 0 is beyond it too
        lambda i: f"{name} names {kind} {values[i]}: there are {limit}, counted from 0",
    )


def check_live(name: str, slots: Ids, live: Flags) -> None:
    refuse_where(~live[slots], lambda i: f"{name}[{i}] names slot {slots[i]}, which is not in use")


def check_distinct(name: str, values: Ids) -> None:
    if len(set(values.tolist())) < len(values):
        refuse_where(occurrence(values) > 0, lambda i: f"{name} names {values[i]} twice")
