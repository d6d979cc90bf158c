"""The edits that seats ask for on their rows of logits: allowed and suppressed ids, bias, penalties.

They turn parameters into tensors once for all rows of a step. What is off costs nothing, and a row is edited the same
whatever else is in the batch. What is edited may be logits or log-probabilities.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from common.sampling_params import SequenceSampling
from kernels.sampling.sampling import add_bias, allow_only, suppress
from tests.kernels.penalties import apply_penalties


@dataclass(frozen=True, slots=True)
class TokenHistory:
    """The tokens of a seat before the one that is sampled; the prompt comes first."""

    token_ids: Tensor | Sequence[int]
    num_prompt_tokens: int


def edit_rows(
    logits: Tensor,
    seats: Sequence[SequenceSampling],
    positions: Sequence[int],
    histories: Sequence[TokenHistory | None],
) -> Tensor:
    """Allowed and suppressed ids, bias, penalties, on a copy; the logits themselves if no seat has any."""
    allowed: list[Sequence[int]] = [seat.allowed_token_ids or () for seat in seats]
    suppressed = [
        seat.suppressed_token_ids if position < seat.suppressed_until else ()
        for seat, position in zip(seats, positions, strict=True)
    ]
    biases = [_sum_by_token(seat.logit_bias) for seat in seats]
    has_penalties = any(seat.needs_history for seat in seats)
    if not (any(allowed) or any(suppressed) or any(biases) or has_penalties):
        return logits
    logits = logits.clone()
    if any(allowed):
        allow_only(logits, *_pairs(allowed, logits.device))
    if any(suppressed):
        suppress(logits, *_pairs(suppressed, logits.device))
    if any(biases):
        values = torch.tensor([value for bias in biases for value in bias.values()], dtype=torch.float32)
        add_bias(logits, *_pairs([tuple(bias) for bias in biases], logits.device), values.to(logits.device))
    if has_penalties:
        _penalise(logits, seats, histories)
    return logits


def _penalise(logits: Tensor, seats: Sequence[SequenceSampling], histories: Sequence[TokenHistory | None]) -> None:
    rows, token_ids, is_output = [], [], []
    for row, (seat, history) in enumerate(zip(seats, histories, strict=True)):
        if not seat.needs_history:
            continue
        assert history is not None, "a seat with penalties comes with its history"
        tokens = torch.as_tensor(history.token_ids, dtype=torch.int64, device=logits.device)
        rows.append(torch.full_like(tokens, row))
        token_ids.append(tokens)
        is_output.append(torch.arange(len(tokens), device=logits.device) >= history.num_prompt_tokens)
    penalties = torch.tensor(
        [(seat.repetition_penalty, seat.presence_penalty, seat.frequency_penalty) for seat in seats],
        dtype=torch.float32,
        device=logits.device,
    )
    apply_penalties(logits, torch.cat(rows), torch.cat(token_ids), torch.cat(is_output), penalties)


def _sum_by_token(logit_bias: Sequence[tuple[int, float]]) -> dict[int, float]:
    biases: dict[int, float] = {}
    for token_id, bias in logit_bias:
        biases[token_id] = biases.get(token_id, 0.0) + bias
    return biases


def _pairs(lists: Sequence[Sequence[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """The token ids of all rows as flat int64 pairs: row, token id."""
    counts = torch.tensor([len(tokens) for tokens in lists])
    rows = torch.arange(len(lists)).repeat_interleave(counts)
    token_ids = torch.from_numpy(np.concatenate([np.asarray(tokens, dtype=np.int64) for tokens in lists]))
    return rows.to(device), token_ids.to(device)
