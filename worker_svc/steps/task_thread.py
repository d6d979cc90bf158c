"""A thread that runs tasks in order, and delivers their results to the event loop.

A worker loads its model and executes steps on one such thread, since torch keeps its thread pool and the device's
context by thread, and waits for its device on another. Knows nothing of the tasks.
"""

import asyncio
import contextvars
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import TypeVar

T = TypeVar("T")
U = TypeVar("U")
Task = Callable[[], None]


class TaskThread:
    """One thread; created on the event loop that gets the results."""

    def __init__(self, name: str) -> None:
        self.when_idle: Task = lambda: None  # called before the thread waits for a task
        self._loop = asyncio.get_running_loop()
        self._tasks: SimpleQueue[Task | None] = SimpleQueue()
        # A daemon, because the loading of a model cannot be interrupted when the process has to end.
        context = contextvars.copy_context()  # has the fields that are bound to log lines
        self._thread = threading.Thread(target=context.run, args=(self._run,), name=name, daemon=True)
        self._thread.start()

    def submit(self, task: Task) -> None:
        """Queues `task`, which must not raise. Safe from any thread."""
        self._tasks.put(task)

    def deliver(self, receive: Callable[[T], None], result: T) -> None:
        """Calls `receive` on the loop, in the order of delivery. Safe from any thread."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(receive, result)

    async def call(self, work: Callable[[], T]) -> T:
        """Runs `work` on the thread, and returns its result or raises its error."""
        future: asyncio.Future[T] = self._loop.create_future()

        def task() -> None:
            try:
                set_outcome = _unless_done(future, future.set_result, work())
            except BaseException as error:  # of any kind: the waiting call gets it
                set_outcome = _unless_done(future, future.set_exception, error)
            self.deliver(lambda _: set_outcome(), None)

        self.submit(task)
        return await future

    async def close(self) -> None:
        """Ends the thread after its tasks."""
        self._tasks.put(None)
        await asyncio.to_thread(self._thread.join)

    def _run(self) -> None:
        while True:
            if self._tasks.empty():
                self.when_idle()
            task = self._tasks.get()
            if task is None:
                return
            task()


def _unless_done(future: "asyncio.Future[T]", setter: Callable[[U], None], value: U) -> Task:
    """A task that sets a future unless its waiting call has cancelled it."""

    def set_outcome() -> None:
        if not future.done():
            setter(value)

    return set_outcome
