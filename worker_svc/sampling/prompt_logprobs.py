"""Log-probabilities of prompt tokens: finds the logits that predict them, queues the work, and splits the result.

The logits at position i predict token i + 1, which the seat knows already, since it belongs to the prompt. The head is
computed in slices, since all logits of a long prompt at once could exceed the memory.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from common.step import PromptLogprobs, StepResult
from kernels.sampling.sampling import TokenLogprobs
from kernels.sampling.sampling_operations import SamplingOperations, concatenate
from worker_svc.sampling.logprob_rows import span_rows
from worker_svc.sampling.to_host import logprobs_to_host
from worker_svc.steps.seat_table import SeatTable
from worker_svc.steps.step_check import IntArray, StepRows
from worker_svc.steps.step_upload import Upload


@dataclass(frozen=True, slots=True)
class PromptSpan:
    """Prompt tokens that one row of a step predicts."""

    seat: int
    position: int  # of the first token
    token_ids: IntArray  # [n]
    logit_rows: IntArray  # [n], indices among the step's tokens
    num_top: int


@dataclass(frozen=True, slots=True)
class PackedPrompts:
    """Spans of a step, and their tokens, which are on the device once the upload is sent."""

    spans: Sequence[PromptSpan]
    token_ids: Tensor  # int64 [n], of all spans

    @property
    def num_top(self) -> int:
        return max(span.num_top for span in self.spans)


@dataclass(frozen=True, slots=True)
class FetchedPrompts:
    """Log-probabilities of the tokens of all spans, on the host; read them once the step's event is reached."""

    spans: Sequence[PromptSpan]
    logprobs: TokenLogprobs

    def fill_result(self, result: StepResult) -> None:
        """Add one result for each span."""
        answers, start = [], 0
        for span in self.spans:
            end = start + len(span.token_ids)
            rows = span_rows(self.logprobs, slice(start, end), span.num_top)
            answers.append(PromptLogprobs(seat=span.seat, position=span.position, rows=rows))
            start = end
        result.prompt_logprobs = answers


def find_prompt_spans(table: SeatTable, rows: StepRows, query_start: IntArray) -> list[PromptSpan]:
    """Spans of rows that are within a prompt and whose seats ask for prompt log-probabilities."""
    within_prompt = np.flatnonzero(rows.starts < table.num_prompt_tokens[rows.seats] - 1)
    spans = []
    for row in within_prompt.tolist():
        seat = int(rows.seats[row])
        num_top = table.sampling[seat].num_prompt_logprobs
        if num_top is None:
            continue
        first = int(rows.starts[row]) + 1
        last = min(int(rows.ends[row]), int(table.num_prompt_tokens[seat]) - 1)
        token_ids = table.token_ids[seat, first : last + 1].astype(np.int64)
        logit_rows = query_start[row] + np.arange(len(token_ids))
        spans.append(PromptSpan(seat, first, token_ids, logit_rows, num_top))
    return spans


def pack_prompts(upload: Upload, spans: Sequence[PromptSpan]) -> PackedPrompts | None:
    """Pack the tokens of all spans; None without spans."""
    if not spans:
        return None
    return PackedPrompts(spans, upload.add(np.concatenate([span.token_ids for span in spans])))


def launch_prompts(
    logits_of: Callable[[Tensor], Tensor],
    rows: Tensor,
    packed: PackedPrompts,
    rows_at_once: int,
    operations: SamplingOperations,
) -> FetchedPrompts:
    """Queue the head over `rows` [n, ..] of all spans in order, and the copies to the host.

    `logits_of` computes the logits [m, V], in any floating dtype, of some of the rows [m, ..].
    """
    row_slices, id_slices = torch.split(rows, rows_at_once), torch.split(packed.token_ids, rows_at_once)
    parts = []
    for some_rows, some_ids in zip(row_slices, id_slices, strict=True):
        logits = logits_of(some_rows)
        every_row = torch.arange(len(logits), dtype=torch.int32, device=logits.device)
        parts.append(operations.token_logprobs(logits, every_row, some_ids[:, None].contiguous(), packed.num_top))
    return FetchedPrompts(packed.spans, logprobs_to_host(concatenate(parts)))
