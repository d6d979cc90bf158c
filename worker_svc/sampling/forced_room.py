"""Room for forced tokens: how many of them each row of a step can compute besides its own token.

Knows counts of seats, not their grammars.
"""

from dataclasses import dataclass

import numpy as np

from worker_svc.sampling.sampling_columns import Feature, SamplingColumns
from worker_svc.steps.seat_table import SeatTable
from worker_svc.steps.step_check import IntArray, StepRows


@dataclass(frozen=True, slots=True)
class ForcedRoom:
    """Samples whose rows have room, and how much: two arrays of equal length."""

    samples: IntArray
    most: IntArray  # tokens


def forced_room(
    table: SeatTable, columns: SamplingColumns, rows: StepRows, num_spare_positions: int
) -> ForcedRoom | None:
    """Room of the rows that decode one token for their own seat alone; None if there is none.

    See StepRequest.num_spare_positions. What is left of the tokens of a step goes to the first of these rows.
    """
    seats, sample_rows = rows.sample_seats, rows.sample_rows
    forces = (columns.features[seats] & Feature.FORCES_TEXT) != 0
    if not np.count_nonzero(forces):
        return None
    starts, ends = rows.starts[sample_rows], rows.ends[sample_rows]
    decodes = (ends == starts + 1) & (starts >= table.num_prompt_tokens[seats])
    is_own = (rows.seats[sample_rows] == seats) & (
        np.bincount(sample_rows, minlength=len(rows.seats))[sample_rows] == 1
    )
    limits = table.limits
    held = np.minimum(table.counts.num_blocks[seats] * limits.block_size, limits.max_model_len)
    samples = np.flatnonzero(forces & decodes & is_own & (held - ends > num_spare_positions))
    room = (held - ends)[samples] - num_spare_positions
    left = limits.max_batched_tokens - int(rows.num_tokens.sum())
    most = np.minimum(np.cumsum(room), left)
    most = np.diff(most, prepend=0)
    return ForcedRoom(samples[most > 0], most[most > 0]) if np.count_nonzero(most > 0) else None
