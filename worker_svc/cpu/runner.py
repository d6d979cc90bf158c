"""Executes steps with a real model: slot table, block moves, one forward pass, sampling and ranking.

It knows nothing of epochs or streams. It runs on one thread; the slot table and the KV pool are its own.
"""

import time
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from common.step import Candidates, PromptLogprobs, Step, StepResult
from kernels.sampling.sampling import token_logprobs
from worker_svc.cpu.batch_builder import build_batch, starts_of
from worker_svc.memory.kv_pool import KVPool
from worker_svc.model.batch import ForwardBatch
from worker_svc.model.forward_pass import ForwardPass, GreedyChoice
from worker_svc.sampling.candidates import rank_candidates
from worker_svc.sampling.logit_edits import TokenHistory
from worker_svc.sampling.prompt_logprobs import (
    PromptSpan,
    concatenate,
    cut_into_answers,
    find_prompt_spans,
    logprob_rows,
)
from worker_svc.sampling.sampler import Sampler
from worker_svc.steps.slot_table import SlotTable
from worker_svc.steps.step_check import CheckedStep, IntArray, StepRows
from worker_svc.steps.step_limits import StepLimits

ChooseGreedy = Callable[[ForwardBatch, KVPool], GreedyChoice]
MAX_PROMPT_LOGITS = 1 << 24  # at a time: 64 MiB in float32


