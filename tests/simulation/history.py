"""History of a run: each event enters a digest and is printed on request; violations of promises are kept.

Also where the log of production code ends: an exception that it caught and logged is a violation.
"""

import sys
import traceback
from collections import Counter
from hashlib import blake2b
from typing import Any, cast

import structlog

from tests.simulation.machine_clocks import START_NS, VirtualClock

MAX_VIOLATIONS = 20


class History:
    """History of one run. Two runs with the same digest had the same events in the same order at the same times."""

    def __init__(self, clock: VirtualClock, *, is_traced: bool) -> None:
        self.violations: list[str] = []
        self.num_events = 0
        self.effects: Counter[str] = Counter()  # what faults came to, which they may do or not
        self._clock = clock
        self._is_traced = is_traced
        self._digest = blake2b(digest_size=16)

    @property
    def digest(self) -> str:
        return self._digest.hexdigest()

    @property
    def now_s(self) -> float:
        return self._clock.now_ns / 1e9

    @property
    def is_traced(self) -> bool:
        return self._is_traced

    def note(self, event: str) -> None:
        self.num_events += 1
        line = f"{self._clock.now_ns - START_NS} {event}"
        self._digest.update(line.encode())
        if self._is_traced:
            self.say(event)

    def count(self, effect: str) -> None:
        """Count an effect that a fault is meant to have."""
        self.note(effect)
        self.effects[effect] += 1

    def violate(self, sentence: str) -> None:
        """A promise is broken. The run goes on, and has failed."""
        self.note(f"VIOLATION {sentence}")
        if len(self.violations) < MAX_VIOLATIONS:
            self.violations.append(f"at {(self._clock.now_ns - START_NS) / 1e9:.6f} s: {sentence}")

    def say(self, text: str) -> None:
        """Write text to the trace alone."""
        sys.stdout.write(f"{(self._clock.now_ns - START_NS) / 1e9:11.6f} {text}\n")


class _Sink:
    """Loggers are made once per module, histories once per run: here they meet."""

    history: History | None = None


class _Logger:
    """Logger with the methods that production code calls on structlog's."""

    def __init__(self, logger: Any, processors: Any, context: Any) -> None:
        """Accept the arguments that structlog passes."""

    def bind(self, **_: Any) -> "_Logger":
        return self

    def debug(self, event: str, **fields: Any) -> None:
        _say("", event, fields)

    def info(self, event: str, **fields: Any) -> None:
        _say("", event, fields)

    def warning(self, event: str, **fields: Any) -> None:
        _say("WARNING ", event, fields)

    def error(self, event: str, **fields: Any) -> None:
        _say("ERROR ", event, fields)

    def critical(self, event: str, **fields: Any) -> None:
        _say("CRITICAL ", event, fields)

    def exception(self, event: str, **fields: Any) -> None:
        if _Sink.history is not None:
            _Sink.history.violate(f"the scheduler caught an exception: {event} {fields}: {_innermost()}")
            if _Sink.history.is_traced:
                _Sink.history.say(traceback.format_exc())


def keep_log(history: History | None) -> None:
    """Send the log of production code to this history."""
    _Sink.history = history
    structlog.configure(wrapper_class=cast(Any, _Logger), processors=[], cache_logger_on_first_use=True)


def _say(level: str, event: str, fields: dict[str, Any]) -> None:
    history = _Sink.history
    if history is not None and history.is_traced:
        history.say(f"{level}log: {event} {fields}")


def _innermost() -> str:
    kind, error, trace = sys.exc_info()
    frame = traceback.extract_tb(trace)[-1] if trace is not None else None
    where = f" in {frame.filename.rpartition('/')[2]}:{frame.lineno}" if frame is not None else ""
    return f"{kind.__name__ if kind else None}: {error}{where}"
