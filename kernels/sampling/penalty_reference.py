"""Penalties of tokens that a sequence contains already: their parameters, and the torch reference of the kernel.

The kernel is `logit_penalties`. Histories are read in place from the token table of all seats on the device, so a
token that the host does not know yet counts too. Knows nothing of other edits of logits.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class PenaltyRows:
    """Parameters of E rows with penalties; all tensors are on the device of the logits and contiguous."""

    logit_rows: Tensor  # int32 [E], no row twice
    seats: Tensor  # int32 [E]: rows of the token table
    lengths: Tensor  # int32 [E]: tokens of the history, prompt and output
    num_prompt: Tensor  # int32 [E]
    penalties: Tensor  # float32 [E, 3]: repetition, presence, frequency
    max_length: int  # the largest of `lengths`

    def __len__(self) -> int:
        return len(self.logit_rows)


def penalise(logits: Tensor, rows: PenaltyRows, token_table: Tensor) -> None:
    """Penalise in place the tokens of each row's history.

    Repetition divides positive and multiplies negative logits of all tokens that occur. Then frequency is subtracted
    for each occurrence in the output, then presence once for tokens in the output. Never waits for the device.

    logits:      float32 [S, V], V contiguous
    token_table: int32 [num_seats, width]; a seat's history is its first `length` tokens
    """
    if len(rows) == 0 or rows.max_length == 0:
        return
    places = torch.arange(rows.max_length, device=logits.device)
    m_history = places < rows.lengths[:, None]
    m_output = m_history & (places >= rows.num_prompt[:, None])
    tokens = token_table.index_select(0, rows.seats)[:, : rows.max_length]
    tokens = torch.where(m_history, tokens, 0).to(torch.int64)
    counts = torch.zeros((2, len(rows), logits.shape[1]), dtype=torch.int32, device=logits.device)
    for count, mask in zip(counts, (m_history, m_output), strict=True):
        count.scatter_add_(1, tokens, mask.to(torch.int32))
    occurs, num_output = counts[0] > 0, counts[1]
    values = logits.index_select(0, rows.logit_rows)
    repetition, presence, frequency = (column[:, None] for column in rows.penalties.unbind(-1))
    penalised = torch.where(values < 0, values * repetition, values / repetition)
    penalised = penalised - frequency * num_output.to(torch.float32)
    penalised = penalised - presence * (num_output > 0)
    logits.index_copy_(0, rows.logit_rows.to(torch.int64), torch.where(occurs, penalised, values))
