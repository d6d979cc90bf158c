"""Sampling parameters as arrays over all seats, so that a step gathers its parameters without a loop.

A seat's columns are set when the seat is placed. Values that do not change from token to token, such as noise keys
without the position and the ids of edits, are kept in the form that the device takes. Knows no tokens and no device.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntFlag

import numpy as np
import numpy.typing as npt
import torch

from common.sampling_params import SequenceSampling
from common.step import SequenceState
from kernels.sampling.noise import partial_keys, position_keys
from kernels.sampling.sampling import NO_THRESHOLD, min_p_thresholds
from worker_svc.steps.step_check import IntArray

Float32Array = npt.NDArray[np.float32]
WordArray = npt.NDArray[np.int32]


class Feature(IntFlag):
    """Parameters that are on for a seat, so that a step skips unused ones; 0 is greedy without edits."""

    DRAWS = 1  # is not greedy
    SELECTS = 2  # draws with top-k or top-p
    PENALTIES = 4
    ALLOWED_IDS = 8
    SUPPRESSED_IDS = 16
    BIAS = 32
    LOGPROBS = 64
    GRAMMAR = 128
    FORCES_TEXT = 256
    ALLOWED_MASK = 512

    EDITS = PENALTIES | ALLOWED_IDS | ALLOWED_MASK | SUPPRESSED_IDS | BIAS


@dataclass(frozen=True, slots=True)
class EditedIds:
    """Token ids of one seat's edits."""

    allowed: IntArray
    suppressed: IntArray
    biased: IntArray  # distinct
    biases: Float32Array  # beside `biased`
    mask: WordArray | None = None  # many allowed ids instead, a bit for each token, as `TokenMasks` has them


_WORD_BITS = 32
_NONE: IntArray = np.zeros(0, dtype=np.int64)
_NO_IDS = EditedIds(_NONE, _NONE, _NONE, _NONE.astype(np.float32))


class SamplingColumns:
    """Columns [num_seats] of the placed seats. Only the thread that executes steps uses them."""

    def __init__(self, num_seats: int, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self.features: IntArray = np.zeros(num_seats, dtype=np.int64)
        self.temperatures = np.zeros(num_seats, dtype=np.float32)
        self.floors = np.zeros(num_seats, dtype=np.float32)
        self.top_k = np.full(num_seats, vocab_size, dtype=np.int32)
        self.top_p = np.ones(num_seats, dtype=np.float64)
        self.penalties = np.zeros((num_seats, 3), dtype=np.float32)  # repetition, presence, frequency
        self.suppressed_until = np.zeros(num_seats, dtype=np.int64)
        self.num_logprobs: IntArray = np.zeros(num_seats, dtype=np.int64)
        self.num_prompt_tokens = np.zeros(num_seats, dtype=np.int32)
        self.edited_ids = np.full(num_seats, _NO_IDS, dtype=np.object_)
        self._keys = np.zeros(num_seats, dtype=np.int64)

    def apply(self, whole: Sequence[SequenceState]) -> None:
        """Place the seats that a checked step describes."""
        for state in whole:
            self.place(state.seat, state.sampling, state.num_prompt_tokens)

    def place(self, seat: int, sampling: SequenceSampling, num_prompt_tokens: int) -> None:
        """Set the columns of a seat."""
        edited = self.edited_ids[seat] = _edited_ids(sampling, self.vocab_size)
        self.features[seat] = self._features(sampling, edited)
        self.temperatures[seat] = sampling.temperature
        self.floors[seat] = _floor(sampling.min_p)
        self.top_k[seat] = self._top_k(sampling)
        self.top_p[seat] = sampling.top_p
        self.penalties[seat] = (
            sampling.repetition_penalty,
            sampling.presence_penalty,
            sampling.frequency_penalty,
        )
        self.suppressed_until[seat] = sampling.suppressed_until
        self.num_logprobs[seat] = sampling.num_logprobs or 0
        self.num_prompt_tokens[seat] = num_prompt_tokens
        self._keys[seat] = partial_keys([sampling.seed], [sampling.sample_index])[0]

    def keys(self, seats: IntArray, positions: IntArray) -> IntArray:
        """Noise keys of the tokens to sample, int64, equal to those of `row_keys`."""
        return position_keys(self._keys[seats], positions)

    def _top_k(self, sampling: SequenceSampling) -> int:
        return self.vocab_size if sampling.top_k is None else min(sampling.top_k, self.vocab_size)

    def _features(self, sampling: SequenceSampling, edited: EditedIds) -> Feature:
        selects = self._top_k(sampling) < self.vocab_size or sampling.top_p < 1
        is_on = {
            Feature.DRAWS: not sampling.is_greedy,
            Feature.SELECTS: not sampling.is_greedy and selects,
            Feature.PENALTIES: sampling.has_penalties,
            Feature.ALLOWED_IDS: len(edited.allowed) > 0,
            Feature.ALLOWED_MASK: edited.mask is not None,
            Feature.SUPPRESSED_IDS: bool(sampling.suppressed_token_ids),
            Feature.BIAS: bool(sampling.logit_bias),
            Feature.LOGPROBS: sampling.num_logprobs is not None,
            Feature.GRAMMAR: bool(sampling.grammar),
            Feature.FORCES_TEXT: bool(sampling.grammar) and sampling.forces_text,
        }
        features = Feature(0)
        for feature, on in is_on.items():
            if on:
                features |= feature
        return features


def _floor(min_p: float) -> float:
    return min_p_thresholds(torch.tensor([min_p], dtype=torch.float64)).item() if min_p else NO_THRESHOLD


def _mask_of(token_ids: IntArray, vocab_size: int) -> WordArray:
    bits = np.zeros(-(-vocab_size // _WORD_BITS) * _WORD_BITS, dtype=np.bool_)
    bits[token_ids] = True
    return np.packbits(bits, bitorder="little").view(np.int32)


def _edited_ids(sampling: SequenceSampling, vocab_size: int) -> EditedIds:
    if not (sampling.allowed_token_ids or sampling.suppressed_token_ids or sampling.logit_bias):
        return _NO_IDS
    biases: dict[int, float] = {}
    for token_id, bias in sampling.logit_bias:
        biases[token_id] = biases.get(token_id, 0.0) + bias
    allowed = np.array(sampling.allowed_token_ids or (), dtype=np.int64)
    # Row and id of each take more than a bit for each token; a grammar's mask is the only one that a row may have.
    has_mask = 2 * allowed.nbytes > vocab_size // 8 and not sampling.grammar
    return EditedIds(
        allowed=_NONE if has_mask else allowed,
        suppressed=np.array(sampling.suppressed_token_ids, dtype=np.int64),
        biased=np.array(list(biases), dtype=np.int64),
        biases=np.array(list(biases.values()), dtype=np.float32),
        mask=_mask_of(allowed, vocab_size) if has_mask else None,
    )
