"""The order of a step's tokens: decode rows first, and each token with its seat and position."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from worker_svc.gpu.batch_layout import lay_out
from worker_svc.steps.step_check import StepRows

ROWS = st.lists(st.tuples(st.integers(0, 50), st.integers(1, 6)), min_size=1, max_size=12)


def step_rows(rows: list[tuple[int, int]]) -> StepRows:
    starts, counts = np.array(rows).T
    none = np.zeros(0, dtype=np.int64)
    return StepRows(
        seats=np.arange(100, 100 + len(rows))[::-1],
        starts=starts,
        ends=starts + counts,
        sample_rows=none,
        sample_seats=none,
        candidate_rows=none,
        candidate_counts=none,
    )


@given(ROWS)
def test_every_token_is_there_once_and_those_of_single_rows_come_first(pairs: list[tuple[int, int]]) -> None:
    rows = step_rows(pairs)
    layout = lay_out(rows)
    tokens = list(zip(layout.token_seats.tolist(), layout.positions.tolist(), strict=True))
    expected = {
        row: [(int(rows.seats[row]), start + i) for i in range(count)] for row, (start, count) in enumerate(pairs)
    }
    assert tokens == [token for row in layout.order.tolist() for token in expected[row]]
    singles = [row for row, (_, count) in enumerate(pairs) if count == 1]
    others = [row for row, (_, count) in enumerate(pairs) if count > 1]
    assert layout.order.tolist() == singles + others
    assert layout.num_decode == len(singles)
    assert layout.is_decode == (not others)
    assert layout.prefill_rows.tolist() == others
    assert [tokens[place] for place in layout.first_tokens] == [expected[row][0] for row in range(len(pairs))]
    assert [tokens[place] for place in layout.last_tokens] == [expected[row][-1] for row in range(len(pairs))]
