"""Bounded table by worker_id: the latest workers, however many ids come one after another.

Knows nothing of its values. Pure.
"""

from typing import TypeVar

MOST_KEPT = 1024

Value = TypeVar("Value")


class Latest(dict[str, Value]):
    """Latest values, one for each id, from the first put to the last; `most` of them. Written by `put` alone."""

    def __init__(self, most: int = MOST_KEPT) -> None:
        super().__init__()
        self._most = most

    def put(self, worker_id: str, value: Value) -> None:
        """Put a value in place of the earlier one of this id."""
        self.discard(worker_id)
        self[worker_id] = value
        if len(self) > self._most:
            del self[next(iter(self))]

    def discard(self, worker_id: str) -> None:
        """Drop the value of this id, if there is one."""
        self.pop(worker_id, None)
