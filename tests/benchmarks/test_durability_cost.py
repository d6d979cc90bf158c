"""Summary of the durability benchmark's rounds."""

import pytest

from benchmarks.durability.durability_cost import Load, Measured, row_of


def test_each_round_is_compared_with_the_memory_store_in_the_same_round() -> None:
    memory = [Measured(1000.0, 5.0), Measured(500.0, 5.0), Measured(2000.0, 5.0)]
    always = [Measured(990.0, 6.0), Measured(490.0, 8.0), Measured(1600.0, 7.0)]
    row = row_of(Load(batch=64, step_ms=8.0), "always", always, memory)
    assert (row.ratio, row.worst_ratio, row.best_ratio) == (0.98, 0.8, 0.99)
    assert (row.tokens_per_s, row.scheduler_cpu_us_per_token) == (990.0, 7.0)
    assert (row.worker, row.batch, row.mode) == ("simulated, 8 ms", 64, "always")


def test_rounds_that_do_not_correspond_are_not_compared() -> None:
    with pytest.raises(ValueError, match="longer"):
        row_of(Load(batch=64, step_ms=8.0), "always", [Measured(1.0, 1.0)], [Measured(1.0, 1.0)] * 2)


def test_a_quarter_more_readers_than_are_served_at_once_keep_the_queue_filled() -> None:
    assert Load(batch=64, step_ms=None).num_readers == 80
    assert Load(batch=64, step_ms=None).worker == "demo model"
