"""Spans of named stages in one process: noted around calls as they are, written to a file, read back.

All moments are of one machine's monotonic clock, in nanoseconds, so that those of several processes can be compared.
Knows no stage by name; `client_probes`, `scheduler_probes` and `worker_probes` say where they are.
"""

import time
from array import array
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, NamedTuple, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class Span(NamedTuple):
    """One call. `step_id` is 0 where the call is of no certain step."""

    stage: str
    step_id: int
    began_ns: int
    ended_ns: int


class SpanLog:
    """Spans in the order of their ends. Costs about half a microsecond a span, besides the call."""

    def __init__(self) -> None:
        self._stages: list[str] = []
        self._numbers = array("q")

    def add(self, stage: str, step_id: int, began_ns: int, ended_ns: int) -> None:
        self._numbers.extend((self._number_of(stage), step_id, began_ns, ended_ns))

    def timed(
        self, stage: str, call: Callable[P, T], step_id_of: Callable[[tuple[Any, ...], T], int] | None = None
    ) -> Callable[P, T]:
        """The call with a span around it. `step_id_of` is given its positional arguments and its result."""
        number, extend, now_ns = self._number_of(stage), self._numbers.extend, time.perf_counter_ns

        def timed(*arguments: P.args, **keywords: P.kwargs) -> T:
            began_ns = now_ns()
            result = call(*arguments, **keywords)
            ended_ns = now_ns()
            extend((number, 0 if step_id_of is None else step_id_of(arguments, result), began_ns, ended_ns))
            return result

        return timed

    def timed_wait(self, stage: str, call: Callable[P, Awaitable[T]]) -> Callable[P, Awaitable[T]]:
        """Time a coroutine like `timed`: from its call to its result, with everything that it waits for."""

        async def timed(*arguments: P.args, **keywords: P.kwargs) -> T:
            began_ns = time.perf_counter_ns()
            result = await call(*arguments, **keywords)
            self.add(stage, 0, began_ns, time.perf_counter_ns())
            return result

        return timed

    def wrap(
        self,
        owner: object,
        name: str,
        stage: str,
        step_id_of: Callable[[tuple[Any, ...], Any], int] | None = None,
    ) -> None:
        """Puts `timed` in the place of a function of a module, or of a method of a class."""
        setattr(owner, name, self.timed(stage, getattr(owner, name), step_id_of))

    @property
    def spans(self) -> list[Span]:
        return _spans(self._stages, self._numbers)

    def write(self, path: Path) -> None:
        path.write_bytes("\n".join(self._stages).encode() + b"\0" + self._numbers.tobytes())

    def _number_of(self, stage: str) -> int:
        if stage not in self._stages:
            self._stages.append(stage)
        return self._stages.index(stage)


def read_spans(path: Path) -> list[Span]:
    """Read the file that `SpanLog.write` wrote."""
    names, _, data = path.read_bytes().partition(b"\0")
    stages = names.decode().split("\n")
    numbers = array("q")
    numbers.frombytes(data)
    return _spans(stages, numbers)


def _spans(stages: list[str], numbers: "array[int]") -> list[Span]:
    fours = zip(*[iter(numbers)] * 4, strict=True)
    return [Span(stages[stage], step_id, began_ns, ended_ns) for stage, step_id, began_ns, ended_ns in fours]


def span_cost_ns() -> int:
    """Measure the cost of a span to the code around it: the shortest of some batches of empty ones."""
    num_calls, best_ns = 1000, 1 << 62
    for _ in range(20):
        timed = SpanLog().timed("empty", _nothing)
        began_ns = time.perf_counter_ns()
        for _ in range(num_calls):
            timed()
        best_ns = min(best_ns, time.perf_counter_ns() - began_ns)
    return best_ns // num_calls


def _nothing() -> None: ...
