"""Executes steps on a CPU: seat table, block moves, one forward pass, sampling and ranking.

Runs on one thread and owns the seat table and the KV pool. Knows nothing of epochs or streams.
"""

import time
from collections.abc import Callable
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from common.step import Step, StepResult
from kernels.sampling.logit_edits import TokenMasks
from kernels.sampling.sampling_operations import SamplingOperations
from worker_svc.cpu.batch_builder import build_batch, starts_of
from worker_svc.cpu.host_decoder import GreedyChoice
from worker_svc.memory.kv_pool import KVPool, as_bytes
from worker_svc.model.batch import ForwardBatch
from worker_svc.model.config import ModelConfig
from worker_svc.sampling.candidates import CandidateRanker
from worker_svc.sampling.forced_room import forced_room
from worker_svc.sampling.prompt_logprobs import PromptSpan, find_prompt_spans, launch_prompts, pack_prompts
from worker_svc.sampling.sampler import Sampler
from worker_svc.sampling.sampling_columns import SamplingColumns
from worker_svc.sampling.seat_grammars import Masks, SeatGrammars
from worker_svc.steps.fetched_blocks import FetchedBlocks
from worker_svc.steps.seat_table import SeatTable
from worker_svc.steps.step_check import BlockPairs, CheckedStep, IntArray, StepRows
from worker_svc.steps.step_limits import StepLimits
from worker_svc.steps.step_upload import DirectUpload

MAX_PROMPT_LOGITS = 1 << 24  # per slice: 64 MiB in float32


class PassModel(Protocol):
    """A model that computes passes, or rank 0's part of one."""

    before_pass: Callable[[], None]

    @property
    def config(self) -> ModelConfig: ...

    @property
    def device(self) -> torch.device: ...

    @property
    def sampling(self) -> SamplingOperations: ...

    def hidden(self, batch: ForwardBatch, kv_pool: KVPool) -> Tensor:
        """See HostDecoder.hidden."""

    def greedy(self, batch: ForwardBatch, kv_pool: KVPool) -> GreedyChoice:
        """See HostDecoder.greedy."""

    def logits(self, hidden: Tensor) -> Tensor:
        """See HostDecoder.logits."""


