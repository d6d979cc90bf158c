"""A step is taken whole or refused whole: what is refused, with which words, and that nothing changes then."""

import math
from array import array
from dataclasses import fields as fields_of
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.sampling_params import SequenceSampling
from common.step import Step
from tests.worker.steps import GREEDY, LIMITS, seat_state
from worker_svc.steps.seat_table import SeatTable
from worker_svc.steps.step_check import StepRows, check_step
from worker_svc.steps.step_limits import InvalidStepError

PENALISED = replace(GREEDY, frequency_penalty=1.0)
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"freed_seats": [8]}, "freed_seats names seat 8: there are 8, counted from 0"),
    ({"freed_seats": [-1]}, "freed_seats names seat -1"),
    ({"freed_seats": [5]}, "freed_seats[0] names seat 5, which is not in use"),
    ({"whole": [seat_state(8, [1], [0])]}, "whole[0].seat names seat 8"),
    ({"whole": [seat_state(3, [1], [0]), seat_state(3, [1], [0])]}, "whole names 3 twice"),
    ({"whole": [seat_state(3, [1], [32])]}, "whole[0].block_table names block 32"),
    ({"whole": [seat_state(3, [1], [0] * 12)]}, "whole[0].block_table has 12 blocks: at most 11"),
    ({"whole": [seat_state(3, [100], [0])]}, "whole[0].token_ids names token id 100"),
    ({"whole": [seat_state(3, [-1], [0])]}, "whole[0].token_ids names token id -1"),
    ({"whole": [seat_state(3, [1], [0], position=-1)]}, "whole[0] goes from position -1"),
    ({"whole": [seat_state(3, [1, 2], [0], position=39)]}, "whole[0] goes from position 39 to 41"),
    ({"whole": [seat_state(3, [1], [0], num_prompt_tokens=-1)]}, "whole[0].num_prompt_tokens is -1"),
    ({"whole": [seat_state(3, [1], [0], position=2, history=[1])]}, "whole[0].history has 1 tokens"),
    ({"whole": [seat_state(3, [1], [0], position=1, history=[100])]}, "whole[0].history names token id 100"),
    ({"whole": [seat_state(3, [1], [0], position=2, sampling=PENALISED)]}, "whole[0].history has 0 tokens"),
    (
        {"whole": [seat_state(3, [1], [0], num_prompt_tokens=2, sampling=replace(GREEDY, num_prompt_logprobs=0))]},
        "whole[0].num_prompt_tokens is 2: it is from 0 to 1",
    ),
    ({"append_pairs": [5, 0]}, "append_pairs[0] names seat 5, which is not in use"),
    ({"append_pairs": [8, 0]}, "append_pairs names seat 8: there are 8"),
    ({"append_pairs": [2, 32]}, "append_pairs names block 32"),
    ({"append_pairs": [2, 0] * 10}, "append_pairs[9]: seat 2 has 11 blocks, which is the most"),
    ({"swap_out": [32, 0]}, "swap_out (sources) names block 32"),
    ({"swap_out": [0, 4]}, "swap_out (destinations) names block 4: there are 4"),
    ({"placed": [0, 0, 3]}, "placed names fetch 0: fetches are counted from 1"),
    ({"placed": [1, 0, 3, 1, -1, 4]}, "placed (indices) names block -1: there are 262144"),
    ({"placed": [1, 262144, 3]}, "placed (indices) names block 262144: there are 262144"),
    ({"placed": [1, 0, 32]}, "placed (destinations) names block 32: there are 32"),
    ({"placed": [1, 0, 3, 2, 0, 3]}, "placed (destinations) names 3 twice"),
    ({"swap_in": [4, 0]}, "swap_in (sources) names block 4"),
    ({"copies": [1, 2, 3, 2]}, "copies (destinations) names 2 twice"),
    ({"rows": [2, 2]}, "rows names 2 twice"),
    ({"rows": [8]}, "rows names seat 8: there are 8"),
    ({"freed_seats": [2], "append_pairs": [], "rows": [2]}, "rows[0] names seat 2, which is not in use"),
    ({"rows": [5]}, "rows[0] names seat 5, which is not in use"),
    ({"rows": [2], "num_tokens": [1, 1]}, "num_tokens has 2 entries beside 1 rows"),
    ({"rows": [2], "num_tokens": [0]}, "num_tokens[0] is 0: a row computes at least 1 token"),
    ({"rows": [2], "num_tokens": [7]}, "rows[0]: seat 2 knows 6 tokens and is to compute 0 to 7"),
    ({"rows": [1], "num_tokens": [20]}, "rows[0]: seat 1 has blocks for 8 tokens and computes up to 20"),
    ({"rows": [1, 2], "num_tokens": [20, 5]}, "num_tokens are 25 together: one step computes at most 24"),
    ({"rows": [2], "num_tokens": [4]}, "samples[0]: row of seat 2 knows 6 tokens, and the row ends at 4"),
    ({"rows": [2], "num_tokens": [6], "samples": [1, 2]}, "samples names row 1: there are 1"),
    ({"rows": [2], "num_tokens": [6], "samples": [0, 8]}, "samples names seat 8: there are 8"),
    (
        {"whole": [seat_state(3, [1, 2, 3, 4], [8])], "rows": [2], "num_tokens": [4], "samples": [0, 3]},
        "samples[0]: row of seat 2 knows 6 tokens, and the row ends at 4",
    ),
    ({"rows": [2], "num_tokens": [6], "samples": [0, 5]}, "samples[0] names seat 5, which is not in use"),
    ({"rows": [2], "num_tokens": [6], "samples": [0, 1]}, "samples[0]: seat 1 knows 20 tokens, and the row ends at 6"),
    ({"rows": [2], "num_tokens": [6], "samples": [0, 2, 0, 2]}, "samples (seats) names 2 twice"),
    ({"rows": [2], "num_tokens": [6], "samples": [], "candidates": [1, 5]}, "candidates names row 1: there are 1"),
    ({"rows": [2], "num_tokens": [6], "samples": [], "candidates": [-1, 5]}, "candidates names row -1"),
    (
        {"rows": [2], "num_tokens": [6], "samples": [], "candidates": [0, 5, 0, 6]},
        "candidates (rows) names 0 twice",
    ),
    (
        {"rows": [2], "num_tokens": [6], "samples": [], "candidates": [0, 0]},
        "candidates[0] asks for 0 tokens: a row answers at least 1",
    ),
    (
        {"rows": [7, 2], "num_tokens": [2, 5], "samples": [], "candidates": [0, 3, 1, 3]},
        "candidates[1]: seat 2 knows 6 tokens, and the row ends at 5",
    ),
    (
        {"rows": [7, 2], "num_tokens": [2, 6], "samples": [1, 2], "candidates": [0, 3, 1, 3]},
        "candidates[1]: row 1 is sampled too",
    ),
    ({"rows": [2], "num_tokens": [6], "candidates": [0, 3]}, "candidates[0]: row 0 is sampled too"),
    (
        {
            "whole": [seat_state(4, [10, 11, 12, 13, 14, 15], [8, 9])],
            "rows": [2, 4],
            "num_tokens": [6, 6],
            "samples": [0, 4],
            "candidates": [1, 3],
        },
        "candidates[0]: row 1 is sampled too, or its seat 4 is",
    ),
    (
        {"snapshot": True, "append_pairs": [], "rows": [2], "num_tokens": [6]},
        "rows[0] names seat 2, which is not in use",
    ),
]


