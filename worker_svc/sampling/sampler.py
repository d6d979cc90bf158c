"""Samples a step's tokens without waiting for the device: packs parameters, queues operations, reads the result.

The host packs. Operations are queued on the logits' device; a CPU runs them at once. The result is read once the step's
event is reached. A seat's token does not depend on the rest of the batch. Knows nothing of rows of the step, sequences
or blocks.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from common.step import StepResult
from kernels.sampling.choice_reference import ChosenTokens, SampleRows
from kernels.sampling.logit_edits import LogitEdits, TokenMasks, with_masks
from kernels.sampling.penalty_reference import PenaltyRows
from kernels.sampling.sampling import NO_THRESHOLD, TokenLogprobs
from kernels.sampling.sampling_operations import SamplingOperations
from worker_svc.sampling.edits import pack_edits
from worker_svc.sampling.logprob_rows import logprob_rows
from worker_svc.sampling.sampling_columns import Feature, SamplingColumns
from worker_svc.sampling.to_host import logprobs_to_host, to_host
from worker_svc.steps.step_check import IntArray
from worker_svc.steps.step_upload import Upload


@dataclass(frozen=True, slots=True)
class _WantedLogprobs:
    """Samples whose log-probabilities were asked for."""

    samples: list[int]  # [n]
    num_top: list[int]  # [n]
    samples_on_device: Tensor  # int64 [n]


@dataclass(frozen=True, slots=True)
class PackedSampling:
    """Parameters of a step's samples; tensors are filled once the upload is sent."""

    rows: SampleRows
    edits: LogitEdits | None
    logprobs: _WantedLogprobs | None


@dataclass(frozen=True, slots=True)
class LaunchedSamples:
    """Samples whose operations are queued, on the device or in pinned memory."""

    chosen: ChosenTokens
    logprobs: TokenLogprobs | None
    wanted: _WantedLogprobs | None

    def fetch(self) -> "LaunchedSamples":
        """Queue the copies to the host, to be read once the step's event is reached."""
        return LaunchedSamples(
            chosen=ChosenTokens(to_host(self.chosen.token_ids), to_host(self.chosen.valid)),
            logprobs=None if self.logprobs is None else logprobs_to_host(self.logprobs),
            wanted=self.wanted,
        )

    def fill_result(self, result: StepResult) -> None:
        """Set tokens and invalid samples, and add log-probabilities by sample. Call after `fetch` only."""
        valid = self.chosen.valid
        result.token_ids = self.chosen.token_ids.tolist()
        if not valid.all():
            result.invalid_samples = (~valid).nonzero().flatten().tolist()
        if self.wanted is not None and self.logprobs is not None:
            rows = logprob_rows(self.logprobs, [1] * len(self.wanted.samples), self.wanted.num_top)
            result.logprobs = dict(zip(self.wanted.samples, rows, strict=True))


class Sampler:
    """Samples for any mix of seats at once, with the operations it is given."""

    def __init__(self, columns: SamplingColumns, operations: SamplingOperations) -> None:
        self._columns = columns
        self._operations = operations

    def pack(self, upload: Upload, seats: IntArray, positions: IntArray, logit_rows: IntArray) -> PackedSampling | None:
        """Pack sample i for seats[i], at positions[i] in prompt and output, from row logit_rows[i] of the logits.

        None if there are no samples.
        """
        if not len(seats):
            return None
        columns = self._columns
        features = columns.features[seats]
        rows = SampleRows(
            logit_rows=upload.add(logit_rows.astype(np.int32)),
            temperatures=upload.add(columns.temperatures[seats]),
            floors=upload.add(columns.floors[seats]),
            top_k=upload.add(columns.top_k[seats]),
            top_p=upload.add(columns.top_p[seats]),
            keys=upload.add(columns.keys(seats, positions)),
            selecting=upload.add(np.flatnonzero(features & Feature.SELECTS).astype(np.int32)),
            all_greedy=not (features & Feature.DRAWS).any(),
        )
        return PackedSampling(
            rows=rows,
            edits=pack_edits(upload, columns, seats, positions),
            logprobs=self._pack_logprobs(upload, seats, features),
        )

    def _pack_logprobs(self, upload: Upload, seats: IntArray, features: IntArray) -> _WantedLogprobs | None:
        samples = np.flatnonzero(features & Feature.LOGPROBS)
        if not len(samples):
            return None
        num_top = self._columns.num_logprobs[seats[samples]]
        return _WantedLogprobs(samples.tolist(), num_top.tolist(), upload.add(samples))

    def launch(
        self, logits: Tensor, packed: PackedSampling, token_table: Tensor, masks: TokenMasks | None = None
    ) -> LaunchedSamples:
        """Queue sampling from `logits` [L, V], in any floating dtype.

        `token_table` int32 [num_seats, width] is read for penalties; rows of `masks` are samples.
        """
        edits = with_masks(packed.edits, masks)
        chosen = self._operations.choose_tokens(logits, packed.rows, edits, token_table)
        if packed.logprobs is None:
            return LaunchedSamples(chosen, None, None)
        samples = packed.logprobs.samples_on_device
        logit_rows = packed.rows.logit_rows.index_select(0, samples)
        token_ids = chosen.token_ids.index_select(0, samples).to(torch.int64)
        num_top = max(packed.logprobs.num_top)
        logprobs = self._operations.token_logprobs(logits, logit_rows, token_ids[:, None], num_top)
        return LaunchedSamples(chosen, logprobs, packed.logprobs)

    def warm_up(self, logits: Tensor, token_table: Tensor) -> None:
        """Compile all kernels, for batches of any size; otherwise the first steps would wait for that.

        `logits` [L, V] must have the dtype and stride of later steps; they are only read.
        """
        num_seats, vocab_size = len(self._columns.features), logits.shape[1]
        for num_samples in sorted({1, min(16, num_seats), num_seats}):
            edits = _penalties_of_one_row(logits.device)
            for all_greedy in (False, True):
                rows = _top_p_rows(num_samples, vocab_size, logits.device, all_greedy=all_greedy)
                self._operations.choose_tokens(logits, rows, None, token_table)
                self._operations.choose_tokens(logits, rows, edits, token_table)


def _penalties_of_one_row(device: torch.device) -> LogitEdits:
    one = torch.ones(1, dtype=torch.int32, device=device)
    penalties = PenaltyRows(one * 0, one * 0, one, one, torch.ones((1, 3), device=device), max_length=1)
    return LogitEdits(penalties=penalties)


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
