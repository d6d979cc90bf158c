"""Edits, scaling and truncation of logits, against explicit formulas and transformers' processors."""

import math
from typing import cast

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from kernels.sampling.penalty_reference import PenaltyRows, penalise
from kernels.sampling.sampling import (
    NO_THRESHOLD,
    add_bias,
    allow_only,
    best_tokens,
    finite_rows,
    min_p_thresholds,
    scale,
    suppress,
    token_ranks,
    truncation_thresholds,
)

torch.set_num_threads(1)  # on contended cores two threads mostly wait for each other


def random_logits(rows: int, vocab_size: int, seed: int = 0) -> Tensor:
    return torch.randn(rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * 3


def penalise_each(logits: Tensor, histories: Tensor, num_prompt: int, penalties: Tensor) -> None:
    """Penalise row i by histories[i], of which the first `num_prompt` tokens are the prompt, and penalties[i]."""
    num_rows, length = histories.shape
    every = torch.arange(num_rows, dtype=torch.int32)
    lengths, prompts = torch.full_like(every, length), torch.full_like(every, num_prompt)
    penalise(logits, PenaltyRows(every, every, lengths, prompts, penalties, length), histories.to(torch.int32))


def thresholds(scaled: Tensor, *, min_p: float = 0.0, top_k: int | None = None, top_p: float = 1.0) -> Tensor:
    rows, vocab_size = scaled.shape
    floors = min_p_thresholds(torch.full((rows,), min_p, dtype=torch.float64))
    width = vocab_size if top_k is None else top_k
    top_ps = torch.full((rows,), top_p, dtype=torch.float64)
    return truncation_thresholds(scaled, floors, torch.full((rows,), width), top_ps, width)


def survivors(scaled: Tensor, *, min_p: float = 0.0, top_k: int | None = None, top_p: float = 1.0) -> Tensor:
    return scaled >= thresholds(scaled, min_p=min_p, top_k=top_k, top_p=top_p)[:, None]


def test_only_rows_of_finite_logits_are_valid() -> None:
    logits = torch.zeros(5, 17)
    logits[1, 16], logits[2, 0], logits[3, 8] = math.nan, math.inf, -math.inf
    assert finite_rows(logits).tolist() == [True, False, False, False, True]


def test_edits_touch_the_named_places_alone() -> None:
    original = random_logits(3, 10)
    logits = original.clone()
    allow_only(logits, torch.tensor([0, 0]), torch.tensor([2, 7]))
    suppress(logits, torch.tensor([1]), torch.tensor([9]))
    add_bias(logits, torch.tensor([1, 2]), torch.tensor([3, 3]), torch.tensor([5.0, -100.0]))
    expected = torch.full((3, 10), -math.inf)
    expected[0, [2, 7]] = original[0, [2, 7]]
    expected[1:] = original[1:]
    expected[1, 9] = -math.inf
    expected[1, 3] += 5.0
    expected[2, 3] -= 100.0
    assert torch.equal(logits, expected)


def test_repetition_penalty_is_that_of_transformers() -> None:
    histories = torch.tensor([[3, 3, 5, 0], [7, 1, 9, 7]])
    logits = random_logits(2, 10)
    expected = RepetitionPenaltyLogitsProcessor(1.7)(histories, logits.clone())
    penalise_each(logits, histories, 2, torch.tensor([[1.7, 0.0, 0.0]] * 2))
    assert torch.equal(logits, expected)


def test_presence_and_frequency_penalties_count_output_tokens_alone() -> None:
    logits = torch.tensor([[1.0, -1.0, 2.0, -2.0, 0.5]])
    # Prompt: tokens 0 and 1. Output: 1, 2, 2, 3.
    penalise_each(logits, torch.tensor([[0, 1, 1, 2, 2, 3]]), 2, torch.tensor([[2.0, 0.25, 0.5]]))
    expected = [1 / 2, -1 * 2 - 0.5 - 0.25, 2 / 2 - 2 * 0.5 - 0.25, -2 * 2 - 0.5 - 0.25, 0.5]
    assert logits[0].tolist() == expected


def test_each_row_has_its_own_penalties() -> None:
    logits = torch.ones(2, 3)
    penalise_each(logits, torch.tensor([[1], [1]]), 0, torch.tensor([[4.0, 0.0, 0.0], [1.0, 0.0, -1.0]]))
    assert logits.tolist() == [[1.0, 0.25, 1.0], [1.0, 2.0, 1.0]]


@pytest.mark.parametrize("temperature", [1e-45, 1e-6, 0.3, 1.0, 100.0])
def test_scaled_logits_have_their_best_at_zero_at_any_temperature(temperature: float) -> None:
    logits = random_logits(4, 33) * 1000
    scaled = scale(logits, torch.full((4,), temperature))
    assert (scaled.amax(-1) == 0).all()
    assert not scaled.isnan().any()
    assert torch.equal(scaled.argmax(-1), logits.argmax(-1))
    if temperature >= 0.3:
        expected = (logits.double() / temperature).softmax(-1)
        torch.testing.assert_close(scaled.double().softmax(-1), expected, rtol=1e-3, atol=1e-9)


# transformers computes cumulative sums in float32, so the probabilities here are none that lie on its edge.
@pytest.mark.parametrize("vocab_size", [15, 17, 129, 3001])
@pytest.mark.parametrize("amount", [0.1, 0.5, 0.9, 0.97])
def test_truncation_keeps_what_transformers_keeps(vocab_size: int, amount: float) -> None:
    scaled = scale(random_logits(16, vocab_size, seed=vocab_size), torch.ones(16))
    unused = cast(torch.LongTensor, torch.zeros(16, 1, dtype=torch.int64))
    top_k = max(1, int(vocab_size * amount))
    for kept, warper in (
        (survivors(scaled, top_k=top_k), TopKLogitsWarper(top_k)),
        (survivors(scaled, top_p=amount), TopPLogitsWarper(amount)),
        (survivors(scaled, min_p=amount), MinPLogitsWarper(amount)),
    ):
        assert torch.equal(kept, warper(unused, scaled.clone()) > -math.inf)


def test_truncations_act_in_order_and_top_p_on_what_is_left() -> None:
    probabilities = np.array([0.4, 0.3, 0.2, 0.06, 0.04])
    scaled = scale(torch.tensor(np.log(probabilities), dtype=torch.float32)[None], torch.ones(1))
    assert survivors(scaled, top_p=0.75).sum() == 3  # 0.4 + 0.3 < 0.75
    # Of the first three the sums are 0.44, 0.78 and 1: two are enough.
    assert survivors(scaled, top_k=3, top_p=0.75).sum() == 2
    # min-p at half of the best leaves three, and top-k does not bring more back.
    assert survivors(scaled, min_p=0.49, top_k=4).sum() == 3
    assert survivors(scaled, min_p=0.49, top_p=0.75).sum() == 2
    assert survivors(scaled, min_p=0.49, top_k=2, top_p=0.999).sum() == 2


def test_equals_at_the_edge_survive_together() -> None:
    scaled = torch.tensor([[0.0, -1.0, -1.0, -1.0, -5.0]])
    assert survivors(scaled, top_k=2).tolist() == [[True, True, True, True, False]]
    # e^-1 = 0.368: of the sum 2.11 the best has 0.475, so the nucleus of 0.5 ends at one of the three equals.
    assert survivors(scaled, top_p=0.5).tolist() == [[True, True, True, True, False]]


def test_the_best_token_always_survives() -> None:
    scaled = scale(random_logits(8, 100), torch.ones(8))
    assert (survivors(scaled, min_p=1.0, top_k=1, top_p=1e-30).sum(-1) == 1).all()


def test_truncation_that_is_off_keeps_all_but_barred_tokens() -> None:
    scaled = scale(random_logits(2, 50) * 1000, torch.ones(2))  # most have no weight at all
    scaled[:, 3] = -math.inf
    kept = survivors(scaled)
    assert kept.sum(-1).tolist() == [49, 49]
    assert not kept[:, 3].any()
    assert min_p_thresholds(torch.zeros(1, dtype=torch.float64)).item() == NO_THRESHOLD


@pytest.mark.parametrize("vocab_size", [1, 2, 17, 3001])
@pytest.mark.parametrize("step", [0.0, 0.5, 8.0], ids=["no ties", "some ties", "mostly ties"])
def test_best_tokens_are_in_order_and_equals_by_rising_id(vocab_size: int, step: float) -> None:
    logits = random_logits(12, vocab_size, seed=vocab_size)
    if step:
        logits = (logits / step).round() * step  # has both zeros
    logits[0, ::2] = -math.inf
    logits[1] = -math.inf
    for num_best in {0, 1, min(5, vocab_size), vocab_size - 1, vocab_size}:
        expected = logits.sort(dim=-1, descending=True, stable=True).indices[:, :num_best]
        assert torch.equal(best_tokens(logits, num_best), expected)
        assert torch.equal(best_tokens(logits[3:4], num_best), expected[3:4])


def test_ranks_count_what_is_strictly_more_likely() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, -2.0, 0.0], [0.0, 0.0, 0.0, 0.0, 0.0]])
    assert token_ranks(logits, torch.tensor([[2, 0, 3], [0, 4, 2]])).tolist() == [[1, 3, 5], [1, 1, 1]]


@pytest.mark.parametrize("top_p", [0.1, 0.5, 0.999])
def test_a_threshold_depends_on_its_row_alone(top_p: float) -> None:
    scaled = scale(random_logits(9, 50257), torch.ones(9))  # more than one chunk of rows
    floors = torch.full((9,), NO_THRESHOLD)
    top_ks = torch.tensor([50257, 40, 1, 1000, 50257, 127, 128, 129, 50000])
    top_ps = torch.full((9,), top_p, dtype=torch.float64)
    together = truncation_thresholds(scaled, floors, top_ks, top_ps, 50257)
    for i in range(9):
        row = slice(i, i + 1)
        alone = truncation_thresholds(scaled[row], floors[row], top_ks[row], top_ps[row], int(top_ks[i]))
        assert torch.equal(alone, together[row])
