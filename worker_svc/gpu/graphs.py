"""A pass captured as CUDA graphs, one for each of some batch sizes, and replayed at the next larger one.

Launching the kernels of a decode step one by one would take longer than they run; a graph launches them all at once.
What is captured reads and writes at fixed places, which is its own care. On a CPU a replay is a call.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from functools import cache

import torch

_FINEST = 16  # below it powers of two, from there on multiples of it
_PADDING = 8  # at most about one row in so many is padding, where batches are large
_NUM_WARM_UPS = 2  # before a capture: kernels are compiled and libraries take their workspaces


def graph_sizes(max_rows: int) -> tuple[int, ...]:
    """Powers of two, then multiples of 16, farther apart from 256 on, up to the first that holds `max_rows`."""
    sizes = [1]
    while sizes[-1] < max_rows:
        last = sizes[-1]
        coarse = last // _PADDING // _FINEST * _FINEST
        sizes.append(last * 2 if last < _FINEST else last + max(_FINEST, coarse))
    return tuple(sizes)


class CapturedPass:
    """`run(size)` computes a batch padded to `size` rows. Of the thread that executes steps."""

    def __init__(self, run: Callable[[int], None], sizes: Sequence[int], device: torch.device) -> None:
        self._run = run
        self._sizes = sorted(sizes)
        self._device = device
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}

    @property
    def max_rows(self) -> int:
        return self._sizes[-1]

    def size_for(self, num_rows: int) -> int:
        """The least size that holds the rows."""
        return self._sizes[bisect_left(self._sizes, num_rows)]

    def capture(self, sharing: "CapturedPass | None" = None) -> None:
        """All sizes, the largest first, so that the others find their memory in its pool. Nothing on a CPU.

        The pool may be shared with another pass, since only one graph is replayed at a time.
        """
        if self._device.type != "cuda":
            return
        graphs = {} if sharing is None else dict(sharing._graphs)
        stream = _capture_stream(self._device)
        for size in reversed(self._sizes):
            self._warm_up(size, stream)
            pool = next((graph.pool() for graph in graphs.values()), None)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool, stream=stream):
                self._run(size)
            graphs[size] = self._graphs[size] = graph

    def release(self) -> None:
        """Gives the graphs' memory back; replays are calls from now on."""
        self._graphs.clear()

    def replay(self, size: int) -> None:
        """Queues the pass at one of the sizes."""
        graph = self._graphs.get(size)
        if graph is None:
            self._run(size)
        else:
            graph.replay()

    def _warm_up(self, size: int, stream: torch.cuda.Stream) -> None:
        """On the stream of the capture: what a library allocates for a stream must not be met first there."""
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            for _ in range(_NUM_WARM_UPS):
                self._run(size)
        torch.cuda.synchronize(self._device)


@cache
def _capture_stream(device: torch.device) -> torch.cuda.Stream:
    """One for all captures of this process: libraries keep a workspace for each stream for good, and what one stream
    left free in a pool, the allocator does not give to another.
    """
    return torch.cuda.Stream(device)
