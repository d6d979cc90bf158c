"""Choosing a token for each sample of a step without waiting for the device: the parameters, and the torch reference.

The kernel is `token_choice`. Parameters are parallel arrays, so one call takes any mix of greedy and drawn
samples. Knows nothing of seats, seeds or edits: keys and edited logits are given.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.sampling.sampling import draw, scale, truncation_thresholds


@dataclass(frozen=True, slots=True)
class SampleRows:
    """Parameters of S samples; all tensors are on the device of the logits and contiguous."""

    logit_rows: Tensor  # int32 [S]: the row of raw logits of each sample; a row may serve several
    temperatures: Tensor  # float32 [S]; 0 is greedy and ignores the fields below
    floors: Tensor  # float32 [S], from `min_p_thresholds`: the lowest scaled logit that min-p keeps
    top_k: Tensor  # int32 [S] in [1, V]; V is off
    top_p: Tensor  # float64 [S]; 1 is off
    keys: Tensor  # int64 [S], from `row_keys`
    selecting: Tensor  # int32 [N], ascending: samples that are not greedy and have top-k or top-p on
    all_greedy: bool  # then no noise is computed

    def __len__(self) -> int:
        return len(self.logit_rows)


@dataclass(frozen=True, slots=True)
class ChosenTokens:
    """One token for each sample, in their order."""

    token_ids: Tensor  # int32 [S]; 0 where not valid
    valid: Tensor  # bool [S]: all raw logits were finite, and the edits left at least one token


def choose_tokens(logits: Tensor, rows: SampleRows, edited: Tensor | None = None) -> ChosenTokens:
    """Choose the argmax for greedy samples and draw the others; the lowest id wins a tie.

    A draw is by scaled logits (`scale`) and noise, among the tokens that min-p, top-k and top-p keep
    (`truncation_thresholds`). Never waits for the device.

    logits: [L, V], raw, any floating dtype; they alone decide whether a row is finite
    edited: float32 [S, V], from which sample i chooses instead of its row of `logits`
    """
    raw = logits.float().index_select(0, rows.logit_rows)
    valid = raw.isfinite().all(-1)
    if edited is None:
        edited = raw
    else:
        valid &= edited.amax(-1).isfinite()
    token_ids = edited.argmax(-1)
    if not rows.all_greedy:
        token_ids = torch.where(rows.temperatures == 0, token_ids, _draw(edited, rows))
    return ChosenTokens(torch.where(valid, token_ids, 0).to(torch.int32), valid)


def _draw(logits: Tensor, rows: SampleRows) -> Tensor:
    scaled = scale(logits, rows.temperatures)
    thresholds = rows.floors.clone()
    vocab_size = logits.shape[1]
    for selecting, width in _groups_to_order(rows, vocab_size):
        some_scaled, floors, top_k, top_p = (
            column.index_select(0, selecting) for column in (scaled, rows.floors, rows.top_k, rows.top_p)
        )
        some = truncation_thresholds(some_scaled, floors, top_k.to(torch.int64), top_p, width)
        thresholds.index_copy_(0, selecting.to(torch.int64), some)
    return draw(scaled, thresholds, rows.keys)


def _groups_to_order(rows: SampleRows, vocab_size: int) -> list[tuple[Tensor, int]]:
    """Samples whose largest logits must be sorted, in groups, with the number of logits that each group needs.

    On a CPU samples with top-k form their own group: they sort few logits. Elsewhere a split makes the host wait.
    """
    if not rows.selecting.is_cpu:
        groups = [(rows.selecting, vocab_size)]
    else:
        top_k = rows.top_k.index_select(0, rows.selecting)
        with_top_k, without = rows.selecting[top_k < vocab_size], rows.selecting[top_k == vocab_size]
        widest = int(top_k[top_k < vocab_size].max()) if len(with_top_k) else 0
        groups = [(with_top_k, widest), (without, vocab_size)]
    return [(selecting, width) for selecting, width in groups if len(selecting)]
