"""The edits of a step's rows of logits on the device: what `edit_rows` does on the host, without waiting for it.

The host packs what the step's slots ask for; histories are read on the device, where the newest tokens are. A kind of
edit that no slot of the step has costs nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from kernels.sampling.penalty_reference import PenaltyRows
from kernels.sampling.sampling import add_bias, allow_only, suppress
from worker_svc.operations import Penalise
from worker_svc.sampling.sampling_columns import EditedIds, Feature, SamplingColumns
from worker_svc.steps.step_check import BoolArray, IntArray
from worker_svc.steps.step_upload import StepUpload


@dataclass(frozen=True, slots=True)
class _Pairs:
    """Elements of the logits, int64 [N] each, on the device."""

    rows: Tensor
    token_ids: Tensor


@dataclass(frozen=True, slots=True)
class PackedEdits:
    """What is edited in [S, V] logits; None where no row asks for it."""

    allowed: _Pairs | None
    suppressed: _Pairs | None
    biased: _Pairs | None
    biases: Tensor | None  # float32, beside `biased`
    penalties: PenaltyRows | None


def pack_edits(
    upload: StepUpload, columns: SamplingColumns, slots: IntArray, positions: IntArray
) -> PackedEdits | None:
    """Row i is that of slots[i], whose next token is at positions[i]; None if no row is edited."""
    features = columns.features[slots]
    if not np.bitwise_or.reduce(features) & Feature.EDITS:
        return None
    is_suppressed = (features & Feature.SUPPRESSED_IDS != 0) & (positions < columns.suppressed_until[slots])
    is_biased = features & Feature.BIAS != 0
    edited: list[EditedIds] = columns.edited_ids[slots].tolist()
    packed = PackedEdits(
        allowed=_pack_pairs(upload, features & Feature.ALLOWED_IDS != 0, [ids.allowed for ids in edited]),
        suppressed=_pack_pairs(upload, is_suppressed, [ids.suppressed for ids in edited]),
        biased=_pack_pairs(upload, is_biased, [ids.biased for ids in edited]),
        biases=_pack_biases(upload, is_biased, edited),
        penalties=_pack_penalties(upload, columns, slots, positions, features & Feature.PENALTIES != 0),
    )
    kinds = (packed.allowed, packed.suppressed, packed.biased, packed.penalties)
    return packed if any(kind is not None for kind in kinds) else None


def apply_edits(logits: Tensor, edits: PackedEdits, penalise: Penalise, token_table: Tensor) -> None:
    """In place, in the order in which `edit_rows` does it; `logits` float32 [S, V]."""
    if edits.allowed is not None:
        allow_only(logits, edits.allowed.rows, edits.allowed.token_ids)
    if edits.suppressed is not None:
        suppress(logits, edits.suppressed.rows, edits.suppressed.token_ids)
    if edits.biased is not None and edits.biases is not None:
        add_bias(logits, edits.biased.rows, edits.biased.token_ids, edits.biases)
    if edits.penalties is not None:
        penalise(logits, edits.penalties, token_table)


def _pack_pairs(upload: StepUpload, is_on: BoolArray, token_ids: Sequence[IntArray]) -> _Pairs | None:
    rows = np.flatnonzero(is_on)
    if not len(rows):
        return None
    some_ids = [token_ids[row] for row in rows.tolist()]
    pairs = np.repeat(rows, [len(ids) for ids in some_ids])
    return _Pairs(upload.add(pairs), upload.add(np.concatenate(some_ids)))


def _pack_biases(upload: StepUpload, is_on: BoolArray, edited: Sequence[EditedIds]) -> Tensor | None:
    rows = np.flatnonzero(is_on).tolist()
    return upload.add(np.concatenate([edited[row].biases for row in rows])) if rows else None


def _pack_penalties(
    upload: StepUpload, columns: SamplingColumns, slots: IntArray, positions: IntArray, is_on: BoolArray
) -> PenaltyRows | None:
    rows = np.flatnonzero(is_on)
    if not len(rows):
        return None
    some_slots, lengths = slots[rows], positions[rows]
    return PenaltyRows(
        logit_rows=upload.add(rows.astype(np.int32)),
        slots=upload.add(some_slots.astype(np.int32)),
        lengths=upload.add(lengths.astype(np.int32)),
        num_prompt=upload.add(columns.num_prompt_tokens[some_slots]),
        penalties=upload.add(columns.penalties[some_slots]),
        max_length=int(lengths.max()),
    )
