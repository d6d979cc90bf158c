"""Log-probabilities of prompt tokens on the device, without waiting for it.

Prompts are known on the host, so their ids are sent; the head is computed in slices, since all logits of a long prompt
at once could outgrow the memory. Which rows they are and how answers are cut is `prompt_logprobs`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from common.step import StepResult
from kernels.sampling.sampling import TokenLogprobs, token_logprobs
from worker_svc.sampling.prompt_logprobs import PromptSpan, concatenate, cut_into_answers
from worker_svc.sampling.to_host import logprobs_to_host
from worker_svc.steps.step_upload import StepUpload


@dataclass(frozen=True, slots=True)
class PackedPrompts:
    """The spans of a step, and their tokens on the device once the upload is sent."""

    spans: Sequence[PromptSpan]
    token_ids: Tensor  # int64 [n], of all spans

    @property
    def num_top(self) -> int:
        return max(span.num_top for span in self.spans)


@dataclass(frozen=True, slots=True)
class PromptRows:
    """Log-probabilities of all the spans' tokens, in pinned memory; to be read once the step's event is reached."""

    spans: Sequence[PromptSpan]
    logprobs: TokenLogprobs

    def result(self, into: StepResult) -> None:
        into.prompt_logprobs = cut_into_answers(self.spans, self.logprobs)


def pack_prompts(upload: StepUpload, spans: Sequence[PromptSpan]) -> PackedPrompts | None:
    """None without spans."""
    if not spans:
        return None
    return PackedPrompts(spans, upload.add(np.concatenate([span.token_ids for span in spans])))


def launch_prompts(
    logits_of: Callable[[Tensor], Tensor], rows: Tensor, packed: PackedPrompts, rows_at_once: int
) -> PromptRows:
    """Queues the head over `rows` [n], those of all spans in order, and copies to the host.

    `logits_of` gives the logits [m, V], in any floating dtype, of some of the rows [m].
    """
    row_slices, id_slices = torch.split(rows, rows_at_once), torch.split(packed.token_ids, rows_at_once)
    parts = [
        token_logprobs(logits_of(some_rows).float(), some_ids, packed.num_top)
        for some_rows, some_ids in zip(row_slices, id_slices, strict=True)
    ]
    return PromptRows(packed.spans, logprobs_to_host(concatenate(parts)))
