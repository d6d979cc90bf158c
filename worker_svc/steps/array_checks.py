"""Checks of an array of a step: ids out of range, ids that are not in use, ids that are named twice.

Each check raises InvalidStepError with the name it is given; none knows what a step is. Nothing here sorts: numpy
releases the interpreter's lock while it sorts, however few values, and the step would wait to get it back.
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


def as_triples(values: Sequence[int]) -> Ids:
    return as_ids(values).reshape(-1, 3)


def count_earlier_equals(values: Ids) -> Ids:
    """Count, for each value, the equal values before it."""
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
        values.view(np.uint64) >= limit,  # a negative value becomes a large one
        lambda i: f"{name} names {kind} {values[i]}: there are {limit}, counted from 0",
    )


def check_live(name: str, seats: Ids, live: Flags) -> None:
    refuse_where(~live[seats], lambda i: f"{name}[{i}] names seat {seats[i]}, which is not in use")


def check_distinct(name: str, values: Ids) -> None:
    if len(set(values.tolist())) < len(values):
        refuse_where(count_earlier_equals(values) > 0, lambda i: f"{name} names {values[i]} twice")
