"""Packs the edits of logits that a step's seats ask for into the step's upload.

Histories are not packed: kernels read them from the token table, which has the newest tokens. A kind of edit that no
seat of the step uses costs nothing.
"""

import numpy as np

from kernels.sampling.logit_edits import LogitEdits, TokenPairs
from kernels.sampling.penalty_reference import PenaltyRows
from worker_svc.sampling.gathered_columns import GatheredColumns, IdPairs, PenalisedSeats
from worker_svc.steps.step_check import IntArray
from worker_svc.steps.step_upload import Upload


def pack_edits(upload: Upload, columns: GatheredColumns, positions: IntArray) -> LogitEdits | None:
    """Pack the edits of the rows of `columns`, whose next tokens are at `positions`; None if no row is edited."""
    edits = columns.edits
    if edits is None:
        return None
    is_suppressed = edits.has_suppressed & (positions < edits.suppressed_until)
    packed = LogitEdits(
        allowed=_pack_pairs(upload, edits.allowed),
        suppressed=_pack_pairs(upload, IdPairs.of(is_suppressed, edits.suppressed)),
        biased=_pack_pairs(upload, edits.biased),
        biases=None if edits.biased is None else upload.add(edits.biases),
        penalties=_pack_penalties(upload, edits.penalised, positions),
    )
    kinds = (packed.allowed, packed.suppressed, packed.biased, packed.penalties)
    return packed if any(kind is not None for kind in kinds) else None


def _pack_pairs(upload: Upload, pairs: IdPairs | None) -> TokenPairs | None:
    return None if pairs is None else TokenPairs(upload.add(pairs.rows), upload.add(pairs.token_ids))


def _pack_penalties(upload: Upload, penalised: PenalisedSeats | None, positions: IntArray) -> PenaltyRows | None:
    if penalised is None:
        return None
    lengths = positions[penalised.rows]
    return PenaltyRows(
        logit_rows=upload.add(penalised.rows32),
        seats=upload.add(penalised.seats32),
        lengths=upload.add(lengths.astype(np.int32)),
        num_prompt=upload.add(penalised.num_prompt),
        penalties=upload.add(penalised.penalties),
        max_length=int(lengths.max()),
    )
