"""The seat table: what each part of a step does to it."""

import numpy as np
import pytest

from common.sampling_params import SequenceSampling
from common.step import Step
from tests.worker.steps import LIMITS, seat_state
from worker_svc.steps.seat_table import SeatTable
from worker_svc.steps.step_check import CheckedStep
from worker_svc.steps.step_limits import InvalidStepError


def apply(table: SeatTable, **fields: object) -> CheckedStep:
    return table.apply(Step(epoch=1, step_id=1, **fields))  # type: ignore[arg-type]


@pytest.fixture
def table() -> SeatTable:
    """Seat 2 has a prompt of six tokens in blocks 7 and 3; none is computed."""
    table = SeatTable(LIMITS)
    apply(table, whole=[seat_state(2, [10, 11, 12, 13, 14, 15], [7, 3])])
    return table


def test_a_prompt_sent_once_is_computed_in_chunks(table: SeatTable) -> None:
    first = apply(table, rows=[2], num_tokens=[4], samples=[]).rows
    table.advance(first, [])
    second = apply(table, rows=[2], num_tokens=[2]).rows
    assert (first.starts.tolist(), first.ends.tolist()) == ([0], [4])
    assert (second.starts.tolist(), second.ends.tolist()) == ([4], [6])


def test_a_sampled_token_is_the_next_input(table: SeatTable) -> None:
    table.advance(apply(table, rows=[2], num_tokens=[6]).rows, [42])
    rows = apply(table, rows=[2]).rows
    assert rows.starts.tolist() == [6]
    assert table.token_ids[2, 6] == 42


def test_appended_blocks_go_to_the_end_of_their_tables_in_order(table: SeatTable) -> None:
    apply(table, whole=[seat_state(5, [1], [])], append_pairs=[2, 20, 5, 21, 2, 22, 5, 23])
    assert table.block_tables[2, :4].tolist() == [7, 3, 20, 22]
    assert table.block_tables[5, :2].tolist() == [21, 23]
    apply(table, append_pairs=[5, 24, 2, 25])
    assert table.block_tables[2, :5].tolist() == [7, 3, 20, 22, 25]
    assert table.block_tables[5, :3].tolist() == [21, 23, 24]


def test_one_row_feeds_several_seats(table: SeatTable) -> None:
    """The first token of n samples: the second seat shares the prompt's blocks and computes nothing of it."""
    second = seat_state(
        6, [], [7, 3], position=6, num_prompt_tokens=6, sampling=SequenceSampling(seed=1, sample_index=1)
    )
    rows = apply(table, whole=[second], rows=[2], num_tokens=[6], samples=[0, 2, 0, 6]).rows
    table.advance(rows, [50, 51])
    assert (table.token_ids[2, 6], table.token_ids[6, 6]) == (50, 51)
    assert table.counts.positions[[2, 6]].tolist() == [6, 6]
    assert table.counts.num_known[[2, 6]].tolist() == [7, 7]


def test_the_second_seat_of_a_row_may_also_be_sent_with_the_prompt(table: SeatTable) -> None:
    second = seat_state(6, [10, 11, 12, 13, 14, 15], [7, 3])
    rows = apply(table, whole=[second], rows=[2], num_tokens=[6], samples=[0, 2, 0, 6]).rows
    table.advance(rows, [50, 51])
    assert table.counts.positions[6] == 6


def test_a_snapshot_drops_every_seat_that_is_not_in_it(table: SeatTable) -> None:
    apply(table, snapshot=True, whole=[seat_state(0, [1], [1])])
    assert np.flatnonzero(table.counts.live).tolist() == [0]


def test_a_freed_seat_can_be_filled_in_the_same_step(table: SeatTable) -> None:
    apply(table, freed_seats=[2], whole=[seat_state(2, [9], [30])])
    assert table.counts.live[2]
    assert table.block_tables[2, :2].tolist() == [30, 0]


def test_a_history_comes_before_the_tokens(table: SeatTable) -> None:
    penalised = SequenceSampling(seed=0, repetition_penalty=1.5)
    state = seat_state(3, [6], [1], position=2, history=[4, 5], num_prompt_tokens=1, sampling=penalised)
    apply(table, whole=[state])
    assert table.token_ids[3, :3].tolist() == [4, 5, 6]


def test_a_ranked_row_advances_its_seat_but_not_what_it_knows(table: SeatTable) -> None:
    rows = apply(table, rows=[2], num_tokens=[6], samples=[], candidates=[0, 5]).rows
    assert (rows.candidate_rows.tolist(), rows.candidate_counts.tolist()) == ([0], [5])
    table.advance(rows, [])
    assert (table.counts.positions[2], table.counts.num_known[2]) == (6, 6)
    with pytest.raises(InvalidStepError, match="seat 2 knows 6 tokens and is to compute 6 to 7"):
        apply(table, rows=[2])
    beams = [seat_state(seat, [token], [7, block], position=6) for seat, token, block in ((2, 50, 3), (6, 51, 9))]
    rows = apply(table, whole=beams, rows=[2, 6], samples=[], candidates=[0, 5, 1, 5]).rows
    assert (rows.starts.tolist(), rows.ends.tolist()) == ([6, 6], [7, 7])
    assert table.token_ids[[2, 6], 6].tolist() == [50, 51]


def test_no_more_candidates_are_ranked_than_there_are_tokens(table: SeatTable) -> None:
    rows = apply(table, rows=[2], num_tokens=[6], samples=[], candidates=[0, 2_000_000_000]).rows
    assert rows.candidate_counts.tolist() == [LIMITS.vocab_size]


def test_moves_of_blocks_are_given_back_as_pairs(table: SeatTable) -> None:
    checked = apply(table, swap_out=[7, 0, 3, 1], swap_in=[2, 30], copies=[7, 8, 8, 9])
    assert checked.swap_out == [(7, 0), (3, 1)]
    assert checked.swap_in == [(2, 30)]
    assert checked.copies == [(7, 8), (8, 9)]


def test_the_longest_sequence_can_be_filled_and_still_sample() -> None:
    table = SeatTable(LIMITS)
    tokens = list(range(LIMITS.max_model_len))
    state = seat_state(0, tokens[30:], list(range(11)), position=30, num_prompt_tokens=40)
    table.advance(apply(table, whole=[state], rows=[0], num_tokens=[10]).rows, [1])
    assert table.counts.num_known[0] == LIMITS.max_model_len + 1
    with pytest.raises(InvalidStepError, match="computes up to 41, past the longest 40"):
        apply(table, rows=[0])


def test_a_step_may_rank_the_most_likely_token_alone_and_moves_only_what_it_says() -> None:
    table = SeatTable(LIMITS)
    whole = [seat_state(2, [1, 2, 3], [0])]
    checked = table.apply(
        Step(epoch=1, step_id=1, snapshot=True, whole=whole, rows=[2], num_tokens=[3], samples=[], candidates=[0, 1])
    )
    assert (checked.rows.candidate_rows.tolist(), checked.rows.candidate_counts.tolist()) == ([0], [1])
    assert (checked.swap_out, checked.placed, checked.swap_in, checked.copies) == ([], [], [], [])
