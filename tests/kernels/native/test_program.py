"""Recorded passes: by how many threads each is computed."""

from typing import Any

import pytest
import torch

from kernels.native.program import (
    ATTEND,
    CHOOSE,
    NORM,
    PRODUCT,
    SMALL_PASS_BYTES,
    SMALL_PASS_PRODUCTS,
    Operation,
    Program,
)


class CountingLibrary:
    """Computes nothing, and keeps by how many threads it was to be done."""

    def __init__(self) -> None:
        self.num_threads: list[int] = []

    def quire_run(self, operations: Any, count: int, given: Any, num_threads: int) -> None:
        self.num_threads.append(num_threads)


def threads_of(
    num_rows: int, num_weights: int, *, context: int = 1, num_threads: int = 4, num_cores: int = 4, **product: Any
) -> int:
    """Number of threads for a pass of these sizes; half of the weights are the head's, queries have 512 numbers."""
    library: Any = CountingLibrary()
    program = Program(library, num_threads, num_cores)
    program.add(Operation(kind=NORM, x=1, out=1, num_outputs=1 << 40))
    program.add(Operation(kind=ATTEND, x=1, out=1, num_inputs=512))
    for kind in (PRODUCT, CHOOSE):
        program.add(Operation(kind=kind, x=1, out=1, num_inputs=num_weights // 2, num_outputs=1, **product))
    rows = torch.zeros(num_rows, dtype=torch.int64)
    program.run(rows, rows, rows, None, context)
    return int(library.num_threads[0])


def test_a_small_pass_leaves_a_core_where_its_threads_have_all() -> None:
    assert threads_of(8, 1 << 20) == 3
    assert threads_of(8, 1 << 20, num_threads=6) == 3
    assert threads_of(8, 1 << 20, num_threads=3) == 3
    assert threads_of(8, 1 << 20, num_threads=2, num_cores=16) == 2
    assert threads_of(8, 1 << 20, num_threads=1, num_cores=1) == 1


def test_a_pass_of_many_rows_has_all_threads() -> None:
    assert threads_of(SMALL_PASS_PRODUCTS >> 20, 1 << 20) == 4
    assert threads_of((SMALL_PASS_PRODUCTS >> 20) - 1, 1 << 20) == 3


def test_a_pass_over_long_contexts_has_all_threads() -> None:
    context = (SMALL_PASS_PRODUCTS - (1 << 20)) // 1024
    assert threads_of(1, 1 << 20, context=context) == 4
    assert threads_of(1, 1 << 20, context=context - 1) == 3


@pytest.mark.parametrize(("itemsize", "product"), [(4, {}), (2, {"half": True}), (1, {"half": True, "second": 1})])
def test_a_pass_through_many_weights_has_all_threads(itemsize: int, product: dict[str, int]) -> None:
    num_weights = SMALL_PASS_BYTES // itemsize
    assert threads_of(1, num_weights, **product) == 4
    assert threads_of(1, num_weights - 2, **product) == 3
