"""Ranks the next tokens of rows on the device, as `rank_candidates` does on the host, without waiting for it.

In three parts, as sampling is: pack, launch, and the result from what was copied back. It knows nothing of beams.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from common.step import Candidates, LogprobRows, StepResult
from kernels.sampling.sampling import best_tokens, finite_rows, model_logprobs, token_ranks
from worker_svc.operations import Penalise
from worker_svc.sampling.device_edits import PackedEdits, apply_edits, pack_edits
from worker_svc.sampling.sampling_columns import Feature, SamplingColumns
from worker_svc.sampling.to_host import to_host
from worker_svc.steps.step_check import IntArray
from worker_svc.steps.step_upload import StepUpload


@dataclass(frozen=True, slots=True)
class PackedCandidates:
    """What the device must know to rank; its tensors have their content once the upload is sent."""

    logit_rows: Tensor  # int32 [C]
    counts: list[int]
    edits: PackedEdits | None
    num_top: dict[int, int]  # of the model's own most likely tokens, by row that asks for them
    rows_with_top: Tensor | None  # int64, the rows in `num_top`


@dataclass(frozen=True, slots=True)
class _ModelRows:
    """What the model itself thinks of candidates; n rows that asked for it."""

    logprobs: Tensor  # float32 [n, K]
    ranks: Tensor  # int32 [n, K]
    top_token_ids: Tensor  # int64 [n, k]
    top_logprobs: Tensor  # float32 [n, k]

    def to_host(self) -> "_ModelRows":
        return _ModelRows(
            to_host(self.logprobs), to_host(self.ranks), to_host(self.top_token_ids), to_host(self.top_logprobs)
        )


@dataclass(frozen=True, slots=True)
class RankedRows:
    """The best tokens of C rows, on the device or in pinned memory."""

    packed: PackedCandidates
    valid: Tensor  # bool [C]
    token_ids: Tensor  # int64 [C, K], K the largest count
    logprobs: Tensor  # float32 [C, K]
    model_rows: _ModelRows | None

    def fetch(self) -> "RankedRows":
        """Queues the copies to the host, to be read once the step's event is reached."""
        return RankedRows(
            packed=self.packed,
            valid=to_host(self.valid),
            token_ids=to_host(self.token_ids),
            logprobs=to_host(self.logprobs),
            model_rows=None if self.model_rows is None else self.model_rows.to_host(),
        )

    def result(self, into: StepResult) -> None:
        """Of what was fetched."""
        valid, token_ids, logprobs = self.valid.tolist(), self.token_ids.tolist(), self.logprobs.tolist()
        rows_of = self._rows_of()
        into.candidates = [
            Candidates(token_ids=token_ids[row][:count], logprobs=logprobs[row][:count], rows=rows_of.get(row))
            if valid[row]
            else Candidates(token_ids=(), logprobs=())
            for row, count in enumerate(self.packed.counts)
        ]

    def _rows_of(self) -> dict[int, LogprobRows]:
        if self.model_rows is None:
            return {}
        own, ranks = self.model_rows.logprobs.tolist(), self.model_rows.ranks.tolist()
        top_token_ids, top_logprobs = self.model_rows.top_token_ids.tolist(), self.model_rows.top_logprobs.tolist()
        found = {}
        for place, (row, num_top) in enumerate(self.packed.num_top.items()):
            count = self.packed.counts[row]
            found[row] = LogprobRows(
                logprobs=own[place][:count],
                ranks=ranks[place][:count],
                num_top=num_top,
                top_token_ids=top_token_ids[place][:num_top] * count,
                top_logprobs=top_logprobs[place][:num_top] * count,
            )
        return found


class DeviceRanker:
    """Ranks for any mix of slots at once."""

    def __init__(self, columns: SamplingColumns, penalise: Penalise) -> None:
        self._columns = columns
        self._penalise = penalise

    def pack(
        self, upload: StepUpload, slots: IntArray, positions: IntArray, logit_rows: IntArray, counts: IntArray
    ) -> PackedCandidates | None:
        """The counts[i] best tokens at positions[i] of slots[i], by row logit_rows[i] of the logits.

        None if there is nothing to rank.
        """
        if not len(slots):
            return None
        columns = self._columns
        with_top = np.flatnonzero(columns.features[slots] & Feature.LOGPROBS)
        num_top = np.minimum(columns.num_logprobs[slots[with_top]], columns.vocab_size)
        return PackedCandidates(
            logit_rows=upload.add(logit_rows.astype(np.int32)),
            counts=counts.tolist(),
            edits=pack_edits(upload, columns, slots, positions),
            num_top=dict(zip(with_top.tolist(), num_top.tolist(), strict=True)),
            rows_with_top=upload.add(with_top) if len(with_top) else None,
        )

    def launch(self, logits: Tensor, packed: PackedCandidates, token_table: Tensor) -> RankedRows:
        """`logits` [L, V] in any floating dtype; `token_table` int32 [num_slots, width], read for penalties."""
        logits = logits.index_select(0, packed.logit_rows).to(torch.float32)
        logprobs = model_logprobs(logits)
        edited = logprobs
        if packed.edits is not None:
            edited = logprobs.clone(memory_format=torch.contiguous_format)
            apply_edits(edited, packed.edits, self._penalise, token_table)
        token_ids = best_tokens(edited, max(packed.counts))
        return RankedRows(
            packed=packed,
            valid=finite_rows(logits) & (edited.amax(-1) < torch.inf),
            token_ids=token_ids,
            logprobs=edited.gather(1, token_ids),
            model_rows=_model_rows(logits, logprobs, token_ids, packed),
        )


def _model_rows(logits: Tensor, logprobs: Tensor, token_ids: Tensor, packed: PackedCandidates) -> _ModelRows | None:
    """The candidates of a row stand at one position, so the most likely tokens beside each are the same."""
    if packed.rows_with_top is None:
        return None
    logits, logprobs, token_ids = (x.index_select(0, packed.rows_with_top) for x in (logits, logprobs, token_ids))
    top_ids = best_tokens(logits, max(packed.num_top.values()))
    return _ModelRows(
        logprobs=logprobs.gather(1, token_ids),
        ranks=token_ranks(logits, token_ids),
        top_token_ids=top_ids,
        top_logprobs=logprobs.gather(1, top_ids),
    )
