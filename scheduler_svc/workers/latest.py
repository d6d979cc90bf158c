"""What is kept by worker_id, of so many workers at most: whatever number of ids come one after another.

Knows nothing of what it keeps. Pure.
"""

from collections.abc import Collection
from typing import Generic, TypeVar

MOST_KEPT = 1024

Value = TypeVar("Value")


class Latest(Generic[Value]):
    """The values that were put last, one for each id."""

    def __init__(self, most: int = MOST_KEPT) -> None:
        self._most = most
        self._values: dict[str, Value] = {}  # who was put last comes last

    def __len__(self) -> int:
        return len(self._values)

    def __contains__(self, worker_id: str) -> bool:
        return worker_id in self._values

    def put(self, worker_id: str, value: Value) -> None:
        """In the place of what was there."""
        self._values.pop(worker_id, None)
        self._values[worker_id] = value
        if len(self._values) > self._most:
            del self._values[next(iter(self._values))]

    def get(self, worker_id: str) -> Value | None:
        """None if there is none, or more than so many were put since."""
        return self._values.get(worker_id)

    def discard(self, worker_id: str) -> None:
        """Harmless if there is none."""
        self._values.pop(worker_id, None)

    def values(self) -> Collection[Value]:
        """All of them, from the first put to the last."""
        return self._values.values()
