"""Checks the sampling parameters of a slot against their ranges and the vocabulary.

The scheduler has checked a client's parameters; this check keeps a fault of the scheduler from failing a whole batch.
"""

import math
from collections.abc import Sequence

import numpy as np

from common.slot_sampling import SlotSampling
from worker_svc.steps.step_limits import InvalidStepError


def check_sampling(where: str, sampling: SlotSampling, vocab_size: int) -> None:
    """Raises InvalidStepError with the field's path."""
    _check_token_ids(f"{where}.allowed_ids", sampling.allowed_token_ids or (), vocab_size)
    _check_token_ids(f"{where}.suppressed_ids", sampling.suppressed_token_ids, vocab_size)
    _check_token_ids(f"{where}.bias_ids", tuple(token for token, _ in sampling.logit_bias), vocab_size)
    _check(f"{where}.bias_values", all(math.isfinite(bias) for _, bias in sampling.logit_bias), "be finite")
    _check(f"{where}.temperature", 0.0 <= sampling.temperature < math.inf, "be 0 or positive")
    _check(f"{where}.top_k", sampling.top_k is None or sampling.top_k >= 1, "be at least 1")
    _check(f"{where}.top_p", 0.0 < sampling.top_p <= 1.0, "be above 0 and at most 1")
    _check(f"{where}.min_p", 0.0 <= sampling.min_p <= 1.0, "be within 0 and 1")
    _check(f"{where}.repetition_penalty", 0.0 < sampling.repetition_penalty < math.inf, "be positive")
    _check(f"{where}.presence_penalty", math.isfinite(sampling.presence_penalty), "be finite")
    _check(f"{where}.frequency_penalty", math.isfinite(sampling.frequency_penalty), "be finite")


def _check(where: str, holds: bool, must: str) -> None:
    if not holds:
        raise InvalidStepError(f"{where} must {must}")


def _check_token_ids(where: str, token_ids: Sequence[int], vocab_size: int) -> None:
    ids = np.asarray(token_ids)
    if len(ids) and not 0 <= ids.min() <= ids.max() < vocab_size:
        raise InvalidStepError(f"{where} names a token id outside the vocabulary of {vocab_size}")
