"""Blocks are where a plain reading of the steps says, and what a step's moves say of themselves."""

from random import Random

import numpy as np
import pytest
import torch

from common.step import Step
from kernels.blocks.copy_order import copy_table, grouped
from kernels.blocks.kv_blocks import copy_by_table, swap_blocks
from tests.worker.device.moved_pools import MovedPools, move_at_random
from tests.worker.device.simulated_streams import SimulatedStreams

CPU = torch.device("cpu")


def test_any_moves_leave_both_pools_as_a_plain_reading_of_them_says() -> None:
    move_at_random(MovedPools(CPU, copy_by_table, swap_blocks, words=1), 80)


@pytest.mark.parametrize("seed", range(12))
def test_on_two_streams_they_do_so_in_any_order_that_the_events_allow(seed: int) -> None:
    streams = SimulatedStreams(Random(seed))
    pools = MovedPools(CPU, streams.copy_by_table, streams.swap_blocks, words=1, simulated=streams)
    move_at_random(pools, 40, seed=seed)


def test_who_waits_for_swaps_finds_them_done() -> None:
    streams = SimulatedStreams(Random(1))
    pools = MovedPools(CPU, streams.copy_by_table, streams.swap_blocks, words=1, simulated=streams)
    step = Step(epoch=1, step_id=1, snapshot=True, swap_out=[3, 0, 4, 1, 5, 2], swap_in=[0, 6])
    pools.read_plainly(step)
    assert pools.execute(step).wait() > 0
    pools.assert_equal()


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("num_swaps", range(3))
def test_steps_go_on_after_one_whose_swaps_broke_off(num_swaps: int, seed: int) -> None:
    """A step fails where memory is short; what was queued of it still runs, and the next one waits for that."""
    streams = SimulatedStreams(Random(seed))
    left = [num_swaps]

    def swap_or_fail(source: torch.Tensor, destination: torch.Tensor, pairs: torch.Tensor) -> None:
        if not left[0]:
            left[0] = -1  # once
            raise torch.cuda.OutOfMemoryError("out of memory")
        left[0] -= 1
        streams.swap_blocks(source, destination, pairs)

    pools = MovedPools(CPU, streams.copy_by_table, swap_or_fail, words=1, simulated=streams)
    breaks = Step(epoch=1, step_id=1, snapshot=True, swap_out=[3, 0], placed=[1, 0, 4], swap_in=[1, 5])
    swaps = (pools.expected[3], pools.expected_host[0]), (pools.pool.fetched_blocks[0], pools.expected[4])
    for source, destination in swaps[:num_swaps]:
        destination.copy_(source)
    with pytest.raises(torch.cuda.OutOfMemoryError):
        pools.execute(breaks)
    move_at_random(pools, 12, seed=seed)


def test_a_step_without_swaps_has_nothing_to_wait_for() -> None:
    pools = MovedPools(CPU, copy_by_table, swap_blocks, words=1)
    assert pools.execute(Step(epoch=1, step_id=1, snapshot=True, copies=[0, 1, 0, 2])).wait() == 0
    assert pools.execute(Step(epoch=1, step_id=2, swap_out=[0, 1])).wait() > 0
    assert pools.execute(Step(epoch=1, step_id=3)).wait() == 0


def test_a_table_of_copies_says_where_groups_start_and_then_the_pairs() -> None:
    array, num_groups = grouped([[(2, 3), (1, 2)], [(5, 6)]])
    assert num_groups == 2
    np.testing.assert_array_equal(array, [0, 2, 3, 2, 3, 1, 2, 5, 6])


def test_copies_that_need_no_order_are_groups_of_their_own() -> None:
    array, num_groups = copy_table(np.array([(2, 3), (2, 1), (5, 6)]))
    assert num_groups == 3
    np.testing.assert_array_equal(array, [0, 1, 2, 3, 2, 3, 2, 1, 5, 6])
    array, num_groups = copy_table(np.array([(2, 3), (3, 1), (5, 6)]))
    assert num_groups == 2
    np.testing.assert_array_equal(array, [0, 2, 3, 3, 1, 2, 3, 5, 6])


def test_a_table_copies_between_pools_and_within_one() -> None:
    source, destination = torch.arange(6.0).view(6, 1), torch.zeros(6, 1)
    array, num_groups = grouped([[(2, 3), (1, 2)], [(5, 0)]])
    copy_by_table(source, destination, torch.from_numpy(array), num_groups)
    assert destination.flatten().tolist() == [5, 0, 1, 2, 0, 0]
    copy_by_table(source, source, torch.from_numpy(array), num_groups)
    assert source.flatten().tolist() == [5, 1, 1, 2, 4, 5]
