"""The thread on which a worker loads its model and executes steps, and the way back to the event loop.

One thread for both: torch keeps its thread pool and the device's context by thread. It takes tasks in order and
knows nothing of what they are.
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


class ExecutionThread:
    """One thread; made on the event loop to which results go back."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._tasks: SimpleQueue[Task | None] = SimpleQueue()
        # A daemon, because a model being loaded cannot be interrupted when the process is to end.
        context = contextvars.copy_context()  # what is bound to log lines
        self._thread = threading.Thread(target=context.run, args=(self._run,), name="execution", daemon=True)
        self._thread.start()

    def submit(self, work: Callable[[], T], deliver: Callable[[T], None]) -> None:
        """Does `work` on the thread, after what was submitted before, then calls `deliver` on the loop.

        `work` must not raise.
        """
        self._tasks.put(lambda: self._back(deliver, work()))

    async def call(self, work: Callable[[], T]) -> T:
        """Does `work` on the thread and gives its result or its exception."""
        future: asyncio.Future[T] = self._loop.create_future()

        def outcome() -> Callable[[], None]:
            try:
                result = work()
            except Exception as error:
                return _unless_done(future, future.set_exception, error)
            return _unless_done(future, future.set_result, result)

        self.submit(outcome, lambda set_outcome: set_outcome())
        return await future

    async def close(self) -> None:
        """Ends the thread after its tasks."""
        self._tasks.put(None)
        await asyncio.to_thread(self._thread.join)

    def _back(self, deliver: Callable[[T], None], result: T) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(deliver, result)

    def _run(self) -> None:
        while (task := self._tasks.get()) is not None:
            task()


def _unless_done(future: "asyncio.Future[T]", setter: Callable[[U], None], value: U) -> Callable[[], None]:
    """Setting a future that its waiter may have cancelled."""

    def set_outcome() -> None:
        if not future.done():
            setter(value)

    return set_outcome