class ModelRunner:
    """One model on one device, its KV pool, and its slots."""

    def __init__(
        self,
        model: ForwardPass,
        kv_pool: KVPool,
        sampler: Sampler,
        limits: StepLimits,
        max_prompt_logits: int = MAX_PROMPT_LOGITS,
        greedy: ChooseGreedy | None = None,
    ) -> None:
        """`greedy` takes the place of model and sampler where a step wants its rows' greatest logits and no more."""
        self._model = model
        self._kv_pool = kv_pool
        self._sampler = sampler
        self._slots = SlotTable(limits)
        self._max_prompt_logits = max_prompt_logits
        self._greedy = greedy

    def launch(self, step: Step) -> StepResult:
        """Executes a step and waits for the device.

        Raises InvalidStepError, and then nothing has changed; after any other exception the slots are in an
        unknown state, which only a snapshot ends.
        """
        with torch.inference_mode():
            checked = self._slots.apply(step)
            result = StepResult(epoch=step.epoch, step_id=step.step_id, swap_ns=self._move_blocks(checked))
            if len(checked.rows.slots):
                self._compute(checked.rows, result)
            return result

    def _move_blocks(self, checked: CheckedStep) -> int:
        """Returns the nanoseconds that swaps took; only they are waited for."""
        swap_ns = 0
        if checked.swap_out or checked.swap_in:
            self._wait_for_device()
            began_ns = time.perf_counter_ns()
            self._kv_pool.swap_out(checked.swap_out)
            self._kv_pool.swap_in(checked.swap_in)
            self._wait_for_device()
            swap_ns = time.perf_counter_ns() - began_ns
        self._kv_pool.copy_blocks(checked.copies)
        return swap_ns

    def _wait_for_device(self) -> None:
        if self._kv_pool.device.type == "cuda":
            torch.cuda.synchronize(self._kv_pool.device)

    def _compute(self, rows: StepRows, result: StepResult) -> None:
        # Between two passes the processor idles: what most steps lack is passed over.
        query_start = starts_of(rows)
        spans: list[PromptSpan] = []
        logit_rows = sampled_rows = which_sampled = rows.sample_rows
        if not rows.is_decode:
            sampled_rows, which_sampled = distinct_rows(rows.sample_rows)
            logit_rows = query_start[sampled_rows + 1] - 1
            spans = find_prompt_spans(self._slots, rows, query_start)
        num_sampled, num_ranked = len(sampled_rows), len(rows.candidate_rows)
        if num_ranked or spans:
            ranked = query_start[rows.candidate_rows + 1] - 1
            logit_rows = np.concatenate([logit_rows, ranked, *(span.logit_rows for span in spans)])
        batch = build_batch(self._slots, rows, query_start, logit_rows, self._model.device)
        if self._greedy is not None and self._wants_greatest(rows) and len(logit_rows) == num_sampled:
            _take_greatest(result, self._greedy(batch, self._kv_pool), which_sampled)
        else:
            self._take_logits(batch, spans, which_sampled, rows, result)
        self._slots.advance(rows, result.token_ids)

    def _wants_greatest(self, rows: StepRows) -> bool:
        """Whether there are samples, and all of them are the greatest logit as it is."""
        slots = rows.sample_slots
        return len(slots) > 0 and np.count_nonzero(self._slots.is_plainly_greedy[slots]) == len(slots)

    def _take_logits(
        self, batch: ForwardBatch, spans: list[PromptSpan], which_sampled: IntArray, rows: StepRows, result: StepResult
    ) -> None:
        """The pass, and all that is made of its rows: those that are sampled, ranked, and of the spans."""
        hidden = self._model.hidden(batch, self._kv_pool)
        if spans:
            num_last = len(hidden) - sum(len(span.logit_rows) for span in spans)
            result.prompt_logprobs = self._prompt_logprobs(hidden[num_last:], spans)
            hidden = hidden[:num_last]
        if not len(hidden):
            return
        logits = self._model.logits(hidden)
        num_sampled = len(logits) - len(rows.candidate_rows)
        if num_sampled < len(logits):
            result.candidates = self._rank(logits[num_sampled:], rows)
        if num_sampled:
            self._sample(logits[:num_sampled], which_sampled, rows, result)

    def _sample(self, logits: Tensor, which_sampled: IntArray, rows: StepRows, result: StepResult) -> None:
        """Sample s has row which_sampled[s] of the logits."""
        if len(which_sampled) > len(logits):  # a row feeds several slots
            logits = logits[torch.from_numpy(which_sampled).to(logits.device)]
        slots, positions = rows.sample_slots.tolist(), rows.sample_positions.tolist()
        sampling = [self._slots.sampling[slot] for slot in slots]
        output = self._sampler.sample(logits, sampling, positions, self._histories(slots, positions))
        result.token_ids = output.token_ids.tolist()
        if not output.valid.all():
            result.invalid_samples = (~output.valid).nonzero().flatten().tolist()
        result.logprobs = {
            index: logprob_rows(slice(None), row, sampling[index].num_logprobs or 0)
            for index, row in enumerate(output.logprobs)
            if row is not None
        }

    def _rank(self, logits: Tensor, rows: StepRows) -> list[Candidates]:
        slots, positions = rows.slots[rows.candidate_rows].tolist(), rows.ends[rows.candidate_rows].tolist()
        sampling = [self._slots.sampling[slot] for slot in slots]
        histories = self._histories(slots, positions)
        return rank_candidates(logits.float(), rows.candidate_counts.tolist(), sampling, positions, histories)

    def _histories(self, slots: list[int], positions: list[int]) -> list[TokenHistory | None]:
        """The tokens of each slot before its position, where its penalties need them."""
        return [
            self._history(slot, position) if self._slots.sampling[slot].needs_history else None
            for slot, position in zip(slots, positions, strict=True)
        ]

    def _history(self, slot: int, position: int) -> TokenHistory:
        token_ids = torch.from_numpy(self._slots.token_ids[slot, :position])
        return TokenHistory(token_ids, int(self._slots.num_prompt_tokens[slot]))

    def _prompt_logprobs(self, hidden: Tensor, spans: list[PromptSpan]) -> list[PromptLogprobs]:
        """The head in slices, since all logits of a long prompt at once could outgrow the memory."""
        token_ids = torch.from_numpy(np.concatenate([span.token_ids for span in spans])).to(hidden.device)
        num_top = max(span.num_top for span in spans)
        size = max(1, self._max_prompt_logits // self._model.config.vocab_size)
        parts = [
            token_logprobs(self._model.logits(some_hidden).float(), some_ids, num_top).cpu()
            for some_hidden, some_ids in zip(torch.split(hidden, size), torch.split(token_ids, size), strict=True)
        ]
        return cut_into_answers(spans, concatenate(parts))


def distinct_rows(sample_rows: IntArray) -> tuple[IntArray, IntArray]:
    """The distinct rows, ascending, and which of them each sample has."""
    if np.count_nonzero(sample_rows[1:] <= sample_rows[:-1]):
        return np.unique(sample_rows, return_inverse=True)
    return sample_rows, np.arange(len(sample_rows))


def _take_greatest(result: StepResult, chosen: GreedyChoice, which_sampled: IntArray) -> None:
    token_ids, is_finite = chosen
    if len(which_sampled) > len(token_ids):
        token_ids, is_finite = token_ids[which_sampled], is_finite[which_sampled]
    result.token_ids = token_ids.tolist()
    if np.count_nonzero(is_finite) < len(is_finite):
        result.invalid_samples = np.flatnonzero(~is_finite).tolist()
