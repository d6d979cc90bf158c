"""Use of a pool's slots, on made-up figures and in a small full pool."""

import pytest

from benchmarks.memory.kv_utilisation import Sums, fill, is_as_full_as_asked, measure, report, use_of
from benchmarks.memory.saturated_pool import PoolConfig


def made_up(filled: int, *, num_requests: int) -> Sums:
    """Two steps of a pool of 100 slots with one sequence."""
    return Sums(
        num_steps=2,
        pool=200,
        filled=filled,
        reserved=6,
        fragmented=10,
        running=2,
        num_requests=num_requests,
        num_preemptions=1,
    )


def test_all_slots_are_somewhere() -> None:
    use = use_of([made_up(170, num_requests=2), made_up(150, num_requests=4)])
    assert (use.token_states, use.reservation, use.internal_fragmentation, use.free) == (80.0, 3.0, 5.0, 12.0)
    assert (use.waste_per_sequence, use.slots_per_sequence, use.mean_running) == (8.0, 88.0, 1.0)
    assert use.preemptions_per_request == 0.375
    assert use.half_width == pytest.approx(12.706 * 5, rel=1e-3)  # 85 and 75 %: deviation 7.07, of their mean 5


def test_a_pool_with_more_waiting_than_fits_stays_full() -> None:
    sums = fill("alpaca", 1, PoolConfig(num_blocks=200), num_steps=100, seed=1)
    assert sums.num_steps == 100 and sums.pool == 100 * 200 * 16
    assert 0.8 < sums.filled / sums.pool < 1
    assert (sums.reserved + sums.fragmented) / sums.running < 16


def test_a_small_run_tells_whether_the_goal_is_reached(capsys: pytest.CaptureFixture[str]) -> None:
    row = measure("alpaca", 1, PoolConfig(), num_steps=100, num_repeats=2)
    assert is_as_full_as_asked(row)
    report([row])
    assert "goals reached" in capsys.readouterr().out
