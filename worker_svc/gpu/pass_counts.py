"""Counts of passes by how they were launched: as one graph, by kind, or kernel by kernel, by reason.

Written by the execution thread, read by any other.
"""

from collections import Counter
from enum import StrEnum


class GraphKind(StrEnum):
    """Kind of a pass that was one graph."""

    DECODE = "decode"  # every row has one token
    SHARED_PREFIX = "shared_prefix"  # every row has one token, and rows attend to a common prefix together
    MIXED = "mixed"  # with chunks of prompts, beside which rows of one token may share a prefix


class NoGraph(StrEnum):
    """Reason why a pass was launched kernel by kernel."""

    NO_GRAPHS = "no_graphs"  # none were captured: a CPU, or graphs are off
    TOO_MANY_TOKENS = "too_many_tokens"  # more than the largest graph that the memory allowed
    MANY_SHORT_CHUNKS = "many_short_chunks"  # they would be padded to more than twice their tokens


class PassCounts:
    """One per runner."""

    def __init__(self) -> None:
        self._graphs = Counter(dict.fromkeys(GraphKind, 0))
        self._no_graphs = Counter(dict.fromkeys(NoGraph, 0))

    @property
    def by_graph(self) -> dict[str, int]:
        """Passes that were one graph, by kind."""
        return dict(self._graphs.items())

    @property
    def by_kernels(self) -> dict[str, int]:
        """Passes that were launched kernel by kernel, by reason."""
        return dict(self._no_graphs.items())

    def record(self, how: GraphKind | NoGraph) -> None:
        """Count one pass."""
        if isinstance(how, GraphKind):
            self._graphs[how] += 1
        else:
            self._no_graphs[how] += 1
