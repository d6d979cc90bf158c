"""Loads of the paper's lengths: their requests and summary; the output of sweep and comparison."""

import pytest

from benchmarks.gpu.against_transformers import transformers_side
from benchmarks.gpu.block_size_sweep import SIZES, Row, chart, latency_ratios
from benchmarks.gpu.length_load import LoadOutcome, LoadRequest, requests_of
from benchmarks.lengths import MAX_MODEL_LEN, Dataset


def request(num_output: int) -> LoadRequest:
    return LoadRequest(prompt=[5], num_output=num_output)


def row(block_size: int, latency_ms: float, dataset: Dataset = "alpaca") -> Row:
    return Row(block_size=block_size, dataset=dataset, normalised_latency_ms=latency_ms, tokens_per_s=1.0, seconds=1.0)


def test_requests_have_the_lengths_of_the_trace_and_are_always_the_same() -> None:
    requests = requests_of("sharegpt", 200, vocab_size=500)
    assert requests == requests_of("sharegpt", 200, vocab_size=500)
    assert all(len(each.prompt) + each.num_output <= MAX_MODEL_LEN for each in requests)
    assert all(3 <= token < 500 for each in requests for token in each.prompt)
    assert sum(len(each.prompt) for each in requests) / 200 == pytest.approx(161, rel=0.1)
    assert sum(each.num_output for each in requests) / 200 == pytest.approx(338, rel=0.1)
    assert max(len(each.prompt) for each in requests_of("sharegpt", 20, vocab_size=500, max_len=7)) == 7


def test_normalised_latency_is_the_mean_over_requests_of_seconds_a_token() -> None:
    outcome = LoadOutcome(num_requests=2, output_tokens=30, seconds=6.0, latencies_s=[2.0, 6.0], num_outputs=[10, 20])
    assert outcome.tokens_per_s == 5.0
    assert outcome.normalised_latency_s == pytest.approx((0.2 + 0.3) / 2)


def test_a_load_of_transformers_that_ended_is_figured_like_ours() -> None:
    side = transformers_side([request(10), request(20)], [2.0, 6.0], seconds=6.5)
    assert (side.tokens_per_s, side.seconds, side.normalised_latency_ms) == (5.0, 6.0, 250.0)
    assert (side.num_ended, side.is_bound) == (2, False)


def test_a_load_of_transformers_that_was_given_up_gives_a_bound_in_its_favour() -> None:
    side = transformers_side([request(10), request(20)], [2.0, None], seconds=10.0)
    assert (side.tokens_per_s, side.normalised_latency_ms) == (3.0, None)  # as if all 30 had come in the 10 s
    assert (side.num_ended, side.is_bound) == (1, True)


def test_our_block_size_is_held_against_the_best() -> None:
    rows = [row(1, 20.0), row(16, 11.0), row(32, 10.0), row(1, 9.0, "sharegpt")]
    assert latency_ratios(rows) == {"alpaca": 1.1}


def test_a_chart_has_a_line_for_each_trace_even_of_one_size() -> None:
    document = chart([row(16, 3.0), row(16, 4.0, "sharegpt")])
    assert document.startswith("<svg") and "alpaca" in document and "sharegpt" in document


def test_a_sweep_has_all_powers_of_two_to_256_and_ours_first() -> None:
    assert sorted(SIZES) == [2**power for power in range(9)]
    assert SIZES[0] == 16
