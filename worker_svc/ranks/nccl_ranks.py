"""Sums and joins over ranks on GPUs: NCCL's collectives, queued on the current stream like a kernel.

The host waits for none of them, and a captured pass contains them. Sums are NCCL's, in the dtype of the rows: all ranks
have the same bits, which are not those of another number of ranks. Knows torch's process groups by what it calls.
"""

import threading
from typing import Any, Protocol

import torch
from torch import Tensor
from torch._C._distributed_c10d import AllgatherOptions, AllreduceOptions

_ABORT_S = 2.0  # for an abort, which may wait for a device that does not answer


class Collectives(Protocol):
    """The part of a process group of torch that ranks use: `ProcessGroupNCCL`."""

    def allreduce(self, tensors: list[Tensor], opts: AllreduceOptions) -> Any:
        """Sum of all ranks, in place. Returns None, or the work, for which the stream is to wait."""

    def _allgather_base(self, output: Tensor, input: Tensor, opts: AllgatherOptions) -> Any:
        """Inputs of all ranks, one behind the other, on all of them."""

    def abort(self) -> None:
        """End all collectives that run, on this rank."""


class NcclRanks:
    """A rank's connections to the others. A `RankReduction`."""

    def __init__(self, group: Collectives, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self.has_failed = False
        self._group = group
        # Not asynchronous: on the current stream, where a pass is captured, and not on one of the group's own.
        self._reduce, self._gather = AllreduceOptions(), AllgatherOptions()
        self._reduce.asyncOp = self._gather.asyncOp = False

    def warm_up(self, device: torch.device) -> None:
        """Exchange a row once with all ranks: what a first collective sets up cannot be set up in a capture."""
        row = torch.ones((1, self.size), device=device)
        self.sum_rows(row)
        self.join_columns(row[:, :1].clone(), row)

    def sum_rows(self, x: Tensor) -> None:
        """See RankReduction; in the dtype of x, in NCCL's order."""
        if len(x):
            assert x.is_contiguous(), "a collective needs its rows one behind the other"
            _on_stream(self._group.allreduce([x], self._reduce))

    def join_columns(self, x: Tensor, out: Tensor) -> None:
        """See RankReduction."""
        num_rows, total = out.shape
        if not num_rows:
            return
        width = -(-total // self.size)
        gathered = x.new_empty((self.size * num_rows, width))
        _on_stream(self._group._allgather_base(gathered, self._padded(x, width), self._gather))
        parts = gathered.view(self.size, num_rows, width)
        if self.size * width == total:
            out.view(num_rows, self.size, width).copy_(parts.transpose(0, 1))
            return
        for begin, part in zip(range(0, total, width), parts, strict=False):
            out[:, begin : begin + width].copy_(part[:, : total - begin])

    def collect_columns(self, x: Tensor, out: Tensor | None, total: int) -> None:
        """See RankReduction. All ranks get the columns, since NCCL gathers on one by as many messages."""
        self.join_columns(x, x.new_empty((len(x), total)) if out is None else out)

    def fail(self) -> None:
        """See RankReduction. The kernels of this rank end; the other ranks see that this process ends."""
        self.has_failed = True
        aborting = threading.Thread(target=self._group.abort, name="abort", daemon=True)
        aborting.start()
        aborting.join(_ABORT_S)

    def _padded(self, x: Tensor, width: int) -> Tensor:
        """Columns of this rank with zeros behind them: parts have the same size on the wire."""
        if x.shape[1] == width:
            return x.contiguous()
        padded = x.new_zeros((len(x), width))
        padded[:, : x.shape[1]].copy_(x)
        return padded


def _on_stream(work: Any) -> None:
    """Have the current stream wait for a collective, if it was queued on another one; the host goes on."""
    if work is not None:
        work.wait()
