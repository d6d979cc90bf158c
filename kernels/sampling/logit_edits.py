"""Edits of rows of logits: masks, allowed and suppressed ids, bias and penalties, as arrays over all rows of a step.

The edits of a row do not depend on the rest of the batch. Log-probabilities are edited in the same way. Knows no seats
and no parameters of requests.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kernels.sampling.penalty_reference import PenaltyRows
from kernels.sampling.sampling import add_bias, allow_only, keep_masked, suppress

Penalise = Callable[[Tensor, PenaltyRows, Tensor], None]  # `penalty_reference.penalise`, or the kernel


@dataclass(frozen=True, slots=True)
class TokenPairs:
    """Elements of the logits, int64 [N] each, contiguous, in ascending row order."""

    rows: Tensor
    token_ids: Tensor


@dataclass(frozen=True, slots=True)
class TokenMasks:
    """Tokens that can be chosen in M rows, a bit each: bit t % 32 of words[m, t // 32] is token t's in row rows[m]."""

    rows: Tensor  # int64 [M], none twice
    words: Tensor  # int32 [M, W], W = ceil(V / 32), contiguous


@dataclass(frozen=True, slots=True)
class LogitEdits:
    """Edits of [S, V] logits; a kind that no row uses is None."""

    allowed: TokenPairs | None = None
    suppressed: TokenPairs | None = None
    biased: TokenPairs | None = None  # no pair twice
    biases: Tensor | None = None  # float32, beside `biased`
    penalties: PenaltyRows | None = None
    masks: TokenMasks | None = None  # which act first


def with_masks(edits: LogitEdits | None, masks: TokenMasks | None) -> LogitEdits | None:
    """Add masks to the other edits, of other rows than have masks already; None if there are neither."""
    if masks is None or edits is None:
        return edits if masks is None else LogitEdits(masks=masks)
    if edits.masks is not None:
        pairs = zip((edits.masks.rows, edits.masks.words), (masks.rows, masks.words), strict=True)
        masks = TokenMasks(*map(torch.cat, pairs))
    return replace(edits, masks=masks)


def apply_edits(logits: Tensor, edits: LogitEdits, penalise: Penalise, token_table: Tensor) -> None:
    """Edit `logits` float32 [S, V] in place; `token_table` int32 [num_seats, width] is read for penalties."""
    if edits.masks is not None:
        keep_masked(logits, edits.masks.rows, edits.masks.words)
    if edits.allowed is not None:
        allow_only(logits, edits.allowed.rows, edits.allowed.token_ids)
    if edits.suppressed is not None:
        suppress(logits, edits.suppressed.rows, edits.suppressed.token_ids)
    if edits.biased is not None and edits.biases is not None:
        add_bias(logits, edits.biased.rows, edits.biased.token_ids, edits.biases)
    if edits.penalties is not None:
        penalise(logits, edits.penalties, token_table)
