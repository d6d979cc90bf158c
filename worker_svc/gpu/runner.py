"""Executes steps on an accelerator: packs the device's inputs, queues its operations, and returns without waiting.

Sampled tokens stay on the device, where the next step finds them. Only the reader of a result waits for their copy on
the host; the launch of the next step does not. Knows nothing of epochs or gRPC streams.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from common.step import Step, StepResult
from kernels.attention.cascade_groups import SharingCost, sharing_cost
from kernels.native.shared_ranks import RankReduction
from kernels.sampling.logit_edits import TokenMasks
from worker_svc.gpu.attention_plans import AttentionPlans
from worker_svc.gpu.batch_layout import lay_out
from worker_svc.gpu.batch_pass import BatchPass, PackedBatch, fixed_arrays
from worker_svc.gpu.block_moves import BlockMover, PendingSwaps
from worker_svc.gpu.device_loss import device_lost_if_it_says_so
from worker_svc.gpu.device_seats import DeviceSeats
from worker_svc.gpu.forward import DeviceForward
from worker_svc.gpu.graphs import CudaGraphs, GraphMaker, token_sizes
from worker_svc.gpu.libraries.library import NO_LIBRARIES, PassLibraries
from worker_svc.memory.kv_pool import KVPool, as_bytes
from worker_svc.model.decoder import Decoder
from worker_svc.operations import Operations
from worker_svc.sampling.candidates import CandidateRanker, PackedCandidates
from worker_svc.sampling.prompt_logprobs import PackedPrompts, find_prompt_spans, launch_prompts, pack_prompts
from worker_svc.sampling.sampler import LaunchedSamples, PackedSampling, Sampler
from worker_svc.sampling.sampling_columns import SamplingColumns
from worker_svc.sampling.seat_grammars import Matched, SeatGrammars
from worker_svc.steps.fetched_blocks import FetchedBlocks
from worker_svc.steps.seat_table import SeatTable
from worker_svc.steps.step_check import BlockPairs, CheckedStep, IntArray, StepRows
from worker_svc.steps.step_limits import StepLimits
from worker_svc.steps.step_upload import StepUpload
from worker_svc.steps.streams import DeviceEvent

_MAX_PROMPT_LOGITS = 1 << 26  # per slice: 256 MiB in float32
_UPLOAD_BYTES = 1 << 20  # beside seats and positions; larger steps, such as long prompts, send the rest separately

Finish = Callable[[StepResult], None]  # called once the copies to the host are done
Release = Callable[[], None]


@dataclass(frozen=True, slots=True)
class PendingDeviceStep:
    """Queued step. `finish` fills the result from the copies on the host; `release` frees what it moved from there."""

    result: StepResult
    swaps: PendingSwaps
    done: DeviceEvent
    finish: tuple[Finish, ...]
    release: Release

    def wait(self) -> StepResult:
        """Wait for the device and fill the result."""
        try:
            with device_lost_if_it_says_so():
                self.done.synchronize()
                for finish in self.finish:
                    finish(self.result)
                self.result.swap_ns = self.swaps.wait()
        finally:
            self.release()
        return self.result


class DeviceRunner:
    """One model on one accelerator, its KV pool, and its seats."""

    def __init__(
        self,
        decoder: Decoder,
        kv_pool: KVPool,
        limits: StepLimits,
        operations: Operations,
        graph_sizes: tuple[int, ...],
        *,
        max_prompt_logits: int = _MAX_PROMPT_LOGITS,
        cost: SharingCost | None = None,
        graphs: GraphMaker | None = None,
        grammars: SeatGrammars | None = None,
        ranks: RankReduction | None = None,
        libraries: PassLibraries = NO_LIBRARIES,
    ) -> None:
        """`graph_sizes` are the batch sizes of decode steps; the last holds all seats.

        `grammars` are those of these seats; None if no step has a grammar.
        `graphs` captures passes; None: the device's own way, if it is a CUDA device.
        `ranks` is the group among which the decoder is divided; all its ranks launch the same steps in the same order.
        `libraries` attend instead of the operations in the passes that are theirs.
        `cost` is the cost of rows that attend to a common prefix together; None: estimated from the model's shape.
        """
        assert graph_sizes[-1] >= limits.num_seats, "every seat may decode at once"
        device, max_rows = kv_pool.device, graph_sizes[-1]
        self._table = SeatTable(limits)
        self._seats = DeviceSeats(limits, device)
        max_tokens = token_sizes(max(limits.max_batched_tokens, max_rows))[-1]
        plans = AttentionPlans(decoder, kv_pool, operations, max_rows=max_rows, max_blocks=limits.max_blocks)
        arrays = fixed_arrays(max_tokens, max_rows, plans.most_work(max_tokens, max_rows), plans.num_windows)
        self._upload = StepUpload(device, arrays, _UPLOAD_BYTES)
        self._mover = BlockMover(kv_pool, operations.copy_by_table, operations.swap_blocks)
        self._forward = DeviceForward(decoder, kv_pool, operations, ranks, num_positions=limits.max_model_len)
        self._batch = BatchPass(
            self._forward,
            plans,
            self._seats,
            self._upload,
            graph_sizes,
            cost or sharing_cost(plans.shape),
            plans.library_plans(libraries, self._forward.rule, max_tokens),
        )
        self._columns = SamplingColumns(limits.num_seats, limits.vocab_size)
        self._sampling = operations.sampling
        self._sampler = Sampler(self._columns, operations.sampling)
        self._ranker = CandidateRanker(self._columns, operations.sampling)
        self._prompt_rows_at_once = max(1, max_prompt_logits // limits.vocab_size)
        self._device = device
        self._graphs = CudaGraphs(device) if graphs is None and device.type == "cuda" else graphs
        self._grammars = grammars
        self.fetched = FetchedBlocks(as_bytes(kv_pool.fetched_blocks))
        self._unfollowed: _UnfollowedSamples | None = None  # of the last step

    def warm_up(self) -> None:
        """Launch every kernel that steps without prompts may need, so that none is compiled while requests wait.

        Prompt kernels have one variant each, which the first prompt compiles. The computed rows are padding.
        """
        with torch.inference_mode(), device_lost_if_it_says_so():
            self._batch.warm_up()
            self._sampler.warm_up(self._batch.logits, self._seats.tokens)
            self._mover.warm_up()

    @property
    def graph_passes(self) -> Mapping[str, int]:
        """See PassCountingRunner."""
        return self._batch.counts.by_graph

    @property
    def kernel_passes(self) -> Mapping[str, int]:
        """See PassCountingRunner."""
        return self._batch.counts.by_kernels

    def capture_graphs(self, max_mixed_tokens: int | None = None) -> None:
        """Capture passes at all sizes, those with prompts of at most so many tokens.

        Until then, and where nothing captures, as on a CPU, kernels are launched one by one.
        """
        if self._graphs is not None:
            with torch.inference_mode():
                self._batch.capture(self._graphs, max_mixed_tokens)

    def release_graphs(self) -> None:
        self._batch.release()

    def launch(self, step: Step) -> PendingDeviceStep:
        """Queue a step without waiting for the device.

        Raises InvalidStepError or MissingBlocksError before anything has changed. After any other exception the seats
        are in an unknown state until the next snapshot; DeviceLostError is final.
        """
        with torch.inference_mode(), device_lost_if_it_says_so(self._device):
            checked = self._table.check(step)
            placed = self.fetched.take(step.epoch, checked.placed)
            try:
                self._table.take_over(step, checked)
                self._columns.apply(step.whole)
                if self._grammars is not None:
                    self._grammars.apply(step.whole)
                return self._launch(step, checked, placed)
            except BaseException:
                self.fetched.release(placed)
                raise

    def _launch(self, step: Step, checked: CheckedStep, placed: BlockPairs) -> PendingDeviceStep:
        rows, upload = checked.rows, self._upload
        upload.begin()
        changes = self._seats.pack(upload, step.whole, checked)
        moves = self._mover.pack(upload, checked, placed)
        packed = self._pack(rows) if len(rows.seats) else None
        upload.send()
        self._seats.apply(changes)
        swaps = self._mover.launch(moves, self._table, rows)
        finish = () if packed is None else self._compute(packed)
        self._table.advance(rows, None)
        done = DeviceEvent(self._device)
        done.record()
        result = StepResult(epoch=step.epoch, step_id=step.step_id)
        return PendingDeviceStep(result, swaps, done, finish, partial(self.fetched.release, placed))

    def _pack(self, rows: StepRows) -> "_PackedRows":
        upload, layout = self._upload, lay_out(rows)
        spans = find_prompt_spans(self._table, rows, layout.first_tokens)
        batch = self._batch.pack(self._table, rows, layout, keep_hidden=bool(spans))
        sample_positions, candidate_seats = rows.sample_positions, rows.seats[rows.candidate_rows]
        return _PackedRows(
            batch=batch,
            samples=self._sampler.pack(
                upload, rows.sample_seats, sample_positions, batch.logit_index[rows.sample_rows]
            ),
            sample_places=upload.add(self._seats.places(rows.sample_seats, sample_positions)),
            candidates=self._ranker.pack(
                upload,
                candidate_seats,
                rows.ends[rows.candidate_rows],
                batch.logit_index[rows.candidate_rows],
                rows.candidate_counts,
            ),
            prompts=pack_prompts(upload, spans),
            prompt_tokens=upload.add(np.concatenate([span.logit_rows for span in spans])) if spans else None,
            matched_samples=self._matched(rows.sample_seats),
            matched_candidates=self._matched(candidate_seats),
        )

    def _matched(self, seats: IntArray) -> Matched | None:
        return None if self._grammars is None else self._grammars.matched(seats)

    def _compute(self, packed: "_PackedRows") -> tuple[Finish, ...]:
        computed = self._batch.launch(packed.batch)
        finish: list[Finish] = []
        self._follow_last_samples()
        sample_masks, ranked_masks = self._masks(packed.matched_samples), self._masks(packed.matched_candidates)
        if packed.prompts is not None and packed.prompt_tokens is not None and computed.hidden is not None:
            finish.append(self._prompt_logprobs(computed.hidden, packed.prompts, packed.prompt_tokens))
        if computed.logits is not None:
            if packed.samples is not None:
                samples = self._sampler.launch(computed.logits, packed.samples, self._seats.tokens, sample_masks)
                self._seats.write_tokens(packed.sample_places, samples.chosen.token_ids)
                fetched = samples.fetch()
                finish.append(fetched.fill_result)
                self._follow_later(packed.matched_samples, fetched)
            if packed.candidates is not None:
                ranked = self._ranker.launch(computed.logits, packed.candidates, self._seats.tokens, ranked_masks)
                finish.append(ranked.fetch().fill_result)
        return tuple(finish)

    def _masks(self, matched: Matched | None) -> TokenMasks | None:
        """Masks on the device. The host makes them while the pass computes, which was queued before."""
        masks = None if self._grammars is None else self._grammars.masks(matched)
        if masks is None:
            return None
        return TokenMasks(self._sent(torch.from_numpy(masks.rows)), self._sent(torch.from_numpy(masks.wait())))

    def _sent(self, tensor: Tensor) -> Tensor:
        pinned = tensor.pin_memory() if self._device.type == "cuda" else tensor
        return pinned.to(self._device, non_blocking=True)

    def _follow_later(self, matched: Matched | None, fetched: LaunchedSamples) -> None:
        """Have grammars follow these samples once the host can read them; the next step's masks need that."""
        if matched is not None:
            done = DeviceEvent(self._device)
            done.record()
            self._unfollowed = _UnfollowedSamples(matched, fetched, done)

    def _follow_last_samples(self) -> None:
        last, self._unfollowed = self._unfollowed, None
        if last is not None and self._grammars is not None:
            last.done.synchronize()
            self._grammars.follow(last.matched, last.fetched.chosen.token_ids.tolist())

    def _prompt_logprobs(self, hidden: Tensor, packed: PackedPrompts, tokens: Tensor) -> Finish:
        def logits_of(some_tokens: Tensor) -> Tensor:
            return self._forward.logits(hidden, some_tokens)

        return launch_prompts(logits_of, tokens, packed, self._prompt_rows_at_once, self._sampling).fill_result


@dataclass(frozen=True, slots=True)
class _PackedRows:
    """Arrays of a step's rows: for the pass, samples, candidates and prompts."""

    batch: PackedBatch
    samples: PackedSampling | None
    sample_places: Tensor  # int64 [S], places of the sampled tokens in the token table
    candidates: PackedCandidates | None
    prompts: PackedPrompts | None
    prompt_tokens: Tensor | None  # int64, the step's tokens that predict prompt tokens
    matched_samples: Matched | None  # samples, and ranked rows, of seats with a grammar
    matched_candidates: Matched | None


@dataclass(frozen=True, slots=True)
class _UnfollowedSamples:
    """Samples of seats with a grammar, and the event after which the host can read them."""

    matched: Matched
    fetched: LaunchedSamples
    done: DeviceEvent
