"""Native kernels called by their operands, and a pass through a model as one call, recorded once and run again.

While a program is recorded, each kernel call also records its memory, strides and sizes, but not the number of rows.
Rows are all tokens of a pass, or, after the first GATHER, the wanted ones. The recording caller must keep all memory at
its address and compute with native kernels only.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from ctypes import CDLL, Structure, byref, c_float, c_int32, c_int64, c_void_p
from typing import Any

import torch
from torch import Tensor

PRODUCT, NORM, ACTIVATE, ROTATE, ATTEND, GATHER, EMBED, GREEDY, CHOOSE, SUM, JOIN, COPY = range(12)


class Operation(Structure):
    """`Operation` of src/kernels.h."""

    _fields_ = (
        ("kind", c_int32),
        ("of_wanted", c_int32),
        ("choice", c_int32),
        ("half", c_int32),
        ("gated", c_int32),
        ("number", c_float),
        ("x", c_void_p),
        ("x_stride", c_int64),
        ("out", c_void_p),
        ("out_stride", c_int64),
        ("num_inputs", c_int64),
        ("num_outputs", c_int64),
        ("first", c_void_p),
        ("second", c_void_p),
        ("third", c_void_p),
        ("query_norm", c_void_p),
        ("key_norm", c_void_p),
        ("first_stride", c_int64),
        ("finite", c_void_p),
        ("begin", c_int64),
    )


class Pass(Structure):
    """`Pass` of src/program.cpp."""

    _fields_ = (
        ("num_tokens", c_int64),
        ("num_wanted", c_int64),
        ("token_ids", c_void_p),
        ("positions", c_void_p),
        ("slots", c_void_p),
        ("wanted", c_void_p),
    )


# A pass below both limits takes about two milliseconds on one core.
SMALL_PASS_PRODUCTS = 1 << 26  # multiplications, with those of attention
SMALL_PASS_BYTES = 1 << 25  # of weights


class Program:
    """Operations in order. One thread at a time may run a program.

    If the threads have all cores, a small pass leaves one core free: the other work of a step takes as long as such a
    pass, and each would wait for the other.
    """

    def __init__(self, library: CDLL, num_threads: int, num_cores: int) -> None:
        self._library, self._num_threads = library, num_threads
        self.num_threads_if_small = max(1, min(num_threads, num_cores - 1))
        self._num_weights = 0  # multiplications per token
        self._num_attended = 0  # multiplications per token and key
        self._weight_bytes = 0
        self._operations: list[Operation] = []
        self._array: Any = None  # array of the operations, made at the first run
        self._of_wanted = False
        self._pass = Pass()

    def add(self, operation: Operation) -> None:
        """Record an operation. After a GATHER its rows are the wanted ones."""
        assert operation.x and operation.out, "tensors without rows have no address"
        self._of_wanted |= operation.kind == GATHER
        operation.of_wanted = self._of_wanted
        self._operations.append(operation)
        if operation.kind in (PRODUCT, CHOOSE):
            num_weights = operation.num_inputs * operation.num_outputs
            self._num_weights += num_weights
            self._weight_bytes += num_weights * _weight_itemsize(operation)
        elif operation.kind == ATTEND:
            self._num_attended += 2 * operation.num_inputs

    def run(
        self, token_ids: Tensor, positions: Tensor, slots: Tensor, wanted: Tensor | None, max_context_len: int
    ) -> None:
        """Run another pass.

        token_ids, positions, slots: [T] int64; wanted: [L] int64, the wanted tokens, or None for all
        max_context_len: most keys of any token
        """
        if self._array is None:
            self._array = (Operation * len(self._operations))(*self._operations)
        given = self._pass
        given.num_tokens = len(positions)
        given.num_wanted = len(positions) if wanted is None else len(wanted)
        given.token_ids, given.positions, given.slots = token_ids.data_ptr(), positions.data_ptr(), slots.data_ptr()
        given.wanted = address(wanted)
        num_products = given.num_tokens * (self._num_weights + max_context_len * self._num_attended)
        is_small = num_products < SMALL_PASS_PRODUCTS and self._weight_bytes < SMALL_PASS_BYTES
        num_threads = self.num_threads_if_small if is_small else self._num_threads
        self._library.quire_run(self._array, len(self._operations), byref(given), num_threads)


def _weight_itemsize(product: Operation) -> int:
    """Bytes of a weight: int8 if there are scales, else the dtype of the rows."""
    return 1 if product.second else 2 if product.half else 4


_recorded: Program | None = None


@contextmanager
def recording(program: Program) -> Iterator[None]:
    """Record every native kernel that this thread calls inside the `with` block."""
    global _recorded
    assert _recorded is None, "one at a time"
    _recorded = program
    try:
        yield
    finally:
        _recorded = None


def call(
    library: CDLL,
    num_threads: int,
    kind: int,
    x: Tensor,
    out: Tensor,
    *,
    token_ids: Tensor | None = None,
    positions: Tensor | None = None,
    slots: Tensor | None = None,
    rows: Tensor | None = None,
    **fields: Any,
) -> None:
    """Run one kernel on rows `x` [.., ..] into the rows `out`; `fields` are those of Operation that the kernel needs.

    positions, slots: [T] int64, for ROTATE; rows: [L] int64, for GATHER; token_ids: [T] int64, for EMBED
    """
    scale = x.element_size() if kind in (GATHER, EMBED, COPY) else 1
    operation = Operation(
        kind=kind,
        half=x.dtype == torch.bfloat16,
        x=x.data_ptr(),
        x_stride=x.stride(0) * scale,
        out=out.data_ptr(),
        out_stride=out.stride(0) * scale,
        **fields,
    )
    if _recorded is not None:
        _recorded.add(operation)
    num_tokens = len(out) if kind == EMBED else len(x)
    given = Pass(num_tokens, len(out), address(token_ids), address(positions), address(slots), address(rows))
    library.quire_run(byref(operation), 1, byref(given), num_threads)


def address(tensor: Tensor | None) -> int | None:
    """Address of the first element; None without a tensor."""
    return None if tensor is None else tensor.data_ptr()
