"""Beam search with the demo model on a pool of blocks: what its requests are, and that a full pool changes nothing."""

import pytest
import torch

from benchmarks.lengths import Lengths
from benchmarks.memory.beam_decoding import BeamDecoding, DemoPrompts
from benchmarks.memory.block_saving import measure_saving
from benchmarks.memory.memory_saving import MODEL, measure_beams
from benchmarks.memory.saturated_pool import PoolConfig, SaturatedPool

torch.set_num_threads(1)  # on contended cores two threads mostly wait for each other

LENGTHS = [Lengths(5, 40), Lengths(33, 30), Lengths(16, 25), Lengths(70, 1)]


def search(num_blocks: int, temperature: float = 1.0) -> tuple[SaturatedPool, BeamDecoding]:
    """Run all requests to their end."""
    config = PoolConfig(num_blocks=num_blocks, max_num_seqs=16)
    decoding = BeamDecoding(MODEL, 3, config, temperature=temperature)
    pool = SaturatedPool(config, decoding.groups(LENGTHS), decoding)
    saving = measure_saving(pool, num_batches=2)
    assert 0 < saving.saving < 100 * 2 / 3
    pool.check()
    return pool, decoding


def test_prompts_are_documents_cut_to_length() -> None:
    long, again = DemoPrompts(MODEL).draw(700), DemoPrompts(MODEL).draw(10)
    assert len(long) == 700 and again == long[:10]
    begin, end = 0, 1  # <|bos|> and <|eos|>: of several documents
    assert long[0] == begin and begin in long[1:] and end in long


def test_beams_that_were_swapped_out_find_the_same_answers() -> None:
    large, in_large = search(num_blocks=200)
    full, in_full = search(num_blocks=15)
    assert large.stats().num_swaps == 0 and full.stats().num_swaps > 0
    assert in_full.nats_per_token == pytest.approx(in_large.nats_per_token, abs=1e-3)
    assert in_full.mean_tokens_apart == pytest.approx(in_large.mean_tokens_apart, abs=0.5)


def test_a_flattened_model_is_less_sure() -> None:
    _, sure = search(num_blocks=200)
    _, unsure = search(num_blocks=200, temperature=3.0)
    assert unsure.nats_per_token > 2 * sure.nats_per_token


def test_a_small_run_measures_beams() -> None:
    row = measure_beams("alpaca", 2, 1.0, 20)
    assert row.result.num_requests == 20 and row.paper == 37.56
    assert row.mean_tokens_apart is not None and row.mean_tokens_apart > 0
