"""Threads that make masks of tokens. None is waited for beyond a limit of its own processor time.

The library under them cannot be interrupted. A thread that goes on too long is left behind: it gets another's place and
what little time others leave, and ends with its mask. Knows no grammars.
"""

import os
import threading
import time
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from queue import SimpleQueue

MOST_MASK_CPU_S = 0.25  # of one mask; a usual one takes 0.0001 s, of a choice among 1,000 texts 0.004 s
_LOOK_S = 0.02  # between looks at the clocks of threads, where masks take long
_LOWEST_PRIORITY = 19


class MaskTask:
    """One mask to be made by `make`, which writes it where nobody else writes, also after the task was given up."""

    def __init__(self, make: Callable[[], None], kind: Hashable) -> None:
        """`kind`: of tasks that cost alike: with the first, all that have not begun are given up."""
        self.kind = kind
        self.cpu_s = 0.0  # that it took
        self.error: BaseException | None = None  # raised by `make`
        self.is_given_up = False
        self._make = make
        # Each is held by the first of two who come to it: the thread that makes it, or who gives it up.
        self._begins, self._ends = threading.Lock(), threading.Lock()

    def begin(self) -> bool:
        """False if the other side has: then it is not made."""
        return self._begins.acquire(blocking=False)

    def run(self) -> None:
        """Make it; once, on the thread of a maker."""
        began_s = time.thread_time()
        try:
            self._make()
        except BaseException as error:  # a panic of a Rust library is no Exception
            self.error = error
        self.cpu_s = time.thread_time() - began_s

    def end(self) -> bool:
        """False if the other side has ended it."""
        return self._ends.acquire(blocking=False)


class MaskMakers:
    """At most so many threads, started as they are needed. One thread at a time calls `make`."""

    def __init__(self, most_threads: int, most_cpu_s: float = MOST_MASK_CPU_S) -> None:
        """`most_cpu_s`: of a mask that is waited for."""
        self._most_threads = most_threads
        self._most_cpu_s = most_cpu_s
        self._queue: SimpleQueue[MaskTask] = SimpleQueue()
        self._ended = threading.Semaphore(0)  # counts tasks that their makers ended
        self._makers: list[_Maker] = []

    def make(self, tasks: Sequence[MaskTask]) -> None:
        """Return when each task is made, has raised, or is given up."""
        while len(self._makers) < min(len(tasks), self._most_threads):
            self._makers.append(_Maker(self._queue, self._ended))
        for task in tasks:
            self._queue.put(task)
        num_left = len(tasks)
        while num_left:
            if self._ended.acquire(timeout=_LOOK_S):
                num_left -= 1
            else:
                num_left -= self._give_up(tasks)

    def _give_up(self, tasks: Sequence[MaskTask]) -> int:
        """Leave behind the threads whose task takes too long. Returns the number of tasks that are given up."""
        left = {maker: task for maker in self._makers if (task := maker.leave(self._most_cpu_s)) is not None}
        if not left:
            return 0
        kinds = {task.kind for task in left.values()}
        alike = [task for task in tasks if task.kind in kinds and task.begin()]
        for task in alike:
            task.is_given_up = True
        # Others take the places only now, so that they begin none of these.
        self._makers = [_Maker(self._queue, self._ended) if each in left else each for each in self._makers]
        return len(left) + len(alike)


class _Maker:
    """A thread that takes tasks until it is left behind."""

    def __init__(self, queue: "SimpleQueue[MaskTask]", ended: threading.Semaphore) -> None:
        self._queue, self._ended = queue, ended
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
        if time.clock_gettime(time.pthread_getcpuclockid(self._thread.ident)) - began_s <= most_cpu_s or not task.end():
            return None
        task.is_given_up = True
        with suppress(OSError):  # it has just ended
            os.setpriority(os.PRIO_PROCESS, self._thread.native_id, _LOWEST_PRIORITY)
        return task

    def _run(self) -> None:
        while True:
            task = self._queue.get()
            if not task.begin():
                continue
            self._begun = task, time.thread_time()
            task.run()
            self._begun = None
            if not task.end():
                return  # left behind
            self._ended.release()
