"""Size of the pool, length of a sequence, and wishes that do not fit together."""

from dataclasses import replace

import pytest

from worker_svc.memory.pool_plan import (
    MOST_BLOCKS,
    FreeMemory,
    PoolPlan,
    PoolRequest,
    PoolSizeError,
    SequenceLimits,
    plan_pool,
)
from worker_svc.option_check import OptionError

NOTHING_ASKED = PoolRequest(num_blocks=None, memory_bytes=None, fraction=None, default_fraction=0.5)
SEQUENCES = SequenceLimits(num_seats=4, block_size=16, model_len=100, max_model_len=None)
BLOCK_BYTES = 1000


def plan(request: PoolRequest, sequences: SequenceLimits = SEQUENCES, free_bytes: int = 1_000_000) -> PoolPlan:
    return plan_pool(request, sequences, FreeMemory(device=free_bytes), BLOCK_BYTES)


def test_an_unasked_pool_holds_the_longest_sequence_in_every_seat_and_no_more() -> None:
    # 101 tokens, one of them not yet known: 7 blocks in each of 4 seats.
    assert plan(NOTHING_ASKED) == PoolPlan(num_blocks=28, max_model_len=100)


def test_an_unasked_pool_takes_its_part_of_little_memory() -> None:
    assert plan(NOTHING_ASKED, free_bytes=20_000) == PoolPlan(num_blocks=10, max_model_len=100)


def test_an_unasked_pool_holds_its_least_tokens_where_its_part_would_not_and_whatever_there_is_below_that() -> None:
    careful = replace(NOTHING_ASKED, default_fraction=0.1, default_least_tokens=40)  # 3 blocks
    assert plan(careful, free_bytes=20_000).num_blocks == 3
    assert plan(careful, free_bytes=40_000).num_blocks == 4  # a tenth is more
    assert plan(careful, free_bytes=2_000).num_blocks == 2
    with pytest.raises(PoolSizeError, match="one block of the KV pool needs"):
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
        PoolSizeError,
        match=r"--num-blocks 3 .* holds 48 tokens, less than .* --max-model-len 49.*--num-blocks 4",
    ):
        plan(small, replace(SEQUENCES, max_model_len=49))
    assert plan(small, replace(SEQUENCES, max_model_len=48)).max_model_len == 48


def test_a_sequence_cannot_be_longer_than_the_model_allows() -> None:
    with pytest.raises(OptionError, match=r"--max-model-len 101 is more .* at most --max-model-len 100"):
        plan(NOTHING_ASKED, replace(SEQUENCES, max_model_len=101))


def test_bytes_for_less_than_a_block_are_refused() -> None:
    with pytest.raises(PoolSizeError, match=r"--kv-memory-bytes 999 is less .*: give at least --kv-memory-bytes 1000"):
        plan(replace(NOTHING_ASKED, memory_bytes=999))


def test_on_a_cpu_the_host_pool_is_taken_first_and_the_pool_has_its_part_of_the_rest() -> None:
    # 20,000 bytes hold 20 blocks: 6 for swapping leave 14, of which half.
    assert plan(replace(NOTHING_ASKED, num_host_blocks=6), free_bytes=20_000).num_blocks == 7
    assert plan(replace(NOTHING_ASKED, num_blocks=14, num_host_blocks=6), free_bytes=20_000).num_blocks == 14
    with pytest.raises(PoolSizeError, match=r"--num-blocks 15 .* at most --num-blocks 14, beside --num-host-blocks 6$"):
        plan(replace(NOTHING_ASKED, num_blocks=15, num_host_blocks=6), free_bytes=20_000)


def test_beside_a_device_the_host_pool_takes_nothing_of_its_memory() -> None:
    free = FreeMemory(device=20_000, host=8_192)
    asked = replace(NOTHING_ASKED, num_blocks=20, num_host_blocks=6)
    assert plan_pool(asked, SEQUENCES, free, BLOCK_BYTES).num_blocks == 20


@pytest.mark.parametrize("free", [FreeMemory(device=6_999), FreeMemory(device=1_000_000, host=8_191)])
def test_a_host_pool_that_does_not_fit_is_refused_with_what_would(free: FreeMemory) -> None:
    most = 6 if free.host is None else 4  # pinned memory is taken in powers of two: 4,096 bytes fit
    asked = replace(NOTHING_ASKED, num_host_blocks=most + 1)
    with pytest.raises(PoolSizeError, match=rf"--num-host-blocks {most + 1} of .* at most --num-host-blocks {most}$"):
        plan_pool(asked, SEQUENCES, free, BLOCK_BYTES)


def test_pinned_host_blocks_are_counted_as_the_power_of_two_that_is_taken_for_them() -> None:
    asked = replace(NOTHING_ASKED, num_host_blocks=4)
    plan_pool(asked, SEQUENCES, FreeMemory(device=1_000_000, host=4_096), BLOCK_BYTES)
    with pytest.raises(PoolSizeError, match=r"at most --num-host-blocks 2$"):
        plan_pool(asked, SEQUENCES, FreeMemory(device=1_000_000, host=4_095), BLOCK_BYTES)


@pytest.mark.parametrize(
    ("asked", "free_bytes", "said"),
    [
        ({"num_blocks": 5}, 4_999, "--num-blocks 5 .* the 4,999 bytes that are free: give at most --num-blocks 4$"),
        ({"num_blocks": 5}, 999, "--num-blocks 5 .* free: free memory$"),
        ({"memory_bytes": 5_000}, 4_999, "--kv-memory-bytes 5000 .* free: give at most --kv-memory-bytes 4999$"),
        ({"fraction": 0.1}, 9_999, "--kv-memory-fraction 0.1 of the 9,999 bytes .* a larger --kv-memory-fraction$"),
        ({"share": 7_000}, 1_500, "--memory-bytes 7000 leaves 1,500 bytes .* give more"),
        ({}, 1_500, "1,500 bytes that are free is less: free memory, or give a smaller --block-size$"),
    ],
)
def test_a_pool_that_does_not_fit_is_refused_by_what_was_asked_for(
    asked: dict[str, float], free_bytes: int, said: str
) -> None:
    with pytest.raises(PoolSizeError, match=said):
        plan(replace(NOTHING_ASKED, **asked), free_bytes=free_bytes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"num_blocks": 3}, r"--num-blocks 3 of 16 tokens each holds 48 tokens.* give --num-blocks 4 or more, or"),
        ({"memory_bytes": 3_999}, r"--kv-memory-bytes 3999 holds 48 tokens.* give --kv-memory-bytes 4000 or more, or"),
        ({"fraction": 0.3}, r"--kv-memory-fraction 0.3 holds 48 tokens.* give a larger one, or"),
        ({"default_fraction": 0.3}, r"the free memory holds 48 tokens.* free some, or"),
    ],
)
def test_a_pool_for_less_than_a_sequence_is_refused_by_what_was_asked_for(asked: dict[str, float], said: str) -> None:
    with pytest.raises(PoolSizeError, match=said + " --max-model-len 48 or less$"):
        plan(replace(NOTHING_ASKED, **asked), replace(SEQUENCES, max_model_len=49), 10_000)  # type: ignore[arg-type]


@pytest.mark.parametrize("asked", [{"memory_bytes": 1 << 50}, {"fraction": 1.0}])
def test_a_pool_has_no_more_blocks_than_schedulers_believe(asked: dict[str, float]) -> None:
    assert plan(replace(NOTHING_ASKED, **asked), free_bytes=1 << 50).num_blocks == MOST_BLOCKS  # type: ignore[arg-type]
