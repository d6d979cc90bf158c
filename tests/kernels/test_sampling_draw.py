"""The draw and the log-probabilities: one answer however it is computed, and lowest ids on ties."""

import math

import numpy as np
import pytest
import torch
from scipy import special

from kernels.sampling.noise import gumbel, noise_bits, row_keys
from kernels.sampling.sampling import NO_THRESHOLD, draw, draw_dense, draw_sparse, scale, token_logprobs

torch.set_num_threads(1)  # on contended cores two threads mostly wait for each other


def random_logits(rows: int, vocab_size: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * 3


@pytest.mark.parametrize("vocab_size", [1, 15, 17, 1000, 50257])
@pytest.mark.parametrize("threshold", [0.0, -1.0, -8.0, NO_THRESHOLD])
def test_dense_and_sparse_draws_give_the_same_tokens(vocab_size: int, threshold: float) -> None:
    scaled = scale(random_logits(9, vocab_size), torch.ones(9))
    thresholds = torch.full((9,), threshold)
    keys = row_keys(list(range(9)), [0] * 9, [5] * 9)
    dense = draw_dense(scaled, thresholds, keys)
    assert torch.equal(dense, draw_sparse(scaled, scaled >= threshold, keys))
    assert torch.equal(dense, draw(scaled, thresholds, keys))


def test_the_draw_is_the_argmax_of_logit_plus_noise_over_survivors() -> None:
    scaled = scale(random_logits(200, 64), torch.full((200,), 2.0))
    keys = row_keys([3] * 200, [0] * 200, list(range(200)))
    noise = gumbel(noise_bits(keys[:, None], torch.arange(64, dtype=torch.int32))).numpy()
    perturbed = np.where(scaled.numpy() >= -2.0, scaled.numpy().astype(np.float64) + noise, -np.inf)
    drawn = draw(scaled, torch.full((200,), -2.0), keys)
    assert drawn.tolist() == perturbed.argmax(-1).tolist()
    assert len(set(drawn.tolist())) > 20


def test_barred_tokens_are_never_drawn() -> None:
    scaled = torch.full((300, 32), -math.inf)
    scaled[:, 7] = 0.0
    scaled[:, 30] = -20.0
    keys = row_keys([1] * 300, [0] * 300, list(range(300)))
    off = torch.full((300,), NO_THRESHOLD)
    assert set(draw(scaled, off, keys).tolist()) == {7}
    assert set(draw_dense(scaled, off, keys).tolist()) == {7}


@pytest.mark.parametrize("vocab_size", [8, 17, 1000, 50257])
def test_logprobs_are_those_of_the_raw_distribution(vocab_size: int) -> None:
    logits = random_logits(5, vocab_size)
    tokens = torch.arange(5)
    result = token_logprobs(logits, tokens[:, None], 4)
    exact = special.log_softmax(logits.numpy().astype(np.float64), axis=-1)
    order = np.argsort(-logits.numpy(), axis=-1, kind="stable")
    np.testing.assert_allclose(result.logprobs[:, 0], exact[np.arange(5), tokens], atol=2e-5)
    assert result.top_token_ids.tolist() == order[:, :4].tolist()
    np.testing.assert_allclose(result.top_logprobs, np.take_along_axis(exact, order[:, :4], 1), atol=2e-5)
    assert result.ranks.tolist() == [[order[row].tolist().index(row) + 1] for row in range(5)]


def test_most_likely_tokens_come_with_lower_ids_first_among_equals() -> None:
    logits = torch.tensor([[-0.0, 1.0, 0.0, 1.0, -3.0, -0.0], [-1.0, -2.0, -1.0, -2.0, -2.0, -1.0]])
    result = token_logprobs(logits, torch.tensor([[2, 4], [4, 0]]), 100)
    assert result.top_token_ids.tolist() == [[1, 3, 0, 2, 5, 4], [0, 2, 5, 1, 3, 4]]
    assert result.ranks.tolist() == [[3, 6], [4, 1]]  # equals share the better rank


def test_no_top_tokens_are_an_empty_table() -> None:
    result = token_logprobs(random_logits(3, 20), torch.tensor([[1], [2], [3]]), 0)
    assert result.top_token_ids.shape == result.top_logprobs.shape == (3, 0)


def test_no_rows_are_an_empty_table() -> None:
    result = token_logprobs(torch.empty(0, 20), torch.empty(0, 2, dtype=torch.int64), 3)
    assert result.logprobs.shape == result.ranks.shape == (0, 2)
    assert result.top_token_ids.shape == result.top_logprobs.shape == (0, 3)
