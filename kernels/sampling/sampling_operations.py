"""From logits to tokens, candidates and log-probabilities: one bundle of operations, and its torch references.

`REFERENCES` need nothing but torch and run on any device; `kernels.native.native_sampling` is compiled for a CPU. With
Triton, `sampling_operations` gets the kernels that choose and penalise. No operation waits for the device.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from kernels.sampling import choice_reference, penalty_reference, sampling
from kernels.sampling.choice_reference import ChosenTokens, SampleRows
from kernels.sampling.logit_edits import LogitEdits, Penalise, apply_edits
from kernels.sampling.sampling import TokenLogprobs, best_tokens, finite_rows, model_logprobs

ChooseTokens = Callable[[Tensor, SampleRows, Tensor | None], ChosenTokens]
_MAX_LOGITS = 1 << 24  # logits per slice of log-probabilities: the sort keys then take 128 MiB


@dataclass(frozen=True, slots=True)
class RankedTokens:
    """The best tokens of C rows by edited log-probability, best first; on a tie the lower id first."""

    token_ids: Tensor  # int64 [C, K]
    logprobs: Tensor  # float32 [C, K]; -inf for a barred token
    valid: Tensor  # bool [C]: all raw logits were finite, and no edited log-probability is infinity


@dataclass(frozen=True, slots=True)
class SamplingOperations:
    """One implementation of the operations; arguments are given by position.

    Each takes logits [L, V] in any floating dtype, V contiguous, which it does not change. A token table is int32
    [num_seats, width] and is read for penalties.

    choose_tokens: logits, rows, edits of the samples' rows or None, token table
    rank_tokens: logits, logit rows int32 [C], K, edits of these rows or None, token table. As in the beam search of
        `transformers`, edits change log-probabilities, which are not normalised again.
    token_logprobs: logits, logit rows int32 [n], token ids int64 [n, T], number of the most likely tokens; no edits
    """

    choose_tokens: Callable[[Tensor, SampleRows, LogitEdits | None, Tensor], ChosenTokens]
    rank_tokens: Callable[[Tensor, Tensor, int, LogitEdits | None, Tensor], RankedTokens]
    token_logprobs: Callable[[Tensor, Tensor, Tensor, int], TokenLogprobs]


def sampling_operations(choose: ChooseTokens, penalise: Penalise) -> SamplingOperations:
    """Bundle of torch operations, with `choose` and `penalise` as given: kernels or references."""
    return SamplingOperations(
        choose_tokens=partial(_choose_tokens, choose, penalise),
        rank_tokens=partial(_rank_tokens, penalise),
        token_logprobs=_token_logprobs,
    )


def _choose_tokens(
    choose: ChooseTokens,
    penalise: Penalise,
    logits: Tensor,
    rows: SampleRows,
    edits: LogitEdits | None,
    token_table: Tensor,
) -> ChosenTokens:
    if edits is None:
        return choose(logits, rows, None)
    edited = _copy_rows(logits, rows.logit_rows)
    apply_edits(edited, edits, penalise, token_table)
    return choose(logits, rows, edited)


def _rank_tokens(
    penalise: Penalise,
    logits: Tensor,
    logit_rows: Tensor,
    num_best: int,
    edits: LogitEdits | None,
    token_table: Tensor,
) -> RankedTokens:
    logits = _copy_rows(logits, logit_rows)
    logprobs = model_logprobs(logits)
    if edits is not None:
        logprobs = logprobs.clone(memory_format=torch.contiguous_format)
        apply_edits(logprobs, edits, penalise, token_table)
    token_ids = best_tokens(logprobs, num_best)
    valid = finite_rows(logits) & (logprobs.amax(-1) < torch.inf)
    return RankedTokens(token_ids, logprobs.gather(1, token_ids), valid)


def _token_logprobs(logits: Tensor, logit_rows: Tensor, token_ids: Tensor, num_top: int) -> TokenLogprobs:
    """Compute log-probabilities in slices, which limits the memory of float32 copies."""
    size = max(1, _MAX_LOGITS // logits.shape[1])
    return concatenate(
        [
            sampling.token_logprobs(_copy_rows(logits, some_rows), some_ids, num_top)
            for some_rows, some_ids in zip(torch.split(logit_rows, size), torch.split(token_ids, size), strict=True)
        ]
    )


def concatenate(parts: Sequence[TokenLogprobs]) -> TokenLogprobs:
    """Join parts that were computed separately."""
    return TokenLogprobs(*map(torch.cat, zip(*parts, strict=True)))


def _copy_rows(logits: Tensor, logit_rows: Tensor) -> Tensor:
    """Copy some rows in float32."""
    return logits.index_select(0, logit_rows).to(torch.float32)


REFERENCES = sampling_operations(choice_reference.choose_tokens, penalty_reference.penalise)
