"""Penalties of the tokens of histories, from one pair of row and token for each occurrence."""

import torch
from torch import Tensor


def apply_penalties(logits: Tensor, rows: Tensor, token_ids: Tensor, is_output: Tensor, penalties: Tensor) -> None:
    """Penalise the tokens of histories, given as pairs [N] of row and token id, one for each occurrence.

    `is_output` bool [N] is True for output, False for prompt. `penalties` float32 [S, 3]: repetition divides positive
    and multiplies negative logits of all tokens that occur. Then frequency is subtracted for each occurrence in the
    output, then presence once for tokens in the output.
    """
    places = rows * logits.shape[1] + token_ids
    counts = torch.zeros(logits.numel(), dtype=torch.int32, device=logits.device)
    counts.scatter_add_(0, places, is_output.to(torch.int32))
    repetition, presence, frequency = penalties[rows].unbind(-1)
    # A token that occurs twice is computed twice, from the same old value, with the same result.
    count = counts[places].to(torch.float32)
    values = logits[rows, token_ids]
    values = torch.where(values < 0, values * repetition, values / repetition)
    values = values - frequency * count
    logits[rows, token_ids] = values - presence * (count > 0)
