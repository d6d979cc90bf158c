"""Chi-square tests that samples follow the exact distribution, and that wrong samplers fail the same tests.

The expected probabilities are computed in numpy from the definitions; no code of ours takes part in them.
"""

import dataclasses
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from scipy import stats

from common.sampling_params import SequenceSampling
from tests.worker.sampling_by_seats import sample_seats

torch.set_num_threads(1)  # on contended cores two threads mostly wait for each other

NUM_DRAWS = 20_000
LOGITS = np.random.default_rng(11).normal(0.0, 2.0, 40).astype(np.float32)

CASES = {
    "plain": SequenceSampling(seed=5),
    "cold": SequenceSampling(seed=5, temperature=0.6),
    "hot": SequenceSampling(seed=5, temperature=2.5),
    "top-k": SequenceSampling(seed=5, top_k=7),
    "top-p": SequenceSampling(seed=5, top_p=0.8),
    "min-p": SequenceSampling(seed=5, min_p=0.05),
    "all": SequenceSampling(seed=5, temperature=1.7, top_k=20, top_p=0.9, min_p=0.02),
    "bias": SequenceSampling(
        seed=5, logit_bias=((3, 2.5), (17, -1.5)), suppressed_token_ids=(1,), suppressed_until=10**6
    ),
    "allowed": SequenceSampling(seed=5, temperature=3.0, allowed_token_ids=(0, 4, 9, 33), top_p=0.95),
}


def exact_probabilities(seat: SequenceSampling) -> npt.NDArray[np.float64]:
    """The definition, token by token, in float64."""
    logits = LOGITS.astype(np.float64)
    if seat.allowed_token_ids is not None:
        logits = np.where(np.isin(np.arange(40), seat.allowed_token_ids), logits, -np.inf)
    logits[list(seat.suppressed_token_ids)] = -np.inf
    for token_id, bias in seat.logit_bias:
        logits[token_id] += bias
    weights = np.exp(logits / seat.temperature)
    probabilities = weights / weights.sum()
    kept = [i for i in np.argsort(-probabilities) if probabilities[i] >= seat.min_p * probabilities.max()]
    kept = kept[: seat.top_k]
    mass = probabilities[kept] / probabilities[kept].sum()
    before = np.concatenate(([0.0], np.cumsum(mass)[:-1]))
    kept = [token for token, sum_before in zip(kept, before, strict=True) if sum_before < seat.top_p]
    result = np.zeros(40)
    result[kept] = probabilities[kept] / probabilities[kept].sum()
    return result


def draw(seats: list[SequenceSampling], positions: list[int]) -> npt.NDArray[np.int64]:
    logits = torch.from_numpy(LOGITS).expand(len(seats), -1)
    output = sample_seats("native", logits, seats, positions, [None] * len(seats))
    assert bool(output.valid.all())
    return output.token_ids.numpy()


def p_value(tokens: npt.NDArray[np.int64], probabilities: npt.NDArray[np.float64]) -> float:
    """Chi-square; the rarest tokens are merged until each bin expects at least 5. An impossible token gives 0."""
    counts = np.bincount(tokens, minlength=len(probabilities))
    if counts[probabilities == 0].any():
        return 0.0
    expected = probabilities * len(tokens)
    order = [token for token in np.argsort(expected) if expected[token] > 0]
    num_rare = next(n for n in range(len(order)) if expected[order[: n + 1]].sum() >= 5 and expected[order[n]] >= 5)
    if 0 < expected[order[:num_rare]].sum() < 5:
        num_rare += 1
    bins = [order[:num_rare]] * (num_rare > 0) + [[token] for token in order[num_rare:]]
    observed = [counts[tokens_of_bin].sum() for tokens_of_bin in bins]
    return float(stats.chisquare(observed, [expected[tokens_of_bin].sum() for tokens_of_bin in bins]).pvalue)


def over_positions(seat: SequenceSampling) -> npt.NDArray[np.int64]:
    return draw([seat] * NUM_DRAWS, list(range(NUM_DRAWS)))