class CpuRunner:
    """One model, its KV pool, and its seats. An `AnnouncingRunner`."""

    def __init__(
        self,
        model: PassModel,
        kv_pool: KVPool,
        limits: StepLimits,
        grammars: SeatGrammars | None = None,
        *,
        max_prompt_logits: int = MAX_PROMPT_LOGITS,
    ) -> None:
        """`grammars`: of these seats; None if no step has a grammar."""
        self._model = model
        self._kv_pool = kv_pool
        self._seats = SeatTable(limits)
        self._columns = SamplingColumns(limits.num_seats, limits.vocab_size)
        self._operations = model.sampling
        self._sampler = Sampler(self._columns, model.sampling)
        self._ranker = CandidateRanker(self._columns, model.sampling)
        self._upload = DirectUpload(model.device)
        self._grammars = grammars
        self.fetched = FetchedBlocks(as_bytes(kv_pool.fetched_blocks))
        self._max_prompt_logits = max_prompt_logits

    @property
    def model(self) -> PassModel:
        """Model that computes the passes."""
        return self._model

    @property
    def before_pass(self) -> Callable[[], None]:
        """See AnnouncingRunner."""
        return self._model.before_pass

    @before_pass.setter
    def before_pass(self, announce: Callable[[], None]) -> None:
        self._model.before_pass = announce

    def launch(self, step: Step) -> StepResult:
        """Execute a step.

        Raises InvalidStepError or MissingBlocksError before anything has changed. After any other exception the seats
        are in an unknown state until the next snapshot.
        """
        with torch.inference_mode():
            checked = self._seats.check(step)
            placed = self.fetched.take(step.epoch, checked.placed)
            self._seats.take_over(step, checked)
            self._columns.apply(step.whole)
            if self._grammars is not None:
                self._grammars.apply(step.whole)
            result = StepResult(epoch=step.epoch, step_id=step.step_id, swap_ns=self._move_blocks(checked, placed))
            if len(checked.rows.seats):
                self._compute(self._force_tokens(checked.rows, step.num_spare_positions, result), result)
            return result

    def _force_tokens(self, rows: StepRows, num_spare_positions: int, result: StepResult) -> StepRows:
        """Give seats the tokens that their grammars force. Returns the rows with them."""
        if self._grammars is None:
            return rows
        room = forced_room(self._seats, self._columns, rows, num_spare_positions)
        if room is None:
            return rows
        forced = self._grammars.force(rows.sample_seats[room.samples].tolist(), room.most.tolist())
        result.forced = {sample: ids for sample, ids in zip(room.samples.tolist(), forced, strict=True) if ids}
        return self._seats.lengthen(rows, result.forced) if result.forced else rows

    def _move_blocks(self, checked: CheckedStep, placed: BlockPairs) -> int:
        """Move blocks and return the nanoseconds that swaps and placing took. placed: (fetched block, device block)."""
        swap_ns = 0
        if checked.swap_out or placed or checked.swap_in:
            self._model.before_pass()  # gigabytes take seconds: what waits for a pass does not wait for them
            began_ns = time.perf_counter_ns()
            try:
                self._kv_pool.swap_out(checked.swap_out)
                self._kv_pool.place(placed)
            finally:
                self.fetched.release(placed)
            self._kv_pool.swap_in(checked.swap_in)
            swap_ns = time.perf_counter_ns() - began_ns
        self._kv_pool.copy_blocks(checked.copies)
        return swap_ns

    def _compute(self, rows: StepRows, result: StepResult) -> None:
        # The processor idles between two passes, so skip what most steps do not need.
        query_start = starts_of(rows)
        spans: list[PromptSpan] = []
        logit_rows = sampled_rows = which_sampled = rows.sample_rows
        if not rows.is_decode:
            sampled_rows, which_sampled = distinct_rows(rows.sample_rows)
            logit_rows = query_start[sampled_rows + 1] - 1
            spans = find_prompt_spans(self._seats, rows, query_start)
        num_sampled, num_ranked = len(sampled_rows), len(rows.candidate_rows)
        if num_ranked or spans:
            ranked = query_start[rows.candidate_rows + 1] - 1
            logit_rows = np.concatenate([logit_rows, ranked, *(span.logit_rows for span in spans)])
        batch = build_batch(self._seats, rows, query_start, logit_rows, self._model.device)
        if self._wants_greatest(rows) and len(logit_rows) == num_sampled:
            _take_greatest(result, self._model.greedy(batch, self._kv_pool), which_sampled)
        else:
            self._take_logits(batch, spans, which_sampled, rows, result)
        self._seats.advance(rows, result.token_ids)
        if self._grammars is not None:
            self._grammars.follow(self._grammars.matched(rows.sample_seats), result.token_ids)

    def _wants_greatest(self, rows: StepRows) -> bool:
        """True if there are samples, and each is the argmax of unedited logits."""
        seats = rows.sample_seats
        return len(seats) > 0 and not self._columns.features[seats].any()

    def _take_logits(
        self, batch: ForwardBatch, spans: list[PromptSpan], which_sampled: IntArray, rows: StepRows, result: StepResult
    ) -> None:
        """Compute the pass, and the results of its rows: samples, ranked rows, and prompt log-probabilities of `spans`.

        Sample s uses row which_sampled[s] of the logits; ranked rows follow those of samples.
        """
        ranked_rows, num_ranked = rows.candidate_rows, len(rows.candidate_rows)
        sample_masks = self._begin_masks(rows.sample_seats)
        ranked_masks = self._begin_masks(rows.seats[ranked_rows])
        hidden = self._model.hidden(batch, self._kv_pool)
        prompts = pack_prompts(self._upload, spans)
        if prompts is not None:
            num_last = len(hidden) - len(prompts.token_ids)
            rows_at_once = max(1, self._max_prompt_logits // self._model.config.vocab_size)
            launched = launch_prompts(self._model.logits, hidden[num_last:], prompts, rows_at_once, self._operations)
            launched.fill_result(result)
            hidden = hidden[:num_last]
        if not len(hidden):
            return
        logits = self._model.logits(hidden)
        tokens = torch.from_numpy(self._seats.token_ids).to(logits.device)
        samples = self._sampler.pack(self._upload, rows.sample_seats, rows.sample_positions, which_sampled)
        if samples is not None:
            self._sampler.launch(logits, samples, tokens, _made(sample_masks)).fetch().fill_result(result)
        candidates = self._ranker.pack(
            self._upload,
            rows.seats[ranked_rows],
            rows.ends[ranked_rows],
            np.arange(len(logits) - num_ranked, len(logits)),
            rows.candidate_counts,
        )
        if candidates is not None:
            self._ranker.launch(logits, candidates, tokens, _made(ranked_masks)).fetch().fill_result(result)

    def _begin_masks(self, seats: IntArray) -> Masks | None:
        """Begin to make the masks of the seats' next tokens; None if none has a grammar."""
        return None if self._grammars is None else self._grammars.masks(self._grammars.matched(seats))


def _made(masks: Masks | None) -> TokenMasks | None:
    return None if masks is None else TokenMasks(torch.from_numpy(masks.rows), torch.from_numpy(masks.wait()))


def distinct_rows(sample_rows: IntArray) -> tuple[IntArray, IntArray]:
    """Distinct rows, ascending, and the index among them of each sample's row."""
    if np.count_nonzero(sample_rows[1:] <= sample_rows[:-1]):
        return np.unique(sample_rows, return_inverse=True)
    return sample_rows, np.arange(len(sample_rows))


def _take_greatest(result: StepResult, chosen: GreedyChoice, which_sampled: IntArray) -> None:
    token_ids, is_finite = chosen[0][which_sampled], chosen[1][which_sampled]
    result.token_ids = token_ids.tolist()
    if np.count_nonzero(is_finite) < len(is_finite):
        result.invalid_samples = np.flatnonzero(~is_finite).tolist()
