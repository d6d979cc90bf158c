"""The sequences that wait for a worker, all workers' together, in the order in which they are served.

It knows the order and nothing else: not what a sequence needs, nor whether anybody can take it.
"""

import heapq
from collections.abc import Iterator

from scheduler_svc.core.sequence import Sequence


class WaitingQueue:
    """A heap by (priority, arrival). A discarded sequence leaves it when it reaches the top, or in a sweep."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, Sequence]] = []
        self._sizes: dict[int, int] = {}  # who is really waiting, and with how many tokens
        self.num_tokens = 0  # of all that wait

    def __len__(self) -> int:
        return len(self._sizes)

    def __iter__(self) -> Iterator[Sequence]:
        """In no particular order."""
        return (sequence for *_, sequence in self._heap if sequence.seq_id in self._sizes)

    def __contains__(self, sequence: Sequence) -> bool:
        return sequence.seq_id in self._sizes

    def push(self, sequence: Sequence) -> None:
        assert sequence.seq_id not in self._sizes, f"sequence {sequence.seq_id} waits twice"
        self._sizes[sequence.seq_id] = sequence.num_tokens
        self.num_tokens += sequence.num_tokens
        heapq.heappush(self._heap, (sequence.priority, sequence.seq_id, sequence))

    def peek(self) -> Sequence | None:
        while self._heap and self._heap[0][1] not in self._sizes:
            heapq.heappop(self._heap)
        return self._heap[0][2] if self._heap else None

    def pop(self) -> Sequence:
        sequence = self.peek()
        assert sequence is not None, "pop() from an empty queue"
        heapq.heappop(self._heap)
        self.num_tokens -= self._sizes.pop(sequence.seq_id)
        return sequence

    def discard(self, sequence: Sequence) -> None:
        """Take it out if it is there. A discarded sequence is finished: it is never pushed again."""
        self.num_tokens -= self._sizes.pop(sequence.seq_id, 0)
        if len(self._heap) > 2 * len(self._sizes) + 64:
            self._heap = [entry for entry in self._heap if entry[1] in self._sizes]
            heapq.heapify(self._heap)
