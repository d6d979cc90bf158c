"""A pass captured as CUDA graphs, one for each of several sizes; a batch is padded to the next size.

Launching the kernels of a step one by one takes longer than they run; a graph launches them all at once. The captured
pass must use fixed addresses. Without graphs, as on a CPU, a replay is a call.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Protocol

import torch

_FINEST = 16  # sizes below it are powers of two, those above multiples of it
_PADDING = 8  # in large batches at most about one row in so many is padding
_LEAST_TOKENS = 64  # of a pass with prompts: fewer take as long


def graph_sizes(max_rows: int) -> tuple[int, ...]:
    """Powers of two, then multiples of 16, farther apart from 256 on, up to the first that holds `max_rows`."""
    sizes = [1]
    while sizes[-1] < max_rows:
        last = sizes[-1]
        coarse = last // _PADDING // _FINEST * _FINEST
        sizes.append(last * 2 if last < _FINEST else last + max(_FINEST, coarse))
    return tuple(sizes)


def token_sizes(max_tokens: int) -> tuple[int, ...]:
    """Multiples of 64, farther apart from 1,024 on, up to the first multiple that holds `max_tokens`."""
    last = -(-max_tokens // _LEAST_TOKENS) * _LEAST_TOKENS
    sizes = [_LEAST_TOKENS]
    while sizes[-1] < last:
        coarse = sizes[-1] // _PADDING // _LEAST_TOKENS * _LEAST_TOKENS
        sizes.append(min(last, sizes[-1] + max(_LEAST_TOKENS, coarse)))
    return tuple(sizes)


class PassGraph(Protocol):
    """Work that was captured."""

    def replay(self) -> None:
        """Queue it on the current stream."""


class GraphMaker(Protocol):
    """Captures work. Of graphs that one maker captured, only one may be in use at a time: they share memory."""

    def capture(self, run: Callable[[], None]) -> PassGraph:
        """Capture what `run` queues; it may be called several times."""


class CudaGraphs:
    """Captures on a CUDA device. The largest should come first, so that the others find their memory in its pool."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = _capture_stream(device)
        self._num_warm_ups = 2  # before the first capture, which gives libraries their workspaces; later 1, for kernels

    def capture(self, run: Callable[[], None]) -> PassGraph:
        """See GraphMaker.capture."""
        self._warm_up(run)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
            run()
        captured: PassGraph = graph
        return captured

    def _warm_up(self, run: Callable[[], None]) -> None:
        """Run on the stream of the capture: a library must not allocate its memory for that stream during a capture."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            for _ in range(self._num_warm_ups):
                run()
        torch.cuda.synchronize(self._device)
        self._num_warm_ups = 1


class CapturedPass:
    """Graphs of `run(size)`, which computes a batch padded to `size`. For the execution thread alone."""

    def __init__(self, run: Callable[[int], None], sizes: Sequence[int]) -> None:
        self._run = run
        self._sizes = sorted(sizes)
        self._graphs: dict[int, PassGraph] = {}

    @property
    def largest(self) -> int:
        return self._sizes[-1]

    @property
    def captured_sizes(self) -> list[int]:
        """Sizes that have a graph, ascending."""
        return sorted(self._graphs)

    def size_for(self, number: int) -> int:
        """The least size that holds so many."""
        return self._sizes[bisect_left(self._sizes, number)]

    def capture(self, maker: GraphMaker, most: int | None = None) -> None:
        """Capture all sizes, or those of at most `most`, the largest first."""
        for size in reversed(self._sizes):
            if most is None or size <= most:
                self._graphs[size] = maker.capture(partial(self._run, size))

    def release(self) -> None:
        """Frees the graphs' memory; replays are calls from now on."""
        self._graphs.clear()

    def replay(self, size: int) -> bool:
        """Queue the pass at one of the sizes; True if by a graph."""
        graph = self._graphs.get(size)
        if graph is None:
            self._run(size)
            return False
        graph.replay()
        return True


@cache
def _capture_stream(device: torch.device) -> torch.cuda.Stream:
    """One stream for all captures of this process: libraries keep a workspace per stream, and the allocator does not
    give one stream the free memory of another.
    """
    return torch.cuda.Stream(device)
