"""Drawn lengths against the histograms."""

import json
import math
from itertools import islice

import pytest

from benchmarks.lengths import (
    MAX_MODEL_LEN,
    PAPER_MEANS,
    TRACES,
    Dataset,
    Histogram,
    Lengths,
    LengthSampler,
    read_histograms,
)

DATASETS: tuple[Dataset, ...] = ("alpaca", "sharegpt")


def test_all_whole_numbers_of_a_bin_are_equally_likely() -> None:
    """Two bins of width 4: 1 to 4 with a quarter of all, 5 to 9 (the last was seen) with the rest."""
    histogram = Histogram(1, 9, [1.0, 3.0])
    drawn = [histogram.quantile((index + 0.5) / 80) for index in range(80)]
    assert [drawn.count(number) for number in range(1, 10)] == [5, 5, 5, 5, 12, 12, 12, 12, 12]
    assert histogram.mean == 0.25 * 2.5 + 0.75 * 7
    assert histogram.quantile(math.nextafter(1, 0)) == 9


def test_an_empty_bin_is_never_drawn_from() -> None:
    histogram = Histogram(0, 9, [1.0, 0.0, 1.0])
    assert {histogram.quantile(index / 100) for index in range(100)} == {0, 1, 2, 6, 7, 8, 9}


@pytest.mark.parametrize("dataset", DATASETS)
def test_the_means_are_those_that_the_paper_states(dataset: Dataset) -> None:
    means = [histogram.mean for histogram in read_histograms(dataset)]
    assert means == pytest.approx(PAPER_MEANS[dataset], abs=0.1)


@pytest.mark.parametrize("dataset", DATASETS)
def test_drawn_inputs_fill_the_bins_of_the_figure(dataset: Dataset) -> None:
    number = 50_000
    figure = json.loads(TRACES.read_text())[dataset]["input"]
    densities, low = figure["density"], figure["lo"]
    width = (figure["hi"] - low) / len(densities)
    counts = [0] * len(densities)
    for request in LengthSampler(dataset, 1).draw(number):
        counts[min(len(densities) - 1, int((request.num_input - low) / width))] += 1
    for count, density in zip(counts, densities, strict=True):
        assert count == pytest.approx(number * density / sum(densities), abs=2)  # spread evenly: off at the edges alone


@pytest.mark.parametrize("dataset", DATASETS)
def test_every_request_fits_the_context(dataset: Dataset) -> None:
    requests = [*LengthSampler(dataset, 2).draw(20_000), *islice(LengthSampler(dataset, 2), 5_000)]
    assert all(request.num_input >= 1 and request.num_output >= 1 for request in requests)
    assert max(request.num_input + request.num_output for request in requests) <= MAX_MODEL_LEN


def test_the_same_seed_draws_the_same_requests() -> None:
    def first(seed: int) -> list[Lengths]:
        return list(islice(LengthSampler("sharegpt", seed), 50))

    assert first(3) == first(3)
    assert first(3) != first(4)


def test_opposite_halves_pair_long_inputs_with_short_outputs() -> None:
    inputs, outputs = read_histograms("alpaca")
    median_input, median_output = inputs.quantile(0.5), outputs.quantile(0.5)
    for request in LengthSampler("alpaca", 5, opposite_halves=1.0).draw(2_000):
        if request.num_input < median_input:
            assert request.num_output >= median_output
        elif request.num_input > median_input:
            assert request.num_output <= median_output
