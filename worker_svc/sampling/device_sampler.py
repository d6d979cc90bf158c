"""Samples a step's tokens on the device, as `Sampler` does on the host, without waiting for it.

In three parts: the host packs parameters into the step's upload, then queues kernels, then reads what was copied back
once the step's event is reached. It knows nothing of rows, sequences or blocks.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from common.step import StepResult
from kernels.sampling.choice_reference import ChosenTokens, SampleRows
from kernels.sampling.penalty_reference import PenaltyRows
from kernels.sampling.sampling import NO_THRESHOLD, TokenLogprobs, token_logprobs
from worker_svc.operations import ChooseTokens, Penalise
from worker_svc.sampling.device_edits import PackedEdits, apply_edits, pack_edits
from worker_svc.sampling.prompt_logprobs import concatenate, logprob_rows
from worker_svc.sampling.sampling_columns import Feature, SamplingColumns
from worker_svc.sampling.to_host import logprobs_to_host, to_host
from worker_svc.steps.step_check import IntArray
from worker_svc.steps.step_upload import StepUpload

_MAX_LOGITS = 1 << 24  # whose log-probabilities are computed at a time: 128 MiB for the keys of their order


@dataclass(frozen=True, slots=True)
class _WantedLogprobs:
    """The samples whose log-probabilities were asked for."""

    samples: IntArray  # [n]
    num_top: IntArray  # [n]
    samples_on_device: Tensor  # int64 [n]


@dataclass(frozen=True, slots=True)
class PackedSampling:
    """What the device must know to sample; its tensors have their content once the upload is sent."""

    rows: SampleRows
    edits: PackedEdits | None
    logprobs: _WantedLogprobs | None


@dataclass(frozen=True, slots=True)
class HostSamples:
    """Samples in pinned memory; to be read once the step's event is reached."""

    token_ids: Tensor
    valid: Tensor
    logprobs: TokenLogprobs | None
    wanted: _WantedLogprobs | None

    def result(self, into: StepResult) -> None:
        into.token_ids = self.token_ids.tolist()
        if not self.valid.all():
            into.invalid_samples = (~self.valid).nonzero().flatten().tolist()
        if self.wanted is not None and self.logprobs is not None:
            wanted = zip(self.wanted.samples.tolist(), self.wanted.num_top.tolist(), strict=True)
            into.logprobs = {
                sample: logprob_rows(slice(place, place + 1), self.logprobs, num_top)
                for place, (sample, num_top) in enumerate(wanted)
            }


@dataclass(frozen=True, slots=True)
class DeviceSamples:
    """Samples on the device; kernels that compute them are queued."""

    chosen: ChosenTokens
    logprobs: TokenLogprobs | None
    wanted: _WantedLogprobs | None

    @property
    def token_ids(self) -> Tensor:
        """int32 [S]; 0 where not valid."""
        return self.chosen.token_ids

    def fetch(self) -> HostSamples:
        """Queues the copies to the host."""
        return HostSamples(
            token_ids=to_host(self.chosen.token_ids),
            valid=to_host(self.chosen.valid),
            logprobs=None if self.logprobs is None else logprobs_to_host(self.logprobs),
            wanted=self.wanted,
        )


