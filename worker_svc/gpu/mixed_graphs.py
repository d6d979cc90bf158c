"""Graphs of passes with chunks of prompts, at padded numbers of tokens, and the memory of their results.

Decides whether a batch is padded to a graph, and says why not. Attention looks only at real rows, so padding costs
products alone.
"""

from bisect import bisect_left
from collections.abc import Callable

import torch
from torch import Tensor

from worker_svc.gpu.graphs import CapturedPass, GraphMaker, token_sizes
from worker_svc.gpu.mixed_batch import MixedSize
from worker_svc.gpu.pass_counts import GraphKind, NoGraph

_MOST_PADDED = 2  # times its tokens: a batch is not padded to more


class MixedGraphs:
    """Graphs of `run`, which queues a pass of some size and returns hidden states. For the execution thread alone."""

    def __init__(
        self,
        run: Callable[[MixedSize], Tensor],
        work_room: Callable[[int], int],
        *,
        max_rows: int,
        max_tokens: int,
    ) -> None:
        """`work_room` gives the work of prefill attention that a graph of so many tokens has room for."""
        self._run = run
        self._sizes = {
            num_tokens: MixedSize(
                num_tokens=num_tokens,
                num_rows=min(num_tokens, max_rows),
                num_decode=min(num_tokens, max_rows),
                num_work=work_room(num_tokens),
            )
            for num_tokens in token_sizes(max_tokens)
        }
        self._captured = CapturedPass(self._run_and_keep, list(self._sizes))
        self._tokens: list[int] = []  # of the graphs, ascending
        self._kept: Tensor | None = None  # [most tokens, hidden_size]: results of all graphs

    @property
    def smallest(self) -> MixedSize:
        return next(iter(self._sizes.values()))

    def sizes_up_to(self, most: int | None) -> list[MixedSize]:
        """Sizes of at most `most` tokens, ascending; None: all."""
        return [size for size in self._sizes.values() if most is None or size.num_tokens <= most]

    def capture(self, maker: GraphMaker, most: int | None) -> None:
        """Captures the sizes of at most `most` tokens, the largest first."""
        chosen = self.sizes_up_to(most)
        if not chosen:
            return
        self._kept = torch.empty_like(self._run(chosen[-1]))
        self._captured.capture(maker, chosen[-1].num_tokens)
        self._tokens = self._captured.captured_sizes

    def release(self) -> None:
        """Drops the graphs and the memory of their results."""
        self._captured.release()
        self._tokens, self._kept = [], None

    def choose(self, exact: MixedSize) -> tuple[MixedSize, GraphKind | NoGraph]:
        """The size of the least graph that holds a batch; without one the batch's own size, and the reason."""
        if not self._tokens:
            return exact, NoGraph.NO_GRAPHS
        first = bisect_left(self._tokens, exact.num_tokens)
        if first == len(self._tokens):
            return exact, NoGraph.TOO_MANY_TOKENS
        for num_tokens in self._tokens[first:]:
            if num_tokens > max(self._tokens[first], _MOST_PADDED * exact.num_tokens):
                break
            if self._sizes[num_tokens].num_work >= exact.num_work:
                return self._sizes[num_tokens], GraphKind.MIXED
        return exact, NoGraph.MANY_SHORT_CHUNKS

    def replay(self, size: MixedSize) -> Tensor:
        """Queues the graph of a size; the results are valid until the next replay."""
        assert self._kept is not None, "no graph was captured"
        self._captured.replay(size.num_tokens)
        return self._kept[: size.num_tokens]

    def _run_and_keep(self, num_tokens: int) -> None:
        assert self._kept is not None
        self._kept[:num_tokens].copy_(self._run(self._sizes[num_tokens]))
