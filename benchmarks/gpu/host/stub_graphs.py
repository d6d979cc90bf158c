"""Graphs whose replay does nothing, as a launch of the stub driver does."""

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(slots=True)
class StubGraphs:
    """Captures by running a pass once, which compiles its kernels, and counts replays."""

    num_captured: int = 0
    num_replays: int = 0

    def capture(self, run: Callable[[], None]) -> "StubGraph":
        """See GraphMaker.capture."""
        run()
        self.num_captured += 1
        return StubGraph(self)


@dataclass(frozen=True, slots=True)
class StubGraph:
    """One captured pass."""

    maker: StubGraphs

    def replay(self) -> None:
        """Count, and do nothing."""
        self.maker.num_replays += 1
