"""Counts of the blocks that sharing saves, by hand and by a formula."""

import pytest

from benchmarks.lengths import Lengths, LengthSampler
from benchmarks.memory.block_saving import BlockSteps, measure_saving, ratio_with_interval
from benchmarks.memory.memory_saving import is_within_tolerance, measure_sampling, report
from benchmarks.memory.saturated_pool import NoModel, PoolConfig, SaturatedPool, sampled_groups


def pool_of(lengths: list[Lengths], width: int, num_blocks: int) -> SaturatedPool:
    return SaturatedPool(PoolConfig(num_blocks=num_blocks), sampled_groups(lengths, width), NoModel())


def block_steps_of(lengths: Lengths, width: int) -> BlockSteps:
    """Count shared blocks: in the first step all prompt blocks; in the later ones, one a token, the full blocks."""
    num_full, num_all = lengths.num_input // 16, -(-lengths.num_input // 16)
    steps = range(lengths.num_output)
    without_sharing = width * sum(-(-(lengths.num_input + step) // 16) for step in steps)
    return BlockSteps((width - 1) * (num_all + (lengths.num_output - 1) * num_full), without_sharing)


def test_saved_blocks_are_counted_in_every_step() -> None:
    """Two samples, 20 tokens and 3: 2 of 4 blocks are saved with the prompt, then 1 of 4, and 1 of 4."""
    saving = measure_saving(pool_of([Lengths(20, 3)] * 2, width=2, num_blocks=100), num_batches=2)
    assert (saving.saving, saving.half_width) == (round(100 * 4 / 12, 2), 0.0)
    assert (saving.num_requests, saving.num_steps, saving.mean_over_time) == (2, 3, None)


@pytest.mark.parametrize("width", [1, 2, 5])
def test_lengths_alone_decide_what_samples_save(width: int) -> None:
    lengths = LengthSampler("alpaca", 1).draw(40)
    sums = [block_steps_of(each, width) for each in lengths]
    expected = sum(each.saved for each in sums) / sum(each.without_sharing for each in sums)
    saving = measure_saving(pool_of(lengths, width, num_blocks=4_000), num_batches=4)
    assert saving.saving == round(100 * expected, 2)


def test_a_full_pool_saves_what_a_large_one_saves() -> None:
    lengths = LengthSampler("alpaca", 2).draw(300)
    large = measure_saving(pool_of(lengths, 4, num_blocks=10_000), num_batches=3)
    small = pool_of(lengths, 4, num_blocks=300)
    full = measure_saving(small, num_batches=3)
    small.check()
    assert small.stats().num_swaps > 100 and small.stats().num_used_blocks == 0
    assert full.saving == pytest.approx(large.saving, abs=0.3)
    assert full.num_steps > 2 * large.num_steps
    assert full.mean_over_time == pytest.approx(full.saving, rel=0.2)


def test_the_interval_comes_from_the_spread_of_the_batches() -> None:
    """Ratios 0.1 and 0.3: standard deviation 0.1414, of their mean 0.1; Student's t is 12.706 with two."""
    ratio, half_width = ratio_with_interval([BlockSteps(1, 10), BlockSteps(9, 30)])
    assert ratio == 10 / 40
    assert half_width == pytest.approx(1.2706, rel=1e-4)


def test_a_small_run_says_whether_it_is_near_the_paper(capsys: pytest.CaptureFixture[str]) -> None:
    row = measure_sampling("alpaca", 2, 0.63, 1_000)
    assert row.paper == 6.09 and row.result.num_requests == 1_000
    assert is_within_tolerance([row])
    report("parallel sampling", [row])
    assert "6.09" in capsys.readouterr().out
