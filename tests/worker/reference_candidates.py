"""The best next tokens of rows whose next token the scheduler chooses, as a beam search needs them.

As in the beam search of `transformers`, what a seat asks for (ids, bias, penalties) edits the log-probabilities of the
model, not its logits, and nothing is normalised again. A row is ranked the same whatever else is in the batch. It knows
nothing of beams.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from common.sampling_params import SequenceSampling
from common.step import Candidates, LogprobRows
from kernels.sampling.sampling import best_tokens, finite_rows, model_logprobs, token_ranks
from tests.worker.reference_edits import TokenHistory, edit_rows


def rank_candidates(
    logits: Tensor,
    counts: Sequence[int],
    seats: Sequence[SequenceSampling],
    positions: Sequence[int],
    histories: Sequence[TokenHistory | None],
) -> list[Candidates]:
    """The counts[i] best tokens after row i of `logits` [C, V], best first, the lower id first among equals.

    A token that is barred stands at -inf. A row whose logits are not all finite has no candidates. counts are at most
    V; positions[i] is the index, in prompt and output, of the next token; histories[i] is needed only where
    seats[i].needs_history.
    """
    logits = logits.float()
    logprobs = model_logprobs(logits)
    edited = edit_rows(logprobs, seats, positions, histories)
    valid = (finite_rows(logits) & (edited.amax(-1) < torch.inf)).tolist()
    token_ids = best_tokens(edited, max(counts))
    found_ids, found_logprobs = token_ids.tolist(), edited.gather(1, token_ids).tolist()
    wanted = {
        row: (counts[row], min(seat.num_logprobs, logits.shape[1]))
        for row, seat in enumerate(seats)
        if seat.num_logprobs is not None and valid[row]
    }
    rows_of = _model_rows(logits, logprobs, token_ids, wanted)
    return [
        Candidates(token_ids=found_ids[row][:count], logprobs=found_logprobs[row][:count], rows=rows_of.get(row))
        if valid[row]
        else Candidates(token_ids=(), logprobs=())
        for row, count in enumerate(counts)
    ]


def _model_rows(
    logits: Tensor, logprobs: Tensor, token_ids: Tensor, wanted: Mapping[int, tuple[int, int]]
) -> dict[int, LogprobRows]:
    """By row, what the model itself thinks of the row's candidates; `wanted`: how many of those, and most likely ones.

    The candidates of a row stand at one position, so the most likely tokens beside each are the same.
    """
    if not wanted:
        return {}
    rows = torch.tensor(list(wanted), device=logits.device)
    logits, logprobs, token_ids = logits[rows], logprobs[rows], token_ids[rows]
    top_ids = best_tokens(logits, max(num_top for _, num_top in wanted.values()))
    own, ranks = logprobs.gather(1, token_ids).tolist(), token_ranks(logits, token_ids).tolist()
    top_token_ids, top_logprobs = top_ids.tolist(), logprobs.gather(1, top_ids).tolist()
    return {
        row: LogprobRows(
            logprobs=own[place][:count],
            ranks=ranks[place][:count],
            num_top=num_top,
            top_token_ids=top_token_ids[place][:num_top] * count,
            top_logprobs=top_logprobs[place][:num_top] * count,
        )
        for place, (row, (count, num_top)) in enumerate(wanted.items())
    }