def prepared() -> SeatTable:
    """Seat 2 has six tokens and two blocks; seat 1 has twenty tokens and two blocks."""
    table = SeatTable(LIMITS)
    whole = [seat_state(2, [10, 11, 12, 13, 14, 15], [7, 3]), seat_state(1, list(range(20)), [4, 5])]
    table.apply(Step(epoch=1, step_id=1, snapshot=True, whole=whole))
    return table


def contents(table: SeatTable) -> list[Any]:
    """Copy everything that a table holds."""
    counts = table.counts
    arrays: tuple[Any, ...] = (table.block_tables, table.token_ids, table.num_prompt_tokens)
    held: list[Any] = [*arrays, counts.live, counts.num_blocks, counts.positions, counts.num_known]
    return [*(array.tolist() for array in held), list(table.sampling)]


@pytest.mark.parametrize(("fields", "message"), REFUSED, ids=[message for _, message in REFUSED])
def test_a_step_that_cannot_be_is_refused_with_its_place_and_changes_nothing(
    fields: dict[str, Any], message: str
) -> None:
    table = prepared()
    before = contents(table)
    # What is valid in the step must not remain either.
    valid = {"append_pairs": [2, 9], "whole": [seat_state(7, [1, 2], [8])]}
    with pytest.raises(InvalidStepError) as refusal:
        table.apply(Step(epoch=1, step_id=2, **{**valid, **fields}))
    assert message in str(refusal.value)
    assert contents(table) == before


