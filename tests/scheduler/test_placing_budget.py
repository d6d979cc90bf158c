"""Blocks that one step places: bounded by their bytes, by device."""

import pytest

from scheduler_svc.workers.placing_budget import max_placed_blocks


@pytest.mark.parametrize(
    ("bytes_per_block", "device", "num_blocks"),
    [
        (196_608, "cpu", 10),
        (2 << 20, "cpu", 1),
        (64 << 20, "cpu", 1),  # larger than what a step should place: one at a time
        (2 << 20, "cuda:0", 32),
        (0, "cpu", 2 << 20),  # a worker that does not say
    ],
)
def test_a_step_places_so_many_bytes_and_at_least_a_block(bytes_per_block: int, device: str, num_blocks: int) -> None:
    assert max_placed_blocks(bytes_per_block, device) == num_blocks
