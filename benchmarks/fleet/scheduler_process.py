"""A scheduler's process in virtual time: one core that does one thing after another, and the shards that it leads."""

from collections import deque
from collections.abc import Callable

from benchmarks.fleet.timeline import Timeline

Job = Callable[[], float]  # does its work at once, and returns the CPU time that it takes


class SchedulerProcess:
    """Jobs in the order in which they come. A process that died does none."""

    def __init__(self, address: str, rack: int, timeline: Timeline) -> None:
        self.address = address
        self.rack = rack
        self.is_alive = True
        self.leading: set[int] = set()
        self.standing: set[int] = set()
        self.busy_s = 0.0  # in all
        self._timeline = timeline
        self._jobs: deque[Job] = deque()
        self._free_s = 0.0
        self._is_waiting = False  # to be free for the next job

    def post(self, job: Job) -> None:
        """Do a job when those before it are done."""
        self._jobs.append(job)
        if not self._is_waiting:
            self._go_on()

    def kill(self) -> None:
        """End it, with all that it had to do."""
        self.is_alive = False
        self._jobs.clear()
        self.leading.clear()
        self.standing.clear()

    def _go_on(self) -> None:
        self._is_waiting = False
        now_s = self._timeline.now_s
        while self._jobs and self.is_alive and self._free_s <= now_s:
            took_s = self._jobs.popleft()()
            self._free_s = now_s + took_s
            self.busy_s += took_s
        if self._jobs and self.is_alive:
            self._is_waiting = True
            self._timeline.at(self._free_s, self._go_on)
