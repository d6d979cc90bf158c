"""Gathered columns are those of the seats as they are placed now, whatever was gathered before."""

from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from common.sampling_params import SequenceSampling
from worker_svc.sampling.gathered_columns import ColumnGatherer, GatheredColumns
from worker_svc.sampling.sampling_columns import SamplingColumns

NUM_SEATS, VOCAB_SIZE = 4, 50
IDS = st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=3).map(tuple)
SAMPLINGS = st.builds(
    SequenceSampling,
    seed=st.integers(0, 3),
    temperature=st.sampled_from([0.0, 1.0]),
    top_k=st.sampled_from([None, 3]),
    top_p=st.sampled_from([0.5, 1.0]),
    min_p=st.sampled_from([0.0, 0.1]),
    allowed_token_ids=st.one_of(st.none(), IDS),
    suppressed_token_ids=IDS,
    suppressed_until=st.integers(0, 9),
    logit_bias=st.lists(st.tuples(st.integers(0, VOCAB_SIZE - 1), st.sampled_from([-1.0, 2.0])), max_size=3).map(tuple),
    presence_penalty=st.sampled_from([0.0, 0.5]),
    num_logprobs=st.sampled_from([None, 0, 2]),
)
PLACED = st.tuples(st.integers(0, NUM_SEATS - 1), SAMPLINGS, st.integers(0, 9))
GATHERED = st.lists(st.integers(0, NUM_SEATS - 1), min_size=1, max_size=6)


def plain(value: Any) -> Any:
    """The value in parts that can be compared."""
    if is_dataclass(value):
        return {each.name: plain(getattr(value, each.name)) for each in fields(value)}
    if isinstance(value, np.ndarray):
        return str(value.dtype), value.tolist()
    return [plain(each) for each in value] if isinstance(value, list) else value


@given(st.lists(st.one_of(PLACED, GATHERED), max_size=12))
def test_what_is_gathered_is_what_is_placed_now(actions: list[Any]) -> None:
    columns = SamplingColumns(NUM_SEATS, VOCAB_SIZE)
    gatherer = ColumnGatherer(columns)
    for action in actions:
        if isinstance(action, tuple):
            columns.place(*action)
        else:
            seats = np.array(action)
            gathered = gatherer.gather(seats)
            assert plain(gathered) == plain(GatheredColumns.of(columns, seats))
            seats[:] = 0  # the caller's own array, which it may use again


def test_the_same_seats_are_gathered_once_until_one_is_placed() -> None:
    columns = SamplingColumns(NUM_SEATS, VOCAB_SIZE)
    gatherer = ColumnGatherer(columns)
    first = gatherer.gather(np.array([2, 0]))
    assert gatherer.gather(np.array([2, 0])) is first
    columns.place(3, SequenceSampling(seed=1), 0)
    again = gatherer.gather(np.array([2, 0]))
    assert again is not first
    assert gatherer.gather(np.array([0, 2])).seats.tolist() == [0, 2]
