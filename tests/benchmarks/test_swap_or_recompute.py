"""Runs of the swap-or-recompute benchmark in small, and its conclusions."""

import xml.etree.ElementTree as ET

import torch

from benchmarks.gpu.random_decoder import random_decoder
from benchmarks.gpu.swap_or_recompute import Cost, key_figures, measure, plot, swap_spread
from benchmarks.random_models import SHAPES


def cost(block_size: int, swap_out_ms: float, swap_in_ms: float) -> Cost:
    return Cost(block_size=block_size, num_tokens=100, recompute_ms=8.0, swap_out_ms=swap_out_ms, swap_in_ms=swap_in_ms)


def test_a_small_run_computes_saves_and_restores_at_every_block_size() -> None:
    decoder = random_decoder(SHAPES["tiny"], torch.float32, torch.device("cpu"))
    costs = measure(decoder, (21,), (4, 16), repeats=1)
    assert [each.block_size for each in costs] == [4, 16]
    assert all(min(each.recompute_ms, each.swap_out_ms, each.swap_in_ms) > 0 for each in costs)
    ET.fromstring(plot(costs, 21))
    assert measure(decoder, (21,), (4, 16), repeats=1, limit_s=-1.0) == []


def test_a_random_decoder_has_the_weights_of_its_shape() -> None:
    shape = SHAPES["tiny"]
    decoder = random_decoder(shape, torch.float32, torch.device("cpu"))
    embedding = shape.vocab_size * shape.hidden_size
    assert decoder.num_parameters == shape.num_step_weights + embedding
    assert len(decoder.layers) == shape.num_layers


def test_swap_is_flat_if_it_costs_the_same_from_16_to_128() -> None:
    costs = [cost(1, 9.0, 9.0), cost(16, 1.0, 1.0), cost(128, 1.0, 1.5), cost(256, 9.0, 9.0)]
    assert swap_spread(costs, 100) == 1.25
    assert key_figures(costs) == {"recompute_over_swap_of_100_tokens": 4.0, "swap_spread_of_100_tokens": 1.25}