ONE_CHANGE: list[dict[str, Any]] = [
    {"freed_seats": [1]},
    {"snapshot": True},
    {"whole": [seat_state(7, [1, 2], [8])]},
    {"append_pairs": [2, 9]},
]


@pytest.mark.parametrize("change", ONE_CHANGE, ids=[next(iter(change)) for change in ONE_CHANGE])
def test_a_step_whose_rows_are_refused_leaves_its_one_change_undone(change: dict[str, Any]) -> None:
    table = prepared()
    before = contents(table)
    with pytest.raises(InvalidStepError, match="seat 5, which is not in use"):
        table.apply(Step(epoch=1, step_id=2, rows=[5], **change))
    assert contents(table) == before


@pytest.mark.parametrize("change", [{"freed_seats": [2]}, {"snapshot": True}], ids=["freed_seats", "snapshot"])
def test_rows_of_the_step_before_are_refused_once_their_seat_is_gone(change: dict[str, Any]) -> None:
    table = prepared()
    rows = array("i", [2])
    table.advance(table.apply(Step(epoch=1, step_id=2, rows=rows, num_tokens=[6])).rows, [1])
    with pytest.raises(InvalidStepError, match="seat 2, which is not in use"):
        table.apply(Step(epoch=1, step_id=3, rows=rows, **change))


@pytest.mark.parametrize("num_prompt_tokens", [0, LIMITS.max_model_len])
def test_a_prompt_may_have_as_many_tokens_as_its_bounds_say(num_prompt_tokens: int) -> None:
    table = prepared()
    table.apply(Step(epoch=1, step_id=2, whole=[seat_state(3, [1], [0], num_prompt_tokens=num_prompt_tokens)]))
    assert table.num_prompt_tokens[3] == num_prompt_tokens


@pytest.mark.parametrize(
    ("changed", "field"),
    [
        ({"allowed_token_ids": (5, 100)}, "allowed_ids"),
        ({"suppressed_token_ids": (-1,)}, "suppressed_ids"),
        ({"logit_bias": ((100, 1.0),)}, "bias_ids"),
        ({"logit_bias": ((1, math.nan),)}, "bias_values"),
        ({"temperature": -1.0}, "numbers.temperature"),
        ({"temperature": math.nan}, "numbers.temperature"),
        ({"top_k": 0}, "numbers.top_k"),
        ({"top_p": 0.0}, "numbers.top_p"),
        ({"top_p": 1.5}, "numbers.top_p"),
        ({"min_p": 2.0}, "numbers.min_p"),
        ({"repetition_penalty": 0.0}, "numbers.repetition_penalty"),
        ({"presence_penalty": math.inf}, "numbers.presence_penalty"),
        ({"frequency_penalty": math.nan}, "numbers.frequency_penalty"),
    ],
)
def test_senseless_sampling_parameters_are_refused_by_name(changed: dict[str, Any], field: str) -> None:
    sampling = replace(SequenceSampling(seed=0), **changed)
    state = seat_state(0, [1], [0], sampling=sampling, history=())
    with pytest.raises(InvalidStepError, match=rf"whole\[0\]\.sampling\.{field} "):
        prepared().apply(Step(epoch=1, step_id=2, whole=[state]))


small = st.integers(-1, 9)
pairs = st.lists(st.tuples(small, small), max_size=3).map(lambda found: [number for pair in found for number in pair])
steps = st.fixed_dictionaries(
    {},
    optional={
        "snapshot": st.booleans(),
        "freed_seats": st.lists(small, max_size=2),
        "whole": st.lists(
            st.builds(
                seat_state,
                small,
                st.lists(st.integers(0, 99), max_size=9),
                st.lists(st.integers(0, 31), max_size=3),
                position=st.integers(0, 4),
            ),
            max_size=2,
        ),
        "append_pairs": pairs,
        "copies": pairs,
        "rows": st.lists(small, max_size=3),
        "samples": st.none() | pairs,
        "candidates": pairs,
    },
)


