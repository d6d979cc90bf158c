"""Checks the sampling parameters of a seat against their ranges and the vocabulary.

The scheduler has checked a client's parameters; this check keeps a fault of the scheduler from failing a whole batch.
"""

import math
from collections.abc import Sequence

import numpy as np

from common.bounds import MOST_GRAMMAR_CHARS
from common.sampling_params import NUMERIC_PARAMS, SequenceSampling
from worker_svc.steps.step_limits import InvalidStepError


def check_sampling(where: str, sampling: SequenceSampling, vocab_size: int) -> None:
    """Raises InvalidStepError with the field's path."""
    _check_token_ids(f"{where}.allowed_ids", sampling.allowed_token_ids or (), vocab_size)
    _check_token_ids(f"{where}.suppressed_ids", sampling.suppressed_token_ids, vocab_size)
    _check_token_ids(f"{where}.bias_ids", tuple(token for token, _ in sampling.logit_bias), vocab_size)
    _check(f"{where}.bias_values", all(math.isfinite(bias) for _, bias in sampling.logit_bias), "be finite")
    if len(sampling.grammar) > MOST_GRAMMAR_CHARS:
        raise InvalidStepError(
            f"{where}.grammar has {len(sampling.grammar):,} characters: at most {MOST_GRAMMAR_CHARS:,}"
        )
    for each in NUMERIC_PARAMS:
        value = getattr(sampling, each.name)
        _check(f"{where}.numbers.{each.name}", value == each.default or each.allows(value), f"be {each.range}")


def _check(where: str, holds: bool, must: str) -> None:
    if not holds:
        raise InvalidStepError(f"{where} must {must}")


def _check_token_ids(where: str, token_ids: Sequence[int], vocab_size: int) -> None:
    ids = np.asarray(token_ids)
    if len(ids) and not 0 <= ids.min() <= ids.max() < vocab_size:
        raise InvalidStepError(f"{where} names a token id outside the vocabulary of {vocab_size}")
