"""Log-probabilities of prompt tokens: which of a step's logits give them, and how they are cut into answers.

The logits at position i are those of token i + 1, which the slot knows already, since it belongs to the prompt.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from common.step import LogprobRows, PromptLogprobs
from kernels.sampling.sampling import TokenLogprobs
from worker_svc.steps.slot_table import SlotTable
from worker_svc.steps.step_check import IntArray, StepRows


@dataclass(frozen=True, slots=True)
class PromptSpan:
    """The prompt tokens that one row of a step predicts."""

    slot: int
    position: int  # of the first of them
    token_ids: IntArray  # [n]
    logit_rows: IntArray  # [n], indices among the step's tokens
    num_top: int


def find_prompt_spans(table: SlotTable, rows: StepRows, query_start: IntArray) -> list[PromptSpan]:
    """The spans of rows that are within a prompt and whose slots ask for it."""
    within_prompt = np.flatnonzero(rows.starts < table.num_prompt_tokens[rows.slots] - 1)
    spans = []
    for row in within_prompt.tolist():
        slot = int(rows.slots[row])
        num_top = table.sampling[slot].num_prompt_logprobs
        if num_top is None:
            continue
        first = int(rows.starts[row]) + 1
        last = min(int(rows.ends[row]), int(table.num_prompt_tokens[slot]) - 1)
        token_ids = table.token_ids[slot, first : last + 1].astype(np.int64)
        logit_rows = query_start[row] + np.arange(len(token_ids))
        spans.append(PromptSpan(slot, first, token_ids, logit_rows, num_top))
    return spans


def cut_into_answers(spans: Iterable[PromptSpan], logprobs: TokenLogprobs) -> list[PromptLogprobs]:
    """One answer for each span, from log-probabilities of all their tokens in order, on the host."""
    answers, start = [], 0
    for span in spans:
        end = start + len(span.token_ids)
        rows = logprob_rows(slice(start, end), logprobs, span.num_top)
        answers.append(PromptLogprobs(slot=span.slot, position=span.position, rows=rows))
        start = end
    return answers


def logprob_rows(which: slice, logprobs: TokenLogprobs, num_top: int) -> LogprobRows:
    """Rows of log-probabilities, each with its `num_top` most likely tokens, for the wire."""
    top_token_ids = logprobs.top_token_ids[which, :num_top]
    return LogprobRows(
        logprobs=logprobs.logprobs[which].tolist(),
        ranks=logprobs.ranks[which].tolist(),
        num_top=top_token_ids.shape[1],
        top_token_ids=top_token_ids.reshape(-1).tolist(),
        top_logprobs=logprobs.top_logprobs[which, :num_top].reshape(-1).tolist(),
    )


def concatenate(parts: Sequence[TokenLogprobs]) -> TokenLogprobs:
    """Parts computed apart, as one."""
    return TokenLogprobs(
        torch.cat([part.logprobs for part in parts]),
        torch.cat([part.ranks for part in parts]),
        torch.cat([part.top_token_ids for part in parts]),
        torch.cat([part.top_logprobs for part in parts]),
    )
