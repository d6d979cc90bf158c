"""Room for forced tokens: as far as blocks, the model's length and the tokens of a step allow, and no further."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from common.sampling_params import SequenceSampling
from common.step import Step
from tests.worker.steps import LIMITS, seat_state
from worker_svc.sampling.forced_room import forced_room
from worker_svc.sampling.sampling_columns import SamplingColumns
from worker_svc.steps.seat_table import SeatTable

FORCES = SequenceSampling(seed=0, grammar="{}", forces_text=True)


class Site:
    """A seat table with prompts of 3 tokens, each with its output so far and its blocks, of 4 positions each."""

    def __init__(self, outputs: Mapping[int, int], num_blocks: int = 3, **limits: int) -> None:
        self.table = SeatTable(replace(LIMITS, **limits))
        self.columns = SamplingColumns(LIMITS.num_seats, LIMITS.vocab_size)
        for seat, num_output in outputs.items():
            self.place(seat, num_output, num_blocks)

    def place(self, seat: int, num_output: int, num_blocks: int = 3, sampling: SequenceSampling = FORCES) -> None:
        """A seat that has computed all but the last of its tokens."""
        position = 2 + num_output
        state = seat_state(
            seat,
            [7],
            range(num_blocks * seat, num_blocks * seat + num_blocks),
            position=position,
            history=[5] * position,
            num_prompt_tokens=3,
            sampling=sampling,
        )
        self.table.apply(Step(epoch=1, step_id=1, whole=[state]))
        self.columns.apply([state])

    def room(self, num_spare_positions: int = 1, **step: Any) -> dict[int, int]:
        """Room of each sample that has any."""
        rows = self.table.apply(Step(epoch=1, step_id=1, **step)).rows
        room = forced_room(self.table, self.columns, rows, num_spare_positions)
        return {} if room is None else dict(zip(room.samples.tolist(), room.most.tolist(), strict=True))


@pytest.mark.parametrize("num_spare", [0, 1, 2])
def test_blocks_are_filled_but_for_the_spare_positions(num_spare: int) -> None:
    """Behind the token at position 2 + n, twelve positions have room for 12 - 3 - n."""
    site = Site({1: 1, 2: 4, 3: 7, 4: 8, 5: 9})
    room = site.room(num_spare, rows=[1, 2, 3, 4, 5])
    expected = {0: 8 - num_spare, 1: 5 - num_spare, 2: 2 - num_spare, 3: 1 - num_spare}
    assert room == {sample: most for sample, most in expected.items() if most > 0}


def test_the_longest_sequence_is_a_bound_too() -> None:
    assert Site({1: 1}, num_blocks=2, max_model_len=7).room(rows=[1]) == {0: 2}


def test_what_is_left_of_the_tokens_of_a_step_goes_to_the_first() -> None:
    site = Site({1: 1, 2: 1, 3: 1}, max_batched_tokens=13)
    assert site.room(rows=[1, 2, 3]) == {0: 7, 1: 3}
    assert Site({1: 1, 2: 1}, max_batched_tokens=2).room(rows=[1, 2]) == {}


def test_other_seats_have_none() -> None:
    site = Site({1: 1})
    site.place(2, 1, sampling=SequenceSampling(seed=0, grammar="{}"))
    site.place(3, 1, sampling=SequenceSampling(seed=0, forces_text=True))  # without a grammar
    assert site.room(rows=[3, 2, 1]) == {2: 7}
    assert site.room(rows=[2, 3]) == {}


def test_a_seat_that_computes_its_prompt_has_none() -> None:
    site = Site({1: 0, 2: 1})
    assert site.room(rows=[1, 2]) == {1: 7}


def test_a_row_of_several_tokens_has_none() -> None:
    site = Site({2: 1})
    state = seat_state(1, [7, 8], [0, 1, 2], position=4, history=[5] * 4, num_prompt_tokens=3, sampling=FORCES)
    site.columns.apply([state])
    assert site.room(whole=[state], rows=[1, 2], num_tokens=[2, 1]) == {1: 7}


def test_a_row_that_samples_for_another_seat_has_none() -> None:
    site = Site({1: 1, 4: 1})
    state = seat_state(2, [], [0, 1, 2], position=4, history=[5] * 4, num_prompt_tokens=3, sampling=FORCES)
    site.columns.apply([state])
    assert site.room(whole=[state], rows=[1, 4], samples=[0, 1, 0, 2, 1, 4]) == {2: 7}


def test_rows_with_forced_tokens_end_behind_them() -> None:
    site = Site({1: 1, 2: 1})
    rows = site.table.apply(Step(epoch=1, step_id=1, rows=[1, 2])).rows
    longer = site.table.lengthen(rows, {1: [40, 41]})
    assert (longer.starts.tolist(), longer.ends.tolist()) == ([3, 3], [4, 6])
    assert longer.sample_positions.tolist() == [4, 6]
    assert not longer.is_decode
    site.table.advance(longer, [50, 51])
    assert site.table.token_ids[2, 3:7].tolist() == [7, 40, 41, 51]
    assert site.table.apply(Step(epoch=1, step_id=1, rows=[1, 2])).rows.starts.tolist() == [4, 6]
