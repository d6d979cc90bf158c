"""Columns of the seats of a step, gathered once for as long as the same seats decode: from step to step only their
positions change. Knows no positions and no device.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
import numpy.typing as npt

from worker_svc.sampling.sampling_columns import Feature, Float32Array, SamplingColumns
from worker_svc.steps.step_check import BoolArray, IntArray

Int32Array = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class IdPairs:
    """Token ids of the rows that have some: pair i is token_ids[i] in row rows[i]; rows ascend."""

    rows: IntArray
    token_ids: IntArray

    @classmethod
    def of(cls, is_on: BoolArray, token_ids: Sequence[IntArray]) -> Self | None:
        """Pairs of the rows where `is_on`; None without such a row."""
        rows = np.flatnonzero(is_on)
        if not len(rows):
            return None
        some_ids = [token_ids[row] for row in rows.tolist()]
        return cls(np.repeat(rows, [len(ids) for ids in some_ids]), np.concatenate(some_ids))


@dataclass(frozen=True, slots=True)
class PenalisedSeats:
    """Columns of the rows that are penalised."""

    rows: IntArray  # [n]
    rows32: Int32Array
    seats32: Int32Array
    num_prompt: Int32Array
    penalties: Float32Array  # [n, 3]

    @classmethod
    def of(cls, columns: SamplingColumns, seats: IntArray, is_on: BoolArray) -> Self | None:
        """Columns of the rows where `is_on`; None without such a row."""
        rows = np.flatnonzero(is_on)
        if not len(rows):
            return None
        some = seats[rows]
        return cls(
            rows=rows,
            rows32=rows.astype(np.int32),
            seats32=some.astype(np.int32),
            num_prompt=columns.num_prompt_tokens[some],
            penalties=columns.penalties[some],
        )


@dataclass(frozen=True, slots=True)
class GatheredEdits:
    """Edits of the rows. Suppressed ids act up to a position."""

    allowed: IdPairs | None
    biased: IdPairs | None
    biases: Float32Array  # beside `biased`
    penalised: PenalisedSeats | None
    has_suppressed: BoolArray
    suppressed_until: IntArray
    suppressed: Sequence[IntArray]

    @classmethod
    def of(cls, columns: SamplingColumns, seats: IntArray, features: IntArray) -> Self | None:
        """Edits of these seats; None if there are none."""
        if not np.bitwise_or.reduce(features) & Feature.EDITS:
            return None
        edited = columns.edited_ids[seats].tolist()
        is_biased = features & Feature.BIAS != 0
        biases = [edited[row].biases for row in np.flatnonzero(is_biased).tolist()]
        return cls(
            allowed=IdPairs.of(features & Feature.ALLOWED_IDS != 0, [ids.allowed for ids in edited]),
            biased=IdPairs.of(is_biased, [ids.biased for ids in edited]),
            biases=np.concatenate(biases) if biases else np.zeros(0, dtype=np.float32),
            penalised=PenalisedSeats.of(columns, seats, features & Feature.PENALTIES != 0),
            has_suppressed=features & Feature.SUPPRESSED_IDS != 0,
            suppressed_until=columns.suppressed_until[seats],
            suppressed=[ids.suppressed for ids in edited],
        )


@dataclass(frozen=True, slots=True)
class GatheredColumns:
    """Columns of S rows, [S] each, in the form that the device takes."""

    seats: IntArray
    temperatures: Float32Array
    floors: Float32Array
    top_k: Int32Array
    top_p: npt.NDArray[np.float64]
    selecting: Int32Array  # rows with top-k or top-p
    all_greedy: bool
    edits: GatheredEdits | None
    with_logprobs: IntArray  # rows
    num_logprobs: IntArray  # of these rows

    @classmethod
    def of(cls, columns: SamplingColumns, seats: IntArray) -> Self:
        features = columns.features[seats]
        with_logprobs = np.flatnonzero(features & Feature.LOGPROBS)
        return cls(
            seats=seats.copy(),
            temperatures=columns.temperatures[seats],
            floors=columns.floors[seats],
            top_k=columns.top_k[seats],
            top_p=columns.top_p[seats],
            selecting=np.flatnonzero(features & Feature.SELECTS).astype(np.int32),
            all_greedy=not (features & Feature.DRAWS).any(),
            edits=GatheredEdits.of(columns, seats, features),
            with_logprobs=with_logprobs,
            num_logprobs=columns.num_logprobs[seats[with_logprobs]],
        )


class ColumnGatherer:
    """Gathers for one caller, whose seats are mostly those of its last call."""

    def __init__(self, columns: SamplingColumns) -> None:
        self._columns = columns
        self._gathered: GatheredColumns | None = None
        self._num_placed = 0  # when these were gathered

    def gather(self, seats: IntArray) -> GatheredColumns:
        """Columns of row i for seats[i]. Nobody may change their arrays."""
        gathered, num_placed = self._gathered, self._columns.num_placed
        if gathered is None or self._num_placed != num_placed or not np.array_equal(gathered.seats, seats):
            gathered = self._gathered = GatheredColumns.of(self._columns, seats)
            self._num_placed = num_placed
        return gathered
