"""Packs the edits of logits that a step's seats ask for into the step's upload.

Histories are not packed: kernels read them from the token table, which has the newest tokens. A kind of edit that no
seat of the step uses costs nothing.
"""

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from kernels.sampling.logit_edits import LogitEdits, TokenMasks, TokenPairs
from kernels.sampling.penalty_reference import PenaltyRows
from worker_svc.sampling.sampling_columns import EditedIds, Feature, SamplingColumns
from worker_svc.steps.step_check import BoolArray, IntArray
from worker_svc.steps.step_upload import Upload


def pack_edits(upload: Upload, columns: SamplingColumns, seats: IntArray, positions: IntArray) -> LogitEdits | None:
    """Pack the edits of row i for seats[i], whose next token is at positions[i]; None if no row is edited."""
    features = columns.features[seats]
    if not np.bitwise_or.reduce(features) & Feature.EDITS:
        return None
    is_suppressed = (features & Feature.SUPPRESSED_IDS != 0) & (positions < columns.suppressed_until[seats])
    is_biased = features & Feature.BIAS != 0
    edited: list[EditedIds] = columns.edited_ids[seats].tolist()
    packed = LogitEdits(
        allowed=_pack_pairs(upload, features & Feature.ALLOWED_IDS != 0, [ids.allowed for ids in edited]),
        suppressed=_pack_pairs(upload, is_suppressed, [ids.suppressed for ids in edited]),
        biased=_pack_pairs(upload, is_biased, [ids.biased for ids in edited]),
        biases=_pack_biases(upload, is_biased, edited),
        penalties=_pack_penalties(upload, columns, seats, positions, features & Feature.PENALTIES != 0),
        masks=_pack_masks(upload, features & Feature.ALLOWED_MASK != 0, edited),
    )
    kinds = (packed.allowed, packed.suppressed, packed.biased, packed.penalties, packed.masks)
    return packed if any(kind is not None for kind in kinds) else None


def _pack_pairs(upload: Upload, is_on: BoolArray, token_ids: Sequence[IntArray]) -> TokenPairs | None:
    rows = np.flatnonzero(is_on)
    if not len(rows):
        return None
    some_ids = [token_ids[row] for row in rows.tolist()]
    pairs = np.repeat(rows, [len(ids) for ids in some_ids])
    return TokenPairs(upload.add(pairs), upload.add(np.concatenate(some_ids)))


def _pack_masks(upload: Upload, is_on: BoolArray, edited: Sequence[EditedIds]) -> TokenMasks | None:
    rows = np.flatnonzero(is_on)
    words = [mask for row in rows.tolist() if (mask := edited[row].mask) is not None]
    return TokenMasks(upload.add(rows), upload.add(np.stack(words))) if words else None


def _pack_biases(upload: Upload, is_on: BoolArray, edited: Sequence[EditedIds]) -> Tensor | None:
    rows = np.flatnonzero(is_on).tolist()
    return upload.add(np.concatenate([edited[row].biases for row in rows])) if rows else None


def _pack_penalties(
    upload: Upload, columns: SamplingColumns, seats: IntArray, positions: IntArray, is_on: BoolArray
) -> PenaltyRows | None:
    rows = np.flatnonzero(is_on)
    if not len(rows):
        return None
    some_seats, lengths = seats[rows], positions[rows]
    return PenaltyRows(
        logit_rows=upload.add(rows.astype(np.int32)),
        seats=upload.add(some_seats.astype(np.int32)),
        lengths=upload.add(lengths.astype(np.int32)),
        num_prompt=upload.add(columns.num_prompt_tokens[some_seats]),
        penalties=upload.add(columns.penalties[some_seats]),
        max_length=int(lengths.max()),
    )
