"""An event loop on virtual time, and processes in it that can be frozen or killed between any two callbacks.

Nothing ever blocks: where a real loop would wait for its next timer, this one puts the clock forward. What belongs to
which process is known by context: all that a task of a process starts, belongs to it too. Its timers go by the clock of
its machine, messages between processes by the true one. No threads, no sockets.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine
from contextvars import Context, ContextVar, copy_context
from heapq import heappop, heappush
from typing import Any, TypeVar, TypeVarTuple, Unpack

from tests.simulation.machine_clocks import TRUE, MachineClock, VirtualClock, running_clock

TURN_NS = 1_000  # that a turn of the loop takes, so that whoever waits by turning is seen to take time

Result = TypeVar("Result")
Arguments = TypeVarTuple("Arguments")


class StuckError(Exception):
    """Deadlock: no callback is ready and no timer runs, or turns follow each other without end."""


class Process:
    """Process. Callbacks and timers of a frozen one wait until it is thawed; those of a dead one are dropped."""

    def __init__(self, loop: "VirtualLoop", name: str, clock: MachineClock = TRUE) -> None:
        self.name = name
        self.clock = clock
        self.is_dead = False
        self.is_frozen = False
        self.tasks: list[asyncio.Task[Any]] = []
        self.held: list[asyncio.Handle] = []  # due while it did not run
        self.context = copy_context()
        self.context.run(_process.set, self)
        self.context.run(running_clock.set, clock)
        self._loop = loop

    @property
    def runs(self) -> bool:
        return not self.is_dead and not self.is_frozen

    def spawn(self, work: Coroutine[Any, Any, Result]) -> "asyncio.Task[Result]":
        return self._loop.create_task(work, context=self.context)

    def call_later(self, delay_s: float, callback: Callable[..., object], *args: Any) -> None:
        """Call later, as a message from outside that arrives then."""
        self._loop.arrive(delay_s, callback, args, self.context)

    def kill(self) -> None:
        """Stop the process at once: none of its code runs any more, not even cleanup."""
        self.is_dead = True

    def freeze(self) -> None:
        self.is_frozen = True

    def thaw(self) -> None:
        self.is_frozen = False
        if self.is_dead:
            return
        held, self.held = self.held, []
        for handle in held:
            self._loop.hand_on(handle, self)

    def bury(self) -> None:
        """Cancel its tasks after the run, so that none is left to the garbage collector."""
        for task in self.tasks:
            task.cancel()
        self.is_dead = False
        self.thaw()


async def until(condition: Callable[[], bool], every_s: float) -> None:
    """Asks again and again, in virtual time."""
    while not condition():  # noqa: ASYNC110 - what it asks about tells nobody
        await asyncio.sleep(every_s)


_process: ContextVar[Process | None] = ContextVar("process", default=None)


class VirtualLoop(asyncio.AbstractEventLoop):
    """Event loop for code without I/O. First come, first served, as in asyncio's own."""

    def __init__(self, clock: VirtualClock, *, max_turns: int) -> None:
        self.clock = clock
        self.faults: list[str] = []  # exceptions that nobody caught
        self.num_turns = 0
        self._max_turns = max_turns
        self._ready: deque[tuple[asyncio.Handle, Process | None]] = deque()
        self._timers: list[tuple[int, int, asyncio.TimerHandle, Process | None]] = []
        self._num_timers = 0
        self._is_over = False
        self._outside = copy_context()  # of no process

    def run(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Runs it to its end. Raises StuckError if that does not come."""
        asyncio._set_running_loop(self)
        try:
            task = self.create_task(work)
            while not task.done():
                self._turn()
            result: Result = task.result()
            return result
        finally:
            asyncio._set_running_loop(None)

    def drain(self, max_turns: int) -> None:
        """Run ready callbacks for some turns after the run; exceptions are ignored."""
        self._is_over = True
        asyncio._set_running_loop(self)
        try:
            for _ in range(max_turns):
                if self._ready:
                    self._run_ready()
        finally:
            asyncio._set_running_loop(None)

    def outside(self, delay_s: float, callback: Callable[..., object], *args: Any) -> asyncio.TimerHandle:
        """Call later, outside of all processes."""
        return self.arrive(delay_s, callback, args, self._outside)

    def arrive(
        self, delay_s: float, callback: Callable[..., object], args: tuple[Any, ...], context: Context
    ) -> asyncio.TimerHandle:
        """Call in that context after a span of true time."""
        return self._add_timer(self.clock.now_ns + round(delay_s * 1e9), callback, args, context)

    def hand_on(self, handle: asyncio.Handle, process: Process | None) -> None:
        self._ready.append((handle, process))

    def _turn(self) -> None:
        self.num_turns += 1
        if self.num_turns > self._max_turns:
            raise StuckError(f"no end after {self._max_turns} turns of the loop")
        timers, clock = self._timers, self.clock
        clock.now_ns += TURN_NS
        if not self._ready:
            while timers and timers[0][2].cancelled():
                heappop(timers)
            if not timers:
                raise StuckError("nothing is ready, and no timer runs")
            clock.now_ns = max(clock.now_ns, timers[0][0])
        while timers and timers[0][0] <= clock.now_ns:
            _, _, handle, process = heappop(timers)
            self._ready.append((handle, process))
        self._run_ready()

    def _run_ready(self) -> None:
        ready = self._ready
        for _ in range(len(ready)):
            handle, process = ready.popleft()
            if handle.cancelled():
                continue
            if process is None or process.runs:
                handle._run()
            else:
                process.held.append(handle)

    @property
    def now_s(self) -> float:
        """True time."""
        return self.clock.now_ns / 1e9

    def time(self) -> float:
        """Time by the monotonic clock of the calling process."""
        return self.clock.monotonic()

    def call_soon(
        self, callback: Callable[[Unpack[Arguments]], object], *args: *Arguments, context: Context | None = None
    ) -> asyncio.Handle:
        handle = asyncio.Handle(callback, args, self, context)
        self._ready.append((handle, _process_of(context)))
        return handle

    def call_later(
        self,
        delay: float,
        callback: Callable[[Unpack[Arguments]], object],
        *args: *Arguments,
        context: Context | None = None,
    ) -> asyncio.TimerHandle:
        span_ns = running_clock.get().true_span_ns(round(delay * 1e9))
        return self._add_timer(self.clock.now_ns + span_ns, callback, args, context)

    def call_at(
        self,
        when: float,
        callback: Callable[[Unpack[Arguments]], object],
        *args: *Arguments,
        context: Context | None = None,
    ) -> asyncio.TimerHandle:
        return self._add_timer(running_clock.get().true_ns(round(when * 1e9)), callback, args, context)

    def _add_timer(
        self, due_ns: int, callback: Callable[..., object], args: tuple[Any, ...], context: Context | None
    ) -> asyncio.TimerHandle:
        handle = asyncio.TimerHandle(due_ns / 1e9, callback, args, self, context)
        self._num_timers += 1
        heappush(self._timers, (due_ns, self._num_timers, handle, _process_of(context)))
        return handle

    def create_future(self) -> "asyncio.Future[Any]":
        return asyncio.Future(loop=self)

    def create_task(self, coro: Any, *, name: str | None = None, context: Context | None = None) -> "asyncio.Task[Any]":
        task: asyncio.Task[Any] = asyncio.Task(coro, loop=self, name=name, context=context)
        process = _process_of(context)
        if process is not None:
            process.tasks.append(task)
        return task

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        if not self._is_over:
            self.faults.append(f"{context.get('message')}: {context.get('exception')!r}")

    def get_debug(self) -> bool:
        return False

    def is_running(self) -> bool:
        return True

    def is_closed(self) -> bool:
        return False

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """Leave a cancelled timer in the heap until it is due."""


def _process_of(context: Context | None) -> Process | None:
    return _process.get() if context is None else context.get(_process)


def new_loop(clock: VirtualClock, *, max_turns: int) -> VirtualLoop:
    """Make a loop without methods for the outside world, from readers to subprocesses."""
    return VirtualLoop(clock, max_turns=max_turns)  # type: ignore[abstract]
