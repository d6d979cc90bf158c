"""Tensors of a forward pass: each token at its place, as a loop over rows and tokens would put it."""

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from common.step import Step
from tests.worker.steps import seat_state
from worker_svc.cpu.batch_builder import build_batch, starts_of
from worker_svc.steps.seat_table import SeatTable
from worker_svc.steps.step_limits import StepLimits

BLOCK_SIZE = 4
LIMITS = StepLimits(
    num_seats=4,
    num_blocks=40,
    num_host_blocks=0,
    block_size=BLOCK_SIZE,
    vocab_size=1000,
    max_model_len=24,
    max_batched_tokens=96,
)
spans = st.tuples(st.integers(0, 15), st.integers(1, 9))  # position and tokens of a row


def blocks_of(seat: int, num_tokens: int) -> list[int]:
    """Blocks of a seat, backwards and apart from those of others."""
    return [10 * seat + 9 - column for column in range(-(-num_tokens // BLOCK_SIZE))]


@given(st.dictionaries(st.integers(0, 3), spans, min_size=1), st.booleans())
def test_a_batch_has_each_token_at_its_place(of_seat: dict[int, tuple[int, int]], is_decode: bool) -> None:
    if is_decode:
        of_seat = {seat: (position, 1) for seat, (position, _) in of_seat.items()}
    table = SeatTable(LIMITS)
    states = [
        seat_state(
            seat,
            [100 * seat + number for number in range(position, position + count)],
            blocks_of(seat, position + count),
            position=position,
        )
        for seat, (position, count) in of_seat.items()
    ]
    counts = () if is_decode else [count for _, count in of_seat.values()]
    rows = table.apply(Step(epoch=1, step_id=1, snapshot=True, whole=states, rows=[*of_seat], num_tokens=counts)).rows
    assert rows.is_decode == is_decode
    query_start = starts_of(rows)
    batch = build_batch(table, rows, query_start, np.arange(len(of_seat)), torch.device("cpu"))

    tokens = [(seat, at) for seat, (position, count) in of_seat.items() for at in range(position, position + count)]
    ends = [position + count for position, count in of_seat.values()]
    assert batch.token_ids.tolist() == [100 * seat + at for seat, at in tokens]
    assert batch.positions.tolist() == [at for _, at in tokens]
    blocks = [blocks_of(seat, at + 1)[-1] for seat, at in tokens]
    assert batch.slot_mapping.tolist() == [
        block * BLOCK_SIZE + at % BLOCK_SIZE for block, (_, at) in zip(blocks, tokens, strict=True)
    ]
    assert np.diff(batch.query_start).tolist() == [count for _, count in of_seat.values()] and batch.query_start[0] == 0
    assert batch.context_lens.tolist() == ends
    width = -(-max(ends) // BLOCK_SIZE)
    padded = [(blocks_of(seat, end) + [0] * width)[:width] for seat, end in zip(of_seat, ends, strict=True)]
    assert batch.block_tables.tolist() == padded
    assert batch.logit_rows.tolist() == [*range(len(of_seat))]
    assert (batch.max_query_len, batch.max_context_len) == (max(count for _, count in of_seat.values()), max(ends))
    kinds = {each.dtype for each in (batch.token_ids, batch.positions, batch.slot_mapping, batch.logit_rows)}
    assert kinds == {torch.int64}
    assert {each.dtype for each in (batch.query_start, batch.context_lens, batch.block_tables)} == {torch.int32}