@pytest.mark.long
@settings(max_examples=400)
@given(st.lists(steps, max_size=6), st.data())
def test_whatever_arrives_a_step_is_taken_whole_or_not_at_all(sent: list[dict[str, Any]], data: st.DataObject) -> None:
    table = prepared()
    for step_id, fields in enumerate(sent):
        before = contents(table)
        num_rows = len(fields.get("rows", ()))
        sizes = data.draw(st.just([]) | st.lists(st.integers(0, 6), min_size=num_rows, max_size=num_rows))
        try:
            checked = table.apply(Step(epoch=1, step_id=step_id, **fields, num_tokens=sizes))
        except InvalidStepError:
            assert contents(table) == before
            continue
        table.advance(checked.rows, np.full(len(checked.rows.sample_seats), 1))
        ranked = checked.rows.seats[checked.rows.candidate_rows]
        assert (table.counts.positions[ranked] == table.counts.num_known[ranked]).all()
        check_integrity(table)


# Steps that decode the same seats again and again, and now and then one that is wrong, or another in between.
decoding = st.fixed_dictionaries(
    {"rows": st.sampled_from([(2,), (2,), (2, 1), (1, 2), (2, 5), (5, 2, 1)]).map(lambda seats: array("i", seats))},
    optional={
        "append_pairs": st.sampled_from([(2, 9), (1, 8, 2, 9), (2, 9, 5, 6), (6, 1)]),
        "num_tokens": st.sampled_from([(), (6,), (6, 20), (20, 6), (1, 1, 1)]),
        "freed_seats": st.sampled_from([(), (5,), (2,)]),
        "whole": st.sampled_from([(), (seat_state(5, [1], [6]),), (seat_state(2, [1, 2], [6]),)]),
        "samples": st.sampled_from([None, (0, 2), ()]),
        "candidates": st.sampled_from([(), (0, 2)]),
    },
)


@settings(max_examples=400)
@given(st.lists(decoding | st.just({"rows": array("i", (2, 1)), "append_pairs": (2, 9, 1, 8)}), max_size=12))
def test_rows_that_were_looked_at_before_are_taken_and_refused_as_any_others(sent: list[dict[str, Any]]) -> None:
    table = prepared()
    table.advance(table.apply(Step(epoch=1, step_id=2, rows=[2], num_tokens=[6])).rows, [1])
    table.apply(Step(epoch=1, step_id=3, append_pairs=[1, 20, 1, 21, 1, 22]))
    table.advance(table.apply(Step(epoch=1, step_id=4, rows=[1], num_tokens=[20])).rows, [1])
    for step_id, fields in enumerate(sent, 5):
        step = Step(epoch=1, step_id=step_id, **fields)
        try:
            expected = seen(check_step(step, table.counts, LIMITS).rows)
        except InvalidStepError as error:
            with pytest.raises(InvalidStepError) as refused:
                table.apply(step)
            assert str(refused.value) == str(error)
            continue
        rows = table.apply(step).rows
        assert seen(rows) == expected
        table.advance(rows, [1] * len(rows.sample_seats))
        check_integrity(table)


def seen(rows: StepRows) -> dict[str, Any]:
    """Contents of the rows, to be compared."""
    return {each.name: np.asarray(getattr(rows, each.name)).tolist() for each in fields_of(rows)}


def test_a_step_that_decodes_is_known_as_one() -> None:
    table = prepared()
    first = table.apply(Step(epoch=1, step_id=2, rows=[2], num_tokens=[6])).rows
    assert not first.is_decode
    table.advance(first, [1])
    rows = table.apply(Step(epoch=1, step_id=3, rows=array("i", [2]))).rows
    assert rows.is_decode
    assert (rows.starts.tolist(), rows.ends.tolist(), rows.sample_seats.tolist()) == ([6], [7], [2])
    table.advance(rows, [1])
    again = table.apply(Step(epoch=1, step_id=4, rows=array("i", [2]))).rows
    assert again.seats is rows.seats  # it was not looked at again
    assert again.is_decode  # also where it fills its last block
    table.advance(again, [1])
    with pytest.raises(InvalidStepError, match="has blocks for 8 tokens and computes up to 9"):
        table.apply(Step(epoch=1, step_id=5, rows=array("i", [2])))


def check_integrity(table: SeatTable) -> None:
    """Check the invariants of every live seat after a step."""
    counts = table.counts
    live = counts.live
    assert (counts.num_blocks[live] <= LIMITS.max_blocks).all()
    assert (counts.positions[live] <= counts.num_known[live]).all()
    assert (counts.num_known[live] <= LIMITS.max_model_len + 1).all()
    assert ((table.block_tables >= 0) & (table.block_tables < LIMITS.num_blocks)).all()
    assert ((table.token_ids >= 0) & (table.token_ids < LIMITS.vocab_size)).all()
