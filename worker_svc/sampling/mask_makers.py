"""Threads that make masks of tokens. None is waited for beyond a limit of its own processor time.

The library under them cannot be interrupted. A thread that goes on too long is left behind: it gets another's place and
what little time others leave, and ends with its mask. Knows no grammars.
"""

import os
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from queue import SimpleQueue

FREE_MASK_CPU_S = 0.01  # of each mask; a usual one takes 0.0001 s, of a choice among 1,000 texts 0.004 s
MOST_MASK_CPU_S = 0.25  # of one mask, and of the masks of one kind in a step beyond what is free
_LOOK_S = 0.02  # between looks at the clocks of threads, where masks take long
_LOWEST_PRIORITY = 19


class MaskTask:
    """One mask to be made by `make`, which writes it where nobody else writes, also after the task was given up."""

    __slots__ = ("begins", "cpu_s", "ends", "error", "is_given_up", "kind", "make")

    def __init__(self, make: Callable[[], None], kind: Hashable) -> None:
        """`kind`: of tasks that cost alike: with the first, all that have not begun are given up."""
        self.make, self.kind = make, kind
        self.cpu_s = 0.0  # that it took
        self.error: BaseException | None = None  # raised by `make`
        self.is_given_up = False
        # Each is held by the first of two who come to it: the thread that makes it, or who gives it up.
        self.begins, self.ends = threading.Lock(), threading.Lock()


class MaskMakers:
    """At most so many threads, started as they are needed. One thread at a time calls `make`."""

    def __init__(self, most_threads: int, most_cpu_s: float = MOST_MASK_CPU_S) -> None:
        """`most_cpu_s`: of a mask that is waited for."""
        self._most_threads = most_threads
        self._most_cpu_s = most_cpu_s
        self._queue: SimpleQueue[tuple[MaskTask, _Batch]] = SimpleQueue()
        self._makers: list[_Maker] = []

    def make(self, tasks: Sequence[MaskTask]) -> None:
        """Return when each task is made, has raised, or is given up."""
        if not tasks:
            return
        while len(self._makers) < min(len(tasks), self._most_threads):
            self._makers.append(_Maker(self._queue))
        batch = _Batch(len(tasks), self._most_cpu_s)
        for task in tasks:
            self._queue.put((task, batch))
        while not batch.has_ended.acquire(timeout=_LOOK_S):
            self._give_up(tasks, batch)

    def _give_up(self, tasks: Sequence[MaskTask], batch: "_Batch") -> None:
        """Leave behind the threads whose task takes too long, and give up all tasks of their kinds."""
        left = {maker: task for maker in self._makers if (task := maker.leave(self._most_cpu_s)) is not None}
        if not left:
            return
        kinds = {task.kind for task in left.values()}
        alike = [task for task in tasks if task.kind in kinds and task.begins.acquire(blocking=False)]
        for task in alike:
            task.is_given_up = True
        # Others take the places only now, so that they begin none of these.
        self._makers = [_Maker(self._queue) if each in left else each for each in self._makers]
        batch.count(len(left) + len(alike))


class _Batch:
    """Tasks that are waited for together."""

    def __init__(self, num_tasks: int, most_cpu_s: float) -> None:
        self.has_ended = threading.Lock()  # released with the last task
        self.has_ended.acquire()
        self._num_left, self._most_cpu_s = num_tasks, most_cpu_s
        self._excess_s: defaultdict[Hashable, float] = defaultdict(float)  # by kind
        self._lock = threading.Lock()

    def is_spent(self, kind: Hashable) -> bool:
        """True if tasks of this kind have taken all that they may together."""
        return self._excess_s.get(kind, 0.0) > self._most_cpu_s

    def charge(self, kind: Hashable, cpu_s: float) -> None:
        """Add what a task took."""
        if cpu_s > FREE_MASK_CPU_S:
            with self._lock:
                self._excess_s[kind] += cpu_s - FREE_MASK_CPU_S

    def count(self, num_ended: int) -> None:
        """Count tasks that are over."""
        with self._lock:
            self._num_left -= num_ended
            if not self._num_left:
                self.has_ended.release()


class _Maker:
    """A thread that takes tasks until it is left behind."""

    def __init__(self, queue: "SimpleQueue[tuple[MaskTask, _Batch]]") -> None:
        self._queue = queue
        self._begun: tuple[MaskTask, float] | None = None  # the task at hand, and the thread's clock when it began
        # It must not keep the process from its end, however long its mask takes.
        self._thread = threading.Thread(target=self._run, name="mask-maker", daemon=True)
        self._thread.start()

    def leave(self, most_cpu_s: float) -> MaskTask | None:
        """Give up its task, and the thread with it, if it has taken more processor time than this; return it then."""
        begun = self._begun
        if begun is None or self._thread.ident is None or self._thread.native_id is None:
            return None
        task, began_s = begun
        cpu_s = time.clock_gettime(time.pthread_getcpuclockid(self._thread.ident)) - began_s
        if cpu_s <= most_cpu_s or not task.ends.acquire(blocking=False):
            return None
        task.is_given_up = True
        with suppress(OSError):  # it has just ended
            os.setpriority(os.PRIO_PROCESS, self._thread.native_id, _LOWEST_PRIORITY)
        return task

    def _run(self) -> None:
        while True:
            task, batch = self._queue.get()
            if not task.begins.acquire(blocking=False):
                continue
            if batch.is_spent(task.kind):
                task.is_given_up = True
                batch.count(1)
                continue
            began_s = time.thread_time()
            self._begun = task, began_s
            try:
                task.make()
            except BaseException as error:  # a panic of a Rust library is no Exception
                task.error = error
            task.cpu_s = time.thread_time() - began_s
            self._begun = None
            if not task.ends.acquire(blocking=False):
                return  # left behind
            batch.charge(task.kind, task.cpu_s)
            batch.count(1)
