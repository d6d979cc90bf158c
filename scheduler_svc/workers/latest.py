"""Bounded table by worker_id: the latest workers, however many ids come one after another.

Knows nothing of its values. Pure.
"""

from collections.abc import Collection
from typing import Generic, TypeVar

MOST_KEPT = 1024

Value = TypeVar("Value")


class Latest(Generic[Value]):
    """Latest values, one for each id; `most` of them."""

    def __init__(self, most: int = MOST_KEPT) -> None:
        self._most = most
        self._values: dict[str, Value] = {}  # the latest last

    def __len__(self) -> int:
        return len(self._values)

    def __contains__(self, worker_id: str) -> bool:
        return worker_id in self._values

    def put(self, worker_id: str, value: Value) -> None:
        """Put a value in place of the earlier one of this id."""
        self._values.pop(worker_id, None)
        self._values[worker_id] = value
        if len(self._values) > self._most:
            del self._values[next(iter(self._values))]

    def get(self, worker_id: str) -> Value | None:
        """Value of this id; None if there is none, or if too many others were put since."""
        return self._values.get(worker_id)

    def discard(self, worker_id: str) -> None:
        """Drop the value of this id, if there is one."""
        self._values.pop(worker_id, None)

    def values(self) -> Collection[Value]:
        """Values, from the first put to the last."""
        return self._values.values()