@pytest.mark.parametrize("name", CASES)
def test_samples_follow_the_exact_distribution(name: str) -> None:
    assert p_value(over_positions(CASES[name]), exact_probabilities(CASES[name])) > 0.001


@pytest.mark.long
@pytest.mark.parametrize("name", ["plain", "all"])
@pytest.mark.parametrize("coordinate", ["seed", "sample_index"])
def test_samples_of_many_seeds_or_samples_follow_it_too(name: str, coordinate: str) -> None:
    changes: list[dict[str, Any]] = [{coordinate: i} for i in range(NUM_DRAWS)]
    seats = [dataclasses.replace(CASES[name], **change) for change in changes]
    assert p_value(draw(seats, [100] * NUM_DRAWS), exact_probabilities(CASES[name])) > 0.001


def test_successive_samples_are_independent() -> None:
    tokens = over_positions(CASES["top-k"])
    probabilities = exact_probabilities(CASES["top-k"])
    pairs = tokens[:-1:2] * 40 + tokens[1::2]
    assert p_value(pairs, np.outer(probabilities, probabilities).ravel()) > 0.001


def test_a_large_vocabulary_is_sampled_evenly() -> None:
    """Equal logits over 32,000 tokens, 500 draws: 25 bins of neighbours and 25 of strides, each expecting 20."""
    logits = torch.zeros(1, 32_000).expand(50, -1)
    seats = [SequenceSampling(seed=9)] * 50
    parts = [sample_seats("native", logits, seats, list(range(i, i + 50)), [None] * 50) for i in range(0, 500, 50)]
    tokens = torch.cat([part.token_ids for part in parts]).numpy()
    for bins in (tokens // 1280, tokens % 25):
        assert stats.chisquare(np.bincount(bins, minlength=25)).pvalue > 0.001


NUM_KEPT = {name: int((exact_probabilities(seat) > 0).sum()) for name, seat in CASES.items()}
WRONG: dict[str, tuple[str, dict[str, Any]]] = {
    "temperature inverted": ("cold", {"temperature": 1 / 0.6}),
    "temperature forgotten": ("hot", {"temperature": 1.0}),
    "temperature slightly off": ("plain", {"temperature": 1.06}),
    "top-k short by one": ("top-k", {"top_k": 6}),
    "top-k long by one": ("top-k", {"top_k": 8}),
    "top-p short by one": ("top-p", {"top_p": 1.0, "top_k": NUM_KEPT["top-p"] - 1}),
    "top-p long by one": ("top-p", {"top_p": 1.0, "top_k": NUM_KEPT["top-p"] + 1}),
    "min-p ignored": ("min-p", {"min_p": 0.0}),
    "top-p before top-k": ("all", {"top_p": 1.0, "top_k": NUM_KEPT["all"] + 1}),
    "bias ignored": ("bias", {"logit_bias": ()}),
    "greedy": ("plain", {"temperature": 0.0}),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_sampler_fails_the_same_check(name: str) -> None:
    case, changes = WRONG[name]
    wrong = dataclasses.replace(CASES[case], **changes)
    assert p_value(over_positions(wrong), exact_probabilities(CASES[case])) < 1e-6


def test_noise_reused_over_positions_fails_the_same_check() -> None:
    tokens = draw([CASES["plain"]] * NUM_DRAWS, [i // 50 for i in range(NUM_DRAWS)])
    assert p_value(tokens, exact_probabilities(CASES["plain"])) < 1e-6


def test_noise_reused_by_the_next_position_fails_the_check_of_pairs() -> None:
    tokens = draw([CASES["top-k"]] * NUM_DRAWS, [i // 2 for i in range(NUM_DRAWS)])
    probabilities = exact_probabilities(CASES["top-k"])
    pairs = tokens[:-1:2] * 40 + tokens[1::2]
    assert p_value(pairs, np.outer(probabilities, probabilities).ravel()) < 1e-6
