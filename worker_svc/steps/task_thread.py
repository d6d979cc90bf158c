"""A thread that does tasks in order, and the way from it back to the event loop.

A worker loads its model and executes steps on one, since torch keeps its thread pool and the device's context by
thread, and waits for its device on another. It knows nothing of what the tasks are.
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
    """One thread; made on the event loop to which results go back."""

    def __init__(self, name: str) -> None:
        self.when_idle: Task = lambda: None  # done whenever no task is waiting, before the thread waits for one
        self._loop = asyncio.get_running_loop()
        self._tasks: SimpleQueue[Task | None] = SimpleQueue()
        # A daemon, because a model being loaded cannot be interrupted when the process is to end.
        context = contextvars.copy_context()  # what is bound to log lines
        self._thread = threading.Thread(target=context.run, args=(self._run,), name=name, daemon=True)
        self._thread.start()

    def submit(self, task: Task) -> None:
        """Does `task`, which must not raise, after what was submitted before. From any thread."""
        self._tasks.put(task)

    def deliver(self, receive: Callable[[T], None], result: T) -> None:
        """Calls `receive` on the loop, after what was delivered before. From any thread."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(receive, result)

    async def call(self, work: Callable[[], T]) -> T:
        """Does `work` on the thread and gives its result or its exception."""
        future: asyncio.Future[T] = self._loop.create_future()

        def task() -> None:
            try:
                set_outcome = _unless_done(future, future.set_result, work())
            except BaseException as error:  # whatever it is, whoever waits has it
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
    """Setting a future that its waiter may have cancelled."""

    def set_outcome() -> None:
        if not future.done():
            setter(value)

    return set_outcome
