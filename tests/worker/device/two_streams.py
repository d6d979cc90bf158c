"""Two streams that run what was queued on them in any order that their events allow, as a device may.

Each operation is one function and happens at once; a test cuts what takes time into many.
"""

from collections import deque
from collections.abc import Callable
from random import Random

Operation = Callable[[], object]
Event = tuple[str, int]


class TwoStreams:
    """The streams `main` and `side`."""

    def __init__(self, random: Random) -> None:
        self._random = random
        self._queues: dict[str, deque[tuple[str, Event | Operation]]] = {"main": deque(), "side": deque()}
        self._reached: set[Event] = set()

    def do(self, stream: str, operation: Operation) -> None:
        self._queues[stream].append(("do", operation))

    def record(self, stream: str, event: Event) -> None:
        self._queues[stream].append(("record", event))

    def wait(self, stream: str, event: Event) -> None:
        self._queues[stream].append(("wait", event))

    def is_reached(self, event: Event) -> bool:
        return event in self._reached

    def run(self, most: int | None = None) -> None:
        """Run entries, at most `most`; assert that the streams do not wait for each other for ever."""
        while most is None or most > 0:
            ready = [stream for stream in self._queues if self._is_ready(stream)]
            if not ready:
                assert not any(self._queues.values()), "both streams wait"
                return
            self._take(self._random.choice(ready))
            most = None if most is None else most - 1

    def _is_ready(self, stream: str) -> bool:
        queue = self._queues[stream]
        return bool(queue) and (queue[0][0] != "wait" or queue[0][1] in self._reached)

    def _take(self, stream: str) -> None:
        kind, what = self._queues[stream].popleft()
        if kind == "record":
            assert isinstance(what, tuple)
            self._reached.add(what)
        elif kind == "do":
            assert callable(what)
            what()
