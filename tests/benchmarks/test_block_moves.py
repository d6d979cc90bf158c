"""Runs of the block-move benchmark in small, and its conclusions."""

import xml.etree.ElementTree as ET

import pytest
import torch

from benchmarks.gpu.block_moves import (
    OURS,
    SMALL_SIZES,
    Rate,
    flatness,
    hidden_share,
    key_figures,
    measure,
    measure_overlap,
    plot,
)

CPU = torch.device("cpu")


def rate(operation: str, block_size: int, gb_per_s: float) -> Rate:
    return Rate(operation=operation, block_size=block_size, block_bytes=1, gb_per_s=gb_per_s, share=gb_per_s / 50)


def test_a_small_run_moves_blocks_of_all_sizes_and_finds_them_where_they_belong() -> None:
    rates = measure(CPU, SMALL_SIZES, (1, 16, 64), repeats=1, by_kernels=False)
    assert {each.block_size for each in rates if each.operation == "swap in"} == {1, 16, 64}
    assert all(each.gb_per_s > 0 for each in rates)
    assert 0 <= measure_overlap(CPU, SMALL_SIZES, 16, repeats=1, by_kernels=False) <= 1
    assert key_figures(rates, 0.5).keys() >= {"swap_out_share", "swap_out_is_flat"}
    ET.fromstring(plot(rates))


def test_a_line_is_as_flat_as_its_slowest_point_between_16_and_128() -> None:
    rates = [rate("swap out", size, speed) for size, speed in ((1, 3.0), (16, 40.0), (64, 50.0), (256, 60.0))]
    assert flatness(rates, "swap out") == 0.8


def test_the_worst_share_at_the_sizes_that_count_decides() -> None:
    rates = [rate(operation, size, speed) for operation in OURS for size, speed in ((8, 1.0), (16, 41.0), (128, 45.0))]
    figures = key_figures(rates, hidden=0.9)
    assert figures["copy_on_write_share"] == 0.82 and figures["copy_on_write_share_is_met"] is True
    assert figures["swap_in_flatness"] == pytest.approx(41 / 45, abs=1e-3) and figures["swap_in_is_flat"] is True


@pytest.mark.parametrize(("both_s", "hidden"), [(4.0, 1.0), (6.0, 0.0), (5.0, 0.5), (3.9, 1.0), (9.0, 0.0)])
def test_a_swap_is_hidden_as_far_as_both_take_less_than_one_after_the_other(both_s: float, hidden: float) -> None:
    assert hidden_share(2.0, 4.0, both_s) == hidden
