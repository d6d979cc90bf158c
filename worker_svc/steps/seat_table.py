"""State that a worker keeps between steps: block table, tokens, position and sampling parameters of each seat.

The state is on the host, in arrays over all seats, so that a batch is gathered without a loop. It is a cache of the
scheduler's messages: it owns no blocks and knows no requests.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from common.sampling_params import SequenceSampling
from common.step import SequenceState, Step
from worker_svc.steps.step_check import CheckedStep, IntArray, SeatCounts, StepRows, check_step
from worker_svc.steps.step_limits import StepLimits

Int32Array = npt.NDArray[np.int32]


class SeatTable:
    """The seats of one worker. Used by the execution thread alone."""

    def __init__(self, limits: StepLimits) -> None:
        self.limits = limits
        self.counts = SeatCounts.empty(limits.num_seats)
        self.block_tables: Int32Array = np.zeros((limits.num_seats, limits.max_blocks), dtype=np.int32)
        # One more than the longest sequence, for a token sampled after its last.
        self.token_ids: Int32Array = np.zeros((limits.num_seats, limits.max_model_len + 1), dtype=np.int32)
        self.num_prompt_tokens: IntArray = np.zeros(limits.num_seats, dtype=np.int64)
        self.sampling = [SequenceSampling(seed=0)] * limits.num_seats
        self._rows: StepRows | None = None  # of the last step

    def apply(self, step: Step) -> CheckedStep:
        """Applies a step, except for its rows. Raises InvalidStepError, without any change, if it is invalid."""
        checked = self.check(step)
        self.take_over(step, checked)
        return checked

    def check(self, step: Step) -> CheckedStep:
        """Check a step, which changes nothing. Raises InvalidStepError."""
        return check_step(step, self.counts, self.limits, self._rows)

    def take_over(self, step: Step, checked: CheckedStep) -> None:
        """Applies a step, except for its rows, as the check of it has left it."""
        for state in step.whole:
            self._place(state)
        if len(checked.appended.seats):
            self.block_tables[checked.appended.seats, checked.appended.columns] = checked.appended.blocks
        self.counts, self._rows = checked.counts, checked.rows

    def advance(self, rows: StepRows, token_ids: Sequence[int] | IntArray | None) -> None:
        """Records that the rows are computed and `token_ids` [S] sampled: each becomes its seat's next input.

        token_ids: None if only the device knows the tokens (`DeviceSeats`).
        """
        self.counts.positions[rows.seats] = rows.ends
        positions = rows.sample_positions
        self.counts.positions[rows.sample_seats] = positions
        self.counts.num_known[rows.sample_seats] = positions + 1
        if token_ids is not None:
            self.token_ids[rows.sample_seats, positions] = token_ids

    def lengthen(self, rows: StepRows, forced: Mapping[int, Sequence[int]]) -> StepRows:
        """The rows with tokens that follow their own before they sample, by index of the sample."""
        ends = rows.ends.copy()
        for sample, token_ids in forced.items():
            row, seat = rows.sample_rows[sample], rows.sample_seats[sample]
            self.token_ids[seat, ends[row] : ends[row] + len(token_ids)] = token_ids
            ends[row] += len(token_ids)
        return replace(rows, ends=ends, is_decode=False)

    def _place(self, state: SequenceState) -> None:
        self.block_tables[state.seat] = 0
        self.block_tables[state.seat, : len(state.block_table)] = state.block_table
        self.token_ids[state.seat, : len(state.history)] = state.history
        self.token_ids[state.seat, state.position : state.position + len(state.token_ids)] = state.token_ids
        self.num_prompt_tokens[state.seat] = state.num_prompt_tokens
        self.sampling[state.seat] = state.sampling
