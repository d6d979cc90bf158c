"""Executes steps with a real model: slot table, block moves, one forward pass, sampling.

It knows nothing of epochs, streams or time. It runs on one thread; the slot table and the KV pool are its own.
"""

import numpy as np
import torch
from torch import Tensor

from common.step import PromptLogprobs, Step, StepResult
from kernels.sampling import token_logprobs
from worker_svc.batch_builder import build_batch, starts_of
from worker_svc.kv_pool import KVPool
from worker_svc.model.decoder import Decoder
from worker_svc.prompt_logprobs import PromptSpan, concatenate, cut_into_answers, find_prompt_spans, logprob_rows
from worker_svc.sampler import Sampler, TokenHistory
from worker_svc.slot_table import SlotTable
from worker_svc.step_check import CheckedStep, StepRows
from worker_svc.step_limits import StepLimits

_MAX_PROMPT_LOGITS = 1 << 24  # at a time: 64 MiB in float32


class ModelRunner:
    """One model on one device, its KV pool, and its slots."""

    def __init__(
        self,
        decoder: Decoder,
        kv_pool: KVPool,
        sampler: Sampler,
        limits: StepLimits,
        max_prompt_logits: int = _MAX_PROMPT_LOGITS,
    ) -> None:
        self._decoder = decoder
        self._kv_pool = kv_pool
        self._sampler = sampler
        self._slots = SlotTable(limits)
        self._max_prompt_logits = max_prompt_logits

    def execute(self, step: Step) -> StepResult:
        """Executes a step and waits for the device.

        Raises InvalidStepError, and then nothing has changed; after any other exception the slots are in an
        unknown state, which only a snapshot ends.
        """
        with torch.inference_mode():
            checked = self._slots.apply(step)
            self._move_blocks(checked)
            result = StepResult(epoch=step.epoch, step_id=step.step_id)
            if len(checked.rows.slots):
                self._compute(checked.rows, result)
            return result

    def _move_blocks(self, checked: CheckedStep) -> None:
        self._kv_pool.swap_out(checked.swap_out)
        self._kv_pool.swap_in(checked.swap_in)
        self._kv_pool.copy_blocks(checked.copies)

    def _compute(self, rows: StepRows, result: StepResult) -> None:
        query_start = starts_of(rows)
        sampled_rows, which_sampled = np.unique(rows.sample_rows, return_inverse=True)
        spans = find_prompt_spans(self._slots, rows, query_start)
        logit_rows = np.concatenate([query_start[sampled_rows + 1] - 1, *(span.logit_rows for span in spans)])
        batch = build_batch(self._slots, rows, query_start, logit_rows, self._decoder.device)
        hidden = self._decoder.hidden(batch, self._kv_pool)
        result.prompt_logprobs = self._prompt_logprobs(hidden[len(sampled_rows) :], spans)
        if len(which_sampled):
            logits = self._decoder.logits(hidden[: len(sampled_rows)])
            if len(which_sampled) > len(sampled_rows):  # a row feeds several slots
                logits = logits[torch.from_numpy(which_sampled).to(logits.device)]
            self._sample(logits, rows, result)
        else:
            self._slots.advance(rows, ())

    def _sample(self, logits: Tensor, rows: StepRows, result: StepResult) -> None:
        slots = rows.sample_slots.tolist()
        sampling = [self._slots.sampling[slot] for slot in slots]
        positions = rows.sample_positions.tolist()
        histories = [
            self._history(slot, position) if each.needs_history else None
            for slot, position, each in zip(slots, positions, sampling, strict=True)
        ]
        output = self._sampler.sample(logits, sampling, positions, histories)
        result.token_ids = output.token_ids.tolist()
        if not output.valid.all():
            result.invalid_samples = (~output.valid).nonzero().flatten().tolist()
        result.logprobs = {
            index: logprob_rows(slice(None), row, sampling[index].num_logprobs or 0)
            for index, row in enumerate(output.logprobs)
            if row is not None
        }
        self._slots.advance(rows, result.token_ids)

    def _history(self, slot: int, position: int) -> TokenHistory:
        token_ids = torch.from_numpy(self._slots.token_ids[slot, :position])
        return TokenHistory(token_ids, int(self._slots.num_prompt_tokens[slot]))

    def _prompt_logprobs(self, hidden: Tensor, spans: list[PromptSpan]) -> list[PromptLogprobs]:
        """The head in slices, since all logits of a long prompt at once could outgrow the memory."""
        if not spans:
            return []
        token_ids = torch.from_numpy(np.concatenate([span.token_ids for span in spans])).to(hidden.device)
        num_top = max(span.num_top for span in spans)
        size = max(1, self._max_prompt_logits // self._decoder.config.vocab_size)
        parts = [
            token_logprobs(self._decoder.logits(some_hidden), some_ids, num_top).cpu()
            for some_hidden, some_ids in zip(torch.split(hidden, size), torch.split(token_ids, size), strict=True)
        ]
        return cut_into_answers(spans, concatenate(parts))
