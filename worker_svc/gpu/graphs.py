"""A pass captured as CUDA graphs, one for each of several batch sizes; a batch is padded to the next size.

Launching the kernels of a decode step one by one takes longer than they run; a graph launches them all at once. The
captured pass must use fixed addresses. On a CPU a replay is a call.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from functools import cache

import torch

_FINEST = 16  # sizes below it are powers of two, those above multiples of it
_PADDING = 8  # in large batches at most about one row in so many is padding
_NUM_WARM_UPS = 2  # before a capture, so that kernels are compiled and libraries have their workspaces


def graph_sizes(max_rows: int) -> tuple[int, ...]:
    """Powers of two, then multiples of 16, farther apart from 256 on, up to the first that holds `max_rows`."""
    sizes = [1]
    while sizes[-1] < max_rows:
        last = sizes[-1]
        coarse = last // _PADDING // _FINEST * _FINEST
        sizes.append(last * 2 if last < _FINEST else last + max(_FINEST, coarse))
    return tuple(sizes)


class CapturedPass:
    """Graphs of `run(size)`, which computes a batch padded to `size` rows. For the execution thread alone."""

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
        """Capture all sizes, the largest first, so that the others find their memory in its pool. No-op on a CPU.

        sharing: a pass to share the pool with, since only one graph is replayed at a time.
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
        """Frees the graphs' memory; replays are calls from now on."""
        self._graphs.clear()

    def replay(self, size: int) -> None:
        """Queues the pass at one of the sizes."""
        graph = self._graphs.get(size)
        if graph is None:
            self._run(size)
        else:
            graph.replay()

    def _warm_up(self, size: int, stream: torch.cuda.Stream) -> None:
        """Run on the stream of the capture: a library must not allocate its memory for that stream during a capture."""
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            for _ in range(_NUM_WARM_UPS):
                self._run(size)
        torch.cuda.synchronize(self._device)


@cache
def _capture_stream(device: torch.device) -> torch.cuda.Stream:
    """One stream for all captures of this process: libraries keep a workspace per stream, and the allocator does not
    give one stream the free memory of another.
    """
    return torch.cuda.Stream(device)
