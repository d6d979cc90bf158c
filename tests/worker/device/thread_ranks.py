"""Ranks of a group as threads of one process: their collectives meet in memory, and all that NCCL would see is kept.

What a rank asks of its process group is what it asks of torch's `ProcessGroupNCCL`. A collective that another rank does
not come to fails after a while, as it would hang there.
"""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from tests.patience import patient
from tests.worker.device.recorded_graphs import RecordedGraphs
from worker_svc.ranks.nccl_ranks import NcclRanks

T = TypeVar("T")
_MEET_S = 20.0


class CollectiveCall(NamedTuple):
    """A call of a process group, as it must be equal on all ranks."""

    name: str
    shape: tuple[int, ...]  # of this rank's rows
    dtype: torch.dtype
    is_captured: bool


class Meeting:
    """Memory and a barrier that the ranks share."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.barrier = threading.Barrier(size, timeout=patient(_MEET_S))
        self.rows: list[Tensor | None] = [None] * size

    def exchange(self, rank: int, own: Tensor) -> list[Tensor]:
        """Copies of all ranks' rows."""
        self.rows[rank] = own.clone()
        self.barrier.wait()
        every = [each for each in self.rows if each is not None]
        self.barrier.wait()  # nobody brings new rows before all have taken these
        assert len({(each.shape, each.dtype) for each in every}) == 1, "ranks are at different places"
        return every


class ThreadCollectives:
    """One rank's process group. A `Collectives`; with `graphs` its calls are part of captured passes."""

    def __init__(self, meeting: Meeting, rank: int, graphs: RecordedGraphs | None) -> None:
        self.calls: list[CollectiveCall] = []
        self.num_met = 0  # with replays
        self._meeting, self._rank, self._graphs = meeting, rank, graphs
        self._sum = self._join_graph(self._sum_rows)
        self._gather = self._join_graph(self._gather_rows)

    def allreduce(self, tensors: list[Tensor], opts: Any) -> None:
        """See Collectives."""
        (rows,) = tensors
        self._keep("sum", rows, opts)
        self._sum(rows)

    def _allgather_base(self, output: Tensor, input: Tensor, opts: Any) -> None:
        num_rows, width = input.shape
        assert output.shape == (self._meeting.size * num_rows, width), "an output has room for all ranks"
        self._keep("gather", input, opts)
        self._gather(output, input)

    def abort(self) -> None:
        """See Collectives."""
        self._meeting.barrier.abort()

    def _keep(self, name: str, rows: Tensor, opts: Any) -> None:
        assert rows.is_contiguous(), "NCCL takes rows that lie one behind the other"
        assert not opts.asyncOp, "on the current stream, in which a pass is captured"
        is_captured = self._graphs is not None and self._graphs.is_capturing
        self.calls.append(CollectiveCall(name, tuple(rows.shape), rows.dtype, is_captured))

    def _join_graph(self, collective: Callable[..., object]) -> Callable[..., object]:
        return collective if self._graphs is None else self._graphs.recorded(collective)

    def _sum_rows(self, rows: Tensor) -> None:
        self.num_met += 1
        rows.copy_(torch.stack(self._meeting.exchange(self._rank, rows)).float().sum(dim=0))

    def _gather_rows(self, output: Tensor, own: Tensor) -> None:
        self.num_met += 1
        output.copy_(torch.cat(self._meeting.exchange(self._rank, own)))


def on_all_ranks(
    size: int, work: Callable[[NcclRanks, ThreadCollectives, RecordedGraphs], T]
) -> tuple[list[T], list[ThreadCollectives]]:
    """Call `work` for all ranks at the same time; its results, and the ranks' process groups."""
    meeting, graphs = Meeting(size), [RecordedGraphs() for _ in range(size)]
    groups = [ThreadCollectives(meeting, rank, each) for rank, each in enumerate(graphs)]

    def run(rank: int) -> T:
        torch.set_num_threads(1)
        try:
            return work(NcclRanks(groups[rank], rank, size), groups[rank], graphs[rank])
        except BaseException:
            meeting.barrier.abort()
            raise

    with ThreadPoolExecutor(size) as threads:
        futures = [threads.submit(run, rank) for rank in range(size)]
        errors = [error for each in futures if (error := each.exception()) is not None]
        for error in sorted(errors, key=_is_broken_meeting):
            raise error
        return [each.result() for each in futures], groups


def collectives_of(groups: Sequence[ThreadCollectives]) -> list[CollectiveCall]:
    """The calls, which must be the same on all ranks and in the same order."""
    first, *others = (each.calls for each in groups)
    for each in others:
        assert each == first, "ranks call different collectives: NCCL would hang"
    assert len({each.num_met for each in groups}) == 1
    return first


def _is_broken_meeting(error: BaseException) -> bool:
    """Other errors tell more."""
    return isinstance(error, threading.BrokenBarrierError)
