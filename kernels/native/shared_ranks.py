"""Sums and joins over the ranks of a group whose processes share memory on one machine, in native code.

Calls are in the same order on all ranks, with the same numbers of rows; they can be part of a recorded pass. Knows rows
and ranks, no layers and no processes.
"""

import ctypes
import mmap
import os
import weakref
from collections.abc import Mapping
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from kernels.native.library import load_library
from kernels.native.program import JOIN, SUM, call

_LINE = 64
_LEAST_SLOT_BYTES = 4 << 20  # of rows that are exchanged at once
# As long as the passes of two ranks usually differ. A rank that shares its core with another one sleeps at once.
_SPIN_US = 200


class RankReduction(Protocol):
    """Exchange of rows between the ranks of a group: all call the same in the same order."""

    @property
    def rank(self) -> int:
        """Number of this rank, from 0."""

    @property
    def size(self) -> int:
        """Number of ranks."""

    @property
    def has_failed(self) -> bool:
        """True once a rank did not come in time: results are undefined from then on."""

    def sum_rows(self, x: Tensor) -> None:
        """Sum over all ranks, in place; in float32 in the order of the ranks, rounded once. x: [T, size]."""

    def join_columns(self, x: Tensor, out: Tensor) -> None:
        """Columns of all ranks side by side, on all of them.

        x:   [T, size of this rank's part]: an equal part of the columns, less for the last ranks
        out: [T, total]; may contain x in its place
        """

    def collect_columns(self, x: Tensor, out: Tensor | None, total: int) -> None:
        """The same on rank 0 alone, where `out` is; the other ranks give None. total: number of columns."""

    def fail(self) -> None:
        """End the waits of all ranks, for good."""


class RankMemory(NamedTuple):
    """Memory that the ranks of a group share."""

    fd: int  # of a file without a name
    slot_bytes: int


class SharedRanks:
    """A rank's view of the shared memory. One thread at a time may use it."""

    def __init__(
        self,
        memory: RankMemory,
        rank: int,
        size: int,
        *,
        timeout_s: float,
        num_cores: int | None = None,
        environment: Mapping[str, str] = os.environ,
    ) -> None:
        """Raises NativeUnavailableError if there are no native kernels. The memory must be zero before the first.

        `num_cores`: that the ranks may keep busy together; None: all on which this process may run.
        """
        self.rank, self.size = rank, size
        self._library = load_library(environment)
        self._memory = mmap.mmap(memory.fd, _num_bytes(self._library, size, memory.slot_bytes))
        begin = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        self._num_threads = torch.get_num_threads()
        num_cores = num_cores or len(os.sched_getaffinity(0))
        self.spin_us = _SPIN_US if size * self._num_threads <= num_cores else 0
        self._handle: int = self._library.quire_ranks_new(
            begin, rank, size, memory.slot_bytes, int(timeout_s * 1000), self.spin_us
        )
        weakref.finalize(self, self._library.quire_ranks_delete, self._handle)

    @property
    def has_failed(self) -> bool:
        """See RankReduction."""
        return bool(self._library.quire_ranks_failed(self._handle))

    @property
    def nanoseconds(self) -> int:
        """Time in all calls so far, with waiting."""
        return int(self._library.quire_ranks_nanoseconds(self._handle))

    @property
    def waited_nanoseconds(self) -> int:
        """Time in which this rank has waited for others."""
        return int(self._library.quire_ranks_waited_nanoseconds(self._handle))

    def sum_rows(self, x: Tensor) -> None:
        """See RankReduction."""
        if len(x):
            call(self._library, self._num_threads, SUM, x, x, first=self._handle, num_outputs=x.shape[1])

    def join_columns(self, x: Tensor, out: Tensor) -> None:
        """See RankReduction."""
        self._join(x, out, out.shape[1], to_all=True)

    def collect_columns(self, x: Tensor, out: Tensor | None, total: int) -> None:
        """See RankReduction."""
        self._join(x, x if out is None else out, total, to_all=False)

    def fail(self) -> None:
        """See RankReduction."""
        self._library.quire_ranks_fail(self._handle)

    def _join(self, x: Tensor, out: Tensor, total: int, *, to_all: bool) -> None:
        if not len(x):
            return
        call(
            self._library,
            self._num_threads,
            JOIN,
            x,
            out,
            first=self._handle,
            choice=to_all,
            num_inputs=x.shape[1],
            num_outputs=total,
        )


def make_memory(size: int, row_bytes: int, environment: Mapping[str, str] = os.environ) -> RankMemory:
    """Make memory for `size` ranks and rows of up to `row_bytes`. The system frees it with its last user.

    Raises NativeUnavailableError if there are no native kernels.
    """
    slot_bytes = max(_LEAST_SLOT_BYTES, -(-row_bytes // _LINE) * _LINE)
    fd = os.memfd_create("quire-ranks", os.MFD_CLOEXEC)
    os.ftruncate(fd, _num_bytes(load_library(environment), size, slot_bytes))
    return RankMemory(fd, slot_bytes)


def _num_bytes(library: ctypes.CDLL, size: int, slot_bytes: int) -> int:
    return int(library.quire_ranks_bytes(size, slot_bytes))
