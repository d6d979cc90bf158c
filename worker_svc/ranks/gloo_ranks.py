"""Sums and joins over ranks that share no memory: on several machines, or without native kernels. Gloo over TCP.

Each rank gets the rows of all and adds them itself, in float32 in the order of the ranks, so that all have the same
bits, as with shared memory. A recorded pass cannot contain these calls.
"""

import datetime
import os
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import ProcessGroupGloo

from worker_svc.ranks.rank_store import RankStore


class GlooRanks:
    """A rank's connections to the others. A `RankReduction`."""

    def __init__(self, store: RankStore, rank: int, size: int, *, timeout_s: float, on_one_machine: bool) -> None:
        """Connects to all ranks, which must do so at the same time. Raises RuntimeError.

        Calls raise RuntimeError if a rank does not come within `timeout_s`.
        """
        self.rank, self.size = rank, size
        self.has_failed = False
        if on_one_machine:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        self._group: Any = ProcessGroupGloo(store.store, rank, size, datetime.timedelta(seconds=timeout_s))

    def sum_rows(self, x: Tensor) -> None:
        """See RankReduction."""
        if not len(x):
            return
        first, *others = self._gather(x.contiguous())
        total = first.float()
        for each in others:
            total += each
        x.copy_(total)

    def join_columns(self, x: Tensor, out: Tensor) -> None:
        """See RankReduction."""
        if len(x):
            parts = self._gather(self._padded(x, out.shape[1]))
            out.copy_(torch.cat(parts, dim=1)[:, : out.shape[1]])

    def collect_columns(self, x: Tensor, out: Tensor | None, total: int) -> None:
        """See RankReduction."""
        if not len(x):
            return
        own = self._padded(x, total)
        parts = [torch.empty_like(own) for _ in range(self.size)] if out is not None else []
        self._group.gather([[_as_bytes(each) for each in parts]] if parts else [], [_as_bytes(own)]).wait()
        if out is not None:
            out.copy_(torch.cat(parts, dim=1)[:, :total])

    def fail(self) -> None:
        """See RankReduction. The other ranks see that this process ends."""
        self.has_failed = True

    def _padded(self, x: Tensor, total: int) -> Tensor:
        """Part of `total` columns that this rank has, in memory of its own; parts have the same size on the wire."""
        own = x.new_zeros(len(x), -(-total // self.size))
        own[:, : x.shape[1]] = x
        return own

    def _gather(self, x: Tensor) -> list[Tensor]:
        """The rows of all ranks."""
        parts = [torch.empty_like(x) for _ in range(self.size)]
        self._group.allgather([[_as_bytes(each) for each in parts]], [_as_bytes(x)]).wait()
        return parts


def _as_bytes(x: Tensor) -> Tensor:
    """The memory of a contiguous tensor: bytes are passed on in any dtype."""
    return x.view(torch.uint8)
