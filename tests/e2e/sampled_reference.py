"""Reference for samples: at each position the token that our noise chooses from the logits of `transformers`.

The noise and the truncation are the kernels' own, which have tests of their own; the logits are not ours.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

import quire
from common.sampling_params import SequenceSampling
from kernels.sampling.noise import gumbel, noise_bits, row_keys
from kernels.sampling.sampling import min_p_thresholds, scale, truncation_thresholds
from quire.params import GenerateParams
from tests.equality import assert_equal_greedy, comparable_length
from tests.worker.reference_edits import TokenHistory, edit_rows

_EDGE = 1e-5  # of probability: a token so near the edge of the nucleus may lie on either side of it


@dataclass(frozen=True, slots=True)
class ExpectedSample:
    """Expected tokens of a given output, their margins, and their log-probabilities."""

    token_ids: list[int]
    margins: list[float]  # gaps of the best two noise-perturbed logits; 0 where the edge of the nucleus decides
    logprobs: list[float]  # of the tokens of the given output


@torch.inference_mode()
def expected_sample(
    model: Any, prompt: Sequence[int], output: Sequence[int], sampling: SequenceSampling
) -> ExpectedSample:
    """Each token is judged behind the given ones before it."""
    tokens, first = [*prompt, *output], len(prompt)
    logits = model(torch.tensor([tokens[:-1]]), use_cache=False).logits[0, first - 1 :].float()
    positions = list(range(first, len(tokens)))
    histories = [TokenHistory(tokens[:position], first) for position in positions]
    edited = edit_rows(logits, [sampling] * len(positions), positions, histories)
    scaled = scale(edited, torch.full((len(positions),), sampling.temperature))
    keys = row_keys([sampling.seed] * len(positions), [sampling.sample_index] * len(positions), positions)
    noise = gumbel(noise_bits(keys[:, None], torch.arange(scaled.shape[1], dtype=torch.int32)))
    best = _perturbed(scaled, noise, sampling, 0.0).topk(2)
    chosen = best.indices[:, 0]
    margins = (best.values[:, 0] - best.values[:, 1]) * sampling.temperature
    if sampling.top_p < 1:
        for shift in (-_EDGE, _EDGE):
            margins[_perturbed(scaled, noise, sampling, shift).argmax(-1) != chosen] = 0.0
    logprobs = logits.log_softmax(-1).gather(1, torch.tensor(output)[:, None])[:, 0]
    return ExpectedSample(chosen.tolist(), margins.tolist(), logprobs.tolist())


def _perturbed(scaled: Tensor, noise: Tensor, sampling: SequenceSampling, shift: float) -> Tensor:
    """Scores of which the largest wins, with the nucleus that much larger."""
    num_rows, vocab_size = scaled.shape
    floors = min_p_thresholds(torch.full((num_rows,), sampling.min_p, dtype=torch.float64))
    top_k = torch.full((num_rows,), vocab_size)
    top_p = torch.full((num_rows,), min(sampling.top_p + shift, 1.0), dtype=torch.float64)
    thresholds = truncation_thresholds(scaled, floors, top_k, top_p, vocab_size)
    return (scaled + noise).masked_fill(scaled < thresholds[:, None], -torch.inf)


@dataclass(frozen=True, slots=True)
class Drawing:
    """A request for samples. `sampling` is that of the first; it may name no top_k, and nothing by token id."""

    prompt: list[int]
    sampling: SequenceSampling
    num_tokens: int
    n: int = 1

    def request(self) -> GenerateParams:
        """Every sample has its full length."""
        sampling = self.sampling
        return {
            "n": self.n,
            "seed": sampling.seed,
            "first_sample_index": sampling.sample_index,
            "temperature": sampling.temperature,
            "min_p": sampling.min_p,
            "top_p": sampling.top_p,
            "repetition_penalty": sampling.repetition_penalty,
            "presence_penalty": sampling.presence_penalty,
            "frequency_penalty": sampling.frequency_penalty,
            "max_tokens": self.num_tokens,
            "ignore_eos": True,
            "logprobs": 0,
        }

    def alone(self, index: int) -> "Drawing":
        """A request for sample `index` by itself."""
        sampling = replace(self.sampling, sample_index=self.sampling.sample_index + index)
        return replace(self, sampling=sampling, n=1)

    def expected(self, model: Any, sample: quire.Sample) -> ExpectedSample:
        """Compute the expected sample; its noise is that of the sample's index."""
        return expected_sample(model, self.prompt, sample.token_ids, self.alone(sample.index).sampling)


def assert_drawn(
    model: Any, drawings: Sequence[Drawing], completions: Sequence[quire.Completion]
) -> list[ExpectedSample]:
    """Assert that all samples are the expected ones; near ties are cut, printed and rare; log-probabilities within
    1e-4.

    Returns what was expected of each sample of each drawing, in order.
    """
    samples, expected = [], []
    for drawing, completion in zip(drawings, completions, strict=True):
        assert [each.index for each in completion.samples] == list(range(drawing.n))
        for sample in completion.samples:
            assert sample.sample_index == drawing.sampling.sample_index + sample.index
            assert len(sample.token_ids) == drawing.num_tokens
            samples.append(sample)
            expected.append(drawing.expected(model, sample))
    for sample, each in zip(samples, expected, strict=True):
        assert_logprobs_close(each, sample)
    tokens, margins = [each.token_ids for each in expected], [each.margins for each in expected]
    assert_equal_greedy(tokens, margins, [each.token_ids for each in samples])
    return expected


def assert_logprobs_close(expected: ExpectedSample, sample: quire.Sample) -> None:
    """Compare log-probabilities up to the first near tie."""
    found = [logprob.logprob for logprob in sample.logprobs]
    length = comparable_length(expected.margins)
    assert found[:length] == pytest.approx(expected.logprobs[:length], abs=1e-4)
