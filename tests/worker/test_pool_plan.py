"""How large the pool gets, how long a sequence may be, and which wishes do not fit together."""

from dataclasses import replace

import pytest

from worker_svc.kv_pool import PoolSizeError
from worker_svc.pool_plan import FreeMemory, PoolPlan, PoolRequest, SequenceLimits, plan_pool

NOTHING_ASKED = PoolRequest(num_blocks=None, memory_bytes=None, fraction=None, default_fraction=0.5)
SEQUENCES = SequenceLimits(num_slots=4, block_size=16, model_len=100, max_model_len=None)
BLOCK_BYTES = 1000


def plan(request: PoolRequest, sequences: SequenceLimits = SEQUENCES, free_bytes: int = 1_000_000) -> PoolPlan:
    return plan_pool(request, sequences, FreeMemory(device=free_bytes), BLOCK_BYTES)


def test_an_unasked_pool_holds_the_longest_sequence_in_every_slot_and_no_more() -> None:
    # 101 tokens, one of them not yet known: 7 blocks in each of 4 slots.
    assert plan(NOTHING_ASKED) == PoolPlan(num_blocks=28, max_model_len=100)


def test_an_unasked_pool_takes_its_part_of_little_memory() -> None:
    assert plan(NOTHING_ASKED, free_bytes=20_000) == PoolPlan(num_blocks=10, max_model_len=100)


def test_an_unasked_pool_holds_its_least_tokens_where_its_part_would_not_and_whatever_there_is_below_that() -> None:
    careful = replace(NOTHING_ASKED, default_fraction=0.1, default_least_tokens=40)  # 3 blocks
    assert plan(careful, free_bytes=20_000).num_blocks == 3
    assert plan(careful, free_bytes=40_000).num_blocks == 4  # a tenth is more
    assert plan(careful, free_bytes=2_000).num_blocks == 2
    with pytest.raises(PoolSizeError, match="one block needs"):
        plan(careful, free_bytes=999)


def test_the_least_tokens_are_no_more_than_the_longest_sequence() -> None:
    careful = replace(NOTHING_ASKED, default_fraction=0.001, default_least_tokens=100_000)
    assert plan(careful).num_blocks == 7


@pytest.mark.parametrize(
    "request_",
    [
        replace(NOTHING_ASKED, num_blocks=200),
        replace(NOTHING_ASKED, memory_bytes=200_999),
        replace(NOTHING_ASKED, fraction=0.2),
    ],
)
def test_a_pool_that_was_asked_for_is_as_large_as_that(request_: PoolRequest) -> None:
    assert plan(request_).num_blocks == 200


def test_a_small_pool_leaves_the_longest_sequence_as_it_is_unless_one_was_asked_for() -> None:
    small = replace(NOTHING_ASKED, num_blocks=3)
    assert plan(small) == PoolPlan(num_blocks=3, max_model_len=100)
    with pytest.raises(
        PoolSizeError, match=r"holds 48 tokens, less than one sequence of max_model_len 49.*--num-blocks 4"
    ):
        plan(small, replace(SEQUENCES, max_model_len=49))
    assert plan(small, replace(SEQUENCES, max_model_len=48)).max_model_len == 48


def test_a_sequence_cannot_be_longer_than_the_model_allows() -> None:
    with pytest.raises(PoolSizeError, match="at most --max-model-len 100"):
        plan(NOTHING_ASKED, replace(SEQUENCES, max_model_len=101))


def test_bytes_for_less_than_a_block_are_refused() -> None:
    with pytest.raises(PoolSizeError, match="at least the 1000 bytes of one block"):
        plan(replace(NOTHING_ASKED, memory_bytes=999))


def test_on_a_cpu_the_host_pool_is_taken_first_and_the_pool_has_its_part_of_the_rest() -> None:
    # 20,000 bytes hold 20 blocks: 6 for swapping leave 14, of which half.
    assert plan(replace(NOTHING_ASKED, num_host_blocks=6), free_bytes=20_000).num_blocks == 7
    assert plan(replace(NOTHING_ASKED, num_blocks=14, num_host_blocks=6), free_bytes=20_000).num_blocks == 14
    with pytest.raises(PoolSizeError, match=r"15 blocks .* at most 14 blocks, beside 6 host blocks$"):
        plan(replace(NOTHING_ASKED, num_blocks=15, num_host_blocks=6), free_bytes=20_000)


def test_beside_a_device_the_host_pool_takes_nothing_of_its_memory() -> None:
    free = FreeMemory(device=20_000, host=8_192)
    asked = replace(NOTHING_ASKED, num_blocks=20, num_host_blocks=6)
    assert plan_pool(asked, SEQUENCES, free, BLOCK_BYTES).num_blocks == 20


@pytest.mark.parametrize("free", [FreeMemory(device=6_999), FreeMemory(device=1_000_000, host=8_191)])
def test_a_host_pool_that_does_not_fit_is_refused_with_what_would(free: FreeMemory) -> None:
    most = 6 if free.host is None else 4  # pinned memory is taken in powers of two: 4,096 bytes fit
    asked = replace(NOTHING_ASKED, num_host_blocks=most + 1)
    with pytest.raises(PoolSizeError, match=rf"{most + 1} host blocks .* at most --num-host-blocks {most}$"):
        plan_pool(asked, SEQUENCES, free, BLOCK_BYTES)


def test_pinned_host_blocks_are_counted_as_the_power_of_two_that_is_taken_for_them() -> None:
    asked = replace(NOTHING_ASKED, num_host_blocks=4)
    plan_pool(asked, SEQUENCES, FreeMemory(device=1_000_000, host=4_096), BLOCK_BYTES)
    with pytest.raises(PoolSizeError, match=r"at most --num-host-blocks 2$"):
        plan_pool(asked, SEQUENCES, FreeMemory(device=1_000_000, host=4_095), BLOCK_BYTES)
