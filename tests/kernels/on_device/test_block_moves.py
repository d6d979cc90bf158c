"""Moves by the kernels, on a GPU on two streams; there each is held up now and then, so that orders vary."""

from random import Random

import pytest
import torch
from torch import Tensor

from benchmarks.gpu.block_moves import Sizes, measure, measure_overlap
from common.step import Step
from kernels.blocks.block_copy import copy_by_table
from kernels.blocks.block_swap import COPY_ENGINE_RUN_BYTES, swap_blocks
from tests.kernels.on_device.devices import DEVICE, HAS_GPU
from tests.worker.device.moved_pools import MovedPools, move_at_random

_BYTES_PER_WORD = 32
_DELAY_CYCLES = 1_000_000 if HAS_GPU else 0  # half a millisecond
_LONG_DELAY_CYCLES = 200_000_000  # a tenth of a second
_RANDOM = Random(2)


def swap_blocks_at_last(source: Tensor, destination: Tensor, pairs: Tensor) -> None:
    if HAS_GPU:
        torch.cuda._sleep(_RANDOM.choice([0, _DELAY_CYCLES]))
    swap_blocks(source, destination, pairs)


@pytest.mark.parametrize(
    ("block_bytes", "num_steps"),
    [(_BYTES_PER_WORD, 200 if HAS_GPU else 30), (COPY_ENGINE_RUN_BYTES, 40 if HAS_GPU else 3)],
    ids=["kernel", "copy engine"],
)
def test_any_moves_leave_both_pools_as_a_plain_reading_of_them_says(block_bytes: int, num_steps: int) -> None:
    pools = MovedPools(DEVICE, copy_by_table, swap_blocks_at_last, words=block_bytes // _BYTES_PER_WORD)
    move_at_random(pools, num_steps, max_delay_cycles=_DELAY_CYCLES)


def test_the_measurement_of_moves_finds_all_blocks_where_they_belong() -> None:
    sizes = Sizes(bytes_per_token=64, num_layers=2, num_tokens=64, num_layerwise_tokens=32)
    rates = measure(DEVICE, sizes, (4, 16), repeats=1, by_kernels=True)
    assert {rate.operation for rate in rates} >= {"copy on write", "swap in, kernel", "swap out, copy engines"}
    measure_overlap(DEVICE, sizes, 16, repeats=1, by_kernels=True)


@pytest.mark.skipif(not HAS_GPU, reason="addresses of the host mean something to a kernel on a GPU alone")
def test_kernels_reach_pinned_memory_of_the_host_from_any_block_on() -> None:
    pools = MovedPools(DEVICE, copy_by_table, swap_blocks, words=1)
    host = pools.pool.host_blocks
    assert host.is_pinned()
    swap_blocks(host[3:], pools.pool.blocks, torch.tensor([(0, 5), (2, 4)]))
    torch.cuda.synchronize()
    assert torch.equal(pools.pool.blocks[[5, 4]].cpu(), host[[3, 5]])


@pytest.mark.skipif(not HAS_GPU, reason="without a GPU there is one stream")
def test_a_step_that_touches_nothing_of_a_swap_is_done_before_it() -> None:
    """A step that touches a block of the swap is not."""

    def late_swap_blocks(source: Tensor, destination: Tensor, pairs: Tensor) -> None:
        torch.cuda._sleep(_LONG_DELAY_CYCLES)
        swap_blocks(source, destination, pairs)

    pools = MovedPools(DEVICE, copy_by_table, late_swap_blocks, words=1)
    pools.execute(Step(epoch=1, step_id=1, snapshot=True, swap_out=[0, 0], copies=[3, 1])).wait()  # compiled by now
    swaps = pools.execute(Step(epoch=1, step_id=2, swap_out=[0, 0], swap_in=[1, 2], copies=[3, 1, 0, 4]))
    assert swaps.ended is not None
    torch.cuda.current_stream().synchronize()
    assert not swaps.ended.is_reached()
    pools.execute(Step(epoch=1, step_id=3, copies=[2, 5]))
    torch.cuda.current_stream().synchronize()
    assert torch.equal(pools.pool.blocks[5].cpu(), pools.pool.host_blocks[1])
