"""From logits and the sampling parameters of seats to tokens: turns parameters into tensors and groups the rows.

What is off costs nothing, and a seat gets the same token and log-probabilities whatever else is in the batch.
It keeps no state between calls, and it knows nothing of sequences, blocks or the wire.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from common.sampling_params import SequenceSampling
from kernels.sampling.noise import row_keys
from kernels.sampling.sampling import (
    TokenLogprobs,
    draw,
    finite_rows,
    min_p_thresholds,
    scale,
    token_logprobs,
    truncation_thresholds,
)
from tests.worker.reference_edits import TokenHistory, edit_rows


@dataclass(frozen=True, slots=True)
class SampleOutput:
    """One sample for each row of logits, in their order."""

    token_ids: Tensor  # int64 [S] on the device of the logits; 0 where not valid
    valid: Tensor  # bool [S]: all logits were finite, and the seat's parameters left a token to choose
    logprobs: tuple[TokenLogprobs | None, ...]  # on the host, each with one row; None where not asked for


class Sampler:
    """Samples for any mix of seats at once."""

    def sample(
        self,
        logits: Tensor,
        seats: Sequence[SequenceSampling],
        positions: Sequence[int],
        histories: Sequence[TokenHistory | None],
    ) -> SampleOutput:
        """Sample row i of `logits` [S, V], which is not changed, as seats[i] says.

        positions[i] is the index, in prompt and output, of the token that is sampled. histories[i] is needed only
        where seats[i].needs_history. The same row may be given twice with different seats.
        """
        logits = logits.float()
        valid = finite_rows(logits)
        edited = edit_rows(logits, seats, positions, histories)
        if edited is not logits:
            valid &= edited.amax(-1).isfinite()
        token_ids = torch.where(valid, _choose(edited, seats, positions), 0)
        return SampleOutput(token_ids, valid, _logprobs(logits, token_ids, seats))


def _choose(logits: Tensor, seats: Sequence[SequenceSampling], positions: Sequence[int]) -> Tensor:
    """The argmax of greedy rows, a draw for the others; int64 [S]."""
    greedy = [i for i, seat in enumerate(seats) if seat.is_greedy]
    if len(greedy) == len(seats):
        return logits.argmax(-1)
    if not greedy:
        return _draw(logits, seats, positions)
    sampled = [i for i, seat in enumerate(seats) if not seat.is_greedy]
    greedy_rows = torch.tensor(greedy, device=logits.device)
    sampled_rows = torch.tensor(sampled, device=logits.device)
    drawn = _draw(logits[sampled_rows], [seats[i] for i in sampled], [positions[i] for i in sampled])
    token_ids = torch.empty(len(seats), dtype=torch.int64, device=logits.device)
    token_ids[greedy_rows] = logits[greedy_rows].argmax(-1)
    token_ids[sampled_rows] = drawn
    return token_ids


def _draw(logits: Tensor, seats: Sequence[SequenceSampling], positions: Sequence[int]) -> Tensor:
    """Temperature, truncation and noise, for seats of which none is greedy."""
    device, vocab_size = logits.device, logits.shape[1]
    scaled = scale(logits, torch.tensor([seat.temperature for seat in seats], dtype=torch.float32, device=device))
    min_p = torch.tensor([seat.min_p for seat in seats], dtype=torch.float64, device=device)
    thresholds = min_p_thresholds(min_p)
    # Apart, because with top-k only the largest few logits need sorting.
    has_top_k = [seat.top_k is not None and seat.top_k < vocab_size for seat in seats]
    with_top_k = [i for i, on in enumerate(has_top_k) if on]
    with_top_p_only = [i for i, on in enumerate(has_top_k) if not on and seats[i].top_p < 1]
    for chosen in (with_top_k, with_top_p_only):
        if chosen:
            rows = torch.tensor(chosen, device=device)
            thresholds[rows] = _truncate(scaled[rows], thresholds[rows], [seats[i] for i in chosen])
    keys = row_keys([seat.seed for seat in seats], [seat.sample_index for seat in seats], positions)
    return draw(scaled, thresholds, keys.to(device))


def _truncate(scaled: Tensor, floors: Tensor, seats: Sequence[SequenceSampling]) -> Tensor:
    vocab_size = scaled.shape[1]
    top_k = [vocab_size if seat.top_k is None else min(seat.top_k, vocab_size) for seat in seats]
    top_p = torch.tensor([seat.top_p for seat in seats], dtype=torch.float64, device=scaled.device)
    return truncation_thresholds(scaled, floors, torch.tensor(top_k, device=scaled.device), top_p, max(top_k))


def _logprobs(logits: Tensor, token_ids: Tensor, seats: Sequence[SequenceSampling]) -> tuple[TokenLogprobs | None, ...]:
    wanted = {i: seat.num_logprobs for i, seat in enumerate(seats) if seat.num_logprobs is not None}
    if not wanted:
        return (None,) * len(seats)
    rows = torch.tensor(list(wanted), device=logits.device)
    table = token_logprobs(logits[rows], token_ids[rows, None], max(wanted.values()))
    found = {
        i: TokenLogprobs(
            table.logprobs[place : place + 1],
            table.ranks[place : place + 1],
            table.top_token_ids[place : place + 1, :num_top],
            table.top_logprobs[place : place + 1, :num_top],
        )
        for place, (i, num_top) in enumerate(wanted.items())
    }
    return tuple(found.get(i) for i in range(len(seats)))
