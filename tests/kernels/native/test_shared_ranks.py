"""Sums and joins over shared memory: the same bits on all ranks, whatever the sizes, and an end of all waits.

Ranks are threads here, each with a mapping of its own, as processes have.
"""

import os
import threading
import time
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from kernels.native.shared_ranks import RankMemory, SharedRanks, make_memory

SLOT_BYTES = 4 << 20
LONG_S = 60.0


@pytest.fixture
def memory() -> Iterator[RankMemory]:
    memory = make_memory(4, 64)
    assert memory.slot_bytes == SLOT_BYTES
    yield memory
    os.close(memory.fd)


def on_all(memory: RankMemory, size: int, work: Callable[[SharedRanks], None]) -> None:
    """Call `work` for each rank at the same time; raise what one of them raises."""
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            work(SharedRanks(memory, rank, size, timeout_s=LONG_S))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def inputs(size: int, num_rows: int, num_columns: int, dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(num_rows * num_columns)
    return [torch.randn(num_rows, num_columns, generator=generator).to(dtype) for _ in range(size)]


def ordered_sum(parts: list[Tensor]) -> Tensor:
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part.float()
    return total.to(parts[0].dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [2, 4])
def test_sums_are_in_float32_in_the_order_of_the_ranks(memory: RankMemory, size: int, dtype: torch.dtype) -> None:
    """Rows apart from one another, odd sizes, and more rows than a slot holds."""
    shapes = [(1, 1), (3, 17), (32, 768), (5, 63), (1500, 1025), (0, 8), (2, 16)]
    cases = [inputs(size, *shape, dtype) for shape in shapes]

    def work(ranks: SharedRanks) -> None:
        for parts in cases:
            num_rows, num_columns = parts[0].shape
            rows = torch.full((num_rows, num_columns + 5), 7.0, dtype=dtype)
            x = rows[:, :num_columns]
            x.copy_(parts[ranks.rank])
            ranks.sum_rows(x)
            assert torch.equal(x, ordered_sum(parts))
            assert (rows[:, num_columns:] == 7.0).all()

    on_all(memory, size, work)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [2, 4])
def test_columns_are_joined_on_all_ranks_or_on_the_first(memory: RankMemory, size: int, dtype: torch.dtype) -> None:
    """The last rank has fewer columns where they do not divide."""
    cases = [inputs(1, num_rows, total, dtype)[0] for num_rows, total in [(3, 211), (1, 64), (900, 5003), (0, 12)]]

    def work(ranks: SharedRanks) -> None:
        for whole in cases:
            total = whole.shape[1]
            part = -(-total // size)
            own = slice(ranks.rank * part, min(total, (ranks.rank + 1) * part))
            out = torch.zeros_like(whole)
            ranks.join_columns(whole[:, own].contiguous(), out)
            assert torch.equal(out, whole)
            first = torch.zeros_like(whole)
            x = first[:, own] if ranks.rank == 0 else whole[:, own].contiguous()  # in its place on rank 0
            x.copy_(whole[:, own])
            ranks.collect_columns(x, first if ranks.rank == 0 else None, total)
            assert ranks.rank or torch.equal(first, whole)

    on_all(memory, size, work)


def test_ranks_that_run_apart_do_not_overwrite_what_others_still_read(memory: RankMemory) -> None:
    """Rank 1 sends and never waits, so it is ahead of the others by as many rounds as they let it."""
    num_rounds = 300

    def work(ranks: SharedRanks) -> None:
        for number in range(num_rounds):
            x = torch.full((4, 8), float(number * 10 + ranks.rank))
            out = torch.zeros(4, 24) if ranks.rank == 0 else None
            ranks.collect_columns(x, out, 24)
            if out is not None:
                expected = torch.tensor([float(number * 10 + rank) for rank in range(3)]).repeat_interleave(8)
                assert torch.equal(out, expected.expand(4, 24))
                if number % 50 == 0:
                    time.sleep(0.002)

    on_all(memory, 3, work)


def test_a_rank_that_does_not_come_fails_the_group(memory: RankMemory) -> None:
    alone = SharedRanks(memory, 0, 2, timeout_s=0.3)
    assert not alone.has_failed
    began_s = time.monotonic()
    alone.sum_rows(torch.ones(1, 4))
    assert time.monotonic() - began_s >= 0.3
    assert alone.has_failed
    late = SharedRanks(memory, 1, 2, timeout_s=LONG_S)
    late.sum_rows(torch.ones(1, 4))  # at once: the group has ended
    assert late.has_failed


def test_a_failure_ends_the_waits_of_all(memory: RankMemory) -> None:
    waiting = SharedRanks(memory, 0, 2, timeout_s=LONG_S)
    thread = threading.Thread(target=waiting.sum_rows, args=(torch.ones(1, 4),))
    thread.start()
    SharedRanks(memory, 1, 2, timeout_s=LONG_S).fail()
    thread.join(LONG_S / 2)
    assert not thread.is_alive()
    assert waiting.has_failed


def test_a_rank_sleeps_at_once_where_the_ranks_may_not_all_compute_at_the_same_time(memory: RankMemory) -> None:
    num_threads = torch.get_num_threads()
    spins = [
        SharedRanks(memory, 0, 2, timeout_s=LONG_S, num_cores=num_cores).spin_us > 0
        for num_cores in (2 * num_threads, 2 * num_threads - 1)
    ]
    assert spins == [True, False]