class DeviceSampler:
    """Samples for any mix of slots at once, with the kernels or references it is given."""

    def __init__(self, columns: SamplingColumns, choose_tokens: ChooseTokens, penalise: Penalise) -> None:
        self._columns = columns
        self._choose_tokens = choose_tokens
        self._penalise = penalise

    def pack(
        self, upload: StepUpload, slots: IntArray, positions: IntArray, logit_rows: IntArray
    ) -> PackedSampling | None:
        """Sample i is for slots[i], at positions[i] in prompt and output, from row logit_rows[i] of the logits.

        None if there are no samples.
        """
        if not len(slots):
            return None
        columns = self._columns
        features = columns.features[slots]
        rows = SampleRows(
            logit_rows=upload.add(logit_rows.astype(np.int32)),
            temperatures=upload.add(columns.temperatures[slots]),
            floors=upload.add(columns.floors[slots]),
            top_k=upload.add(columns.top_k[slots]),
            top_p=upload.add(columns.top_p[slots]),
            keys=upload.add(columns.keys(slots, positions)),
            selecting=upload.add(np.flatnonzero(features & Feature.SELECTS).astype(np.int32)),
            all_greedy=not (features & Feature.DRAWS).any(),
        )
        return PackedSampling(
            rows=rows,
            edits=pack_edits(upload, columns, slots, positions),
            logprobs=self._pack_logprobs(upload, slots, features),
        )

    def _pack_logprobs(self, upload: StepUpload, slots: IntArray, features: IntArray) -> _WantedLogprobs | None:
        samples = np.flatnonzero(features & Feature.LOGPROBS)
        if not len(samples):
            return None
        return _WantedLogprobs(samples, self._columns.num_logprobs[slots[samples]], upload.add(samples))

    def launch(self, logits: Tensor, packed: PackedSampling, token_table: Tensor) -> DeviceSamples:
        """`logits` [L, V] in any floating dtype; `token_table` int32 [num_slots, width], read for penalties."""
        edited = None
        if packed.edits is not None:
            edited = _rows_of(logits, packed.rows.logit_rows)
            apply_edits(edited, packed.edits, self._penalise, token_table)
        chosen = self._choose_tokens(logits, packed.rows, edited)
        if packed.logprobs is None:
            return DeviceSamples(chosen, None, None)
        samples = packed.logprobs.samples_on_device
        logit_rows = packed.rows.logit_rows.index_select(0, samples)
        token_ids = chosen.token_ids.index_select(0, samples).to(torch.int64)
        num_top = int(packed.logprobs.num_top.max())
        return DeviceSamples(chosen, _logprobs(logits, logit_rows, token_ids, num_top), packed.logprobs)

    def warm_up(self, logits: Tensor, token_table: Tensor) -> None:
        """Has all kernels compiled, for batches of any size, which would hold up the first steps otherwise.

        `logits` [L, V] have dtype and stride of those to come; they are only read.
        """
        num_slots, vocab_size = len(self._columns.features), logits.shape[1]
        for num_samples in sorted({1, min(16, num_slots), num_slots}):
            edited = torch.zeros((num_samples, vocab_size), device=logits.device)
            for all_greedy in (False, True):
                rows = _top_p_rows(num_samples, vocab_size, logits.device, all_greedy=all_greedy)
                self._choose_tokens(logits, rows, None)
                self._choose_tokens(logits, rows, edited)
        one = torch.ones(1, dtype=torch.int32, device=logits.device)
        penalties = torch.ones((1, 3), device=logits.device)
        self._penalise(edited, PenaltyRows(one * 0, one * 0, one, one, penalties, max_length=1), token_table)


def _top_p_rows(num_samples: int, vocab_size: int, device: torch.device, *, all_greedy: bool) -> SampleRows:
    """Samples of the first row of logits, with top-p on."""
    ones = torch.ones(num_samples, dtype=torch.int32, device=device)
    return SampleRows(
        logit_rows=ones * 0,
        temperatures=ones.to(torch.float32),
        floors=ones * NO_THRESHOLD,
        top_k=ones * vocab_size,
        top_p=ones.to(torch.float64) * 0.5,
        keys=ones.to(torch.int64),
        selecting=torch.arange(num_samples, dtype=torch.int32, device=device),
        all_greedy=all_greedy,
    )


def _rows_of(logits: Tensor, logit_rows: Tensor) -> Tensor:
    """A copy of some rows in float32."""
    return logits.index_select(0, logit_rows).to(torch.float32)


def _logprobs(logits: Tensor, logit_rows: Tensor, token_ids: Tensor, num_top: int) -> TokenLogprobs:
    """In slices, since a large vocabulary in float32 takes room."""
    size = max(1, _MAX_LOGITS // logits.shape[1])
    parts = [
        token_logprobs(_rows_of(logits, some_rows), some_ids, num_top)
        for some_rows, some_ids in zip(torch.split(logit_rows, size), torch.split(token_ids, size), strict=True)
    ]
    return concatenate(parts)
