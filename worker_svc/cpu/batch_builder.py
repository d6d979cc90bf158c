"""Builds the tensors of a forward pass from the rows of a step, without a loop over rows or tokens.

Reads the seat table and changes nothing.
"""

import numpy as np
import torch

from worker_svc.model.batch import ForwardBatch
from worker_svc.steps.seat_table import SeatTable
from worker_svc.steps.step_check import IntArray, StepRows


def build_batch(
    table: SeatTable, rows: StepRows, query_start: IntArray, logit_rows: IntArray, device: torch.device
) -> ForwardBatch:
    """Batch of `rows`; `query_start` [R + 1] is from `starts_of`; the head computes the tokens `logit_rows` [L]."""
    if query_start[-1] == len(rows.seats):  # one token per row
        positions, token_seats, max_query_len = rows.starts, rows.seats, 1
    else:
        num_tokens = rows.num_tokens
        max_query_len = int(num_tokens.max())
        positions = np.arange(query_start[-1]) + np.repeat(rows.starts - query_start[:-1], num_tokens)
        token_seats = np.repeat(rows.seats, num_tokens)
    block_size = table.limits.block_size
    columns, offsets = np.divmod(positions, block_size)
    blocks = table.block_tables[token_seats, columns].astype(np.int64)
    longest = int(rows.ends.max())
    width = -(-longest // block_size)
    on_device = torch.from_numpy if device.type == "cpu" else lambda array: torch.from_numpy(array).to(device)
    return ForwardBatch(
        token_ids=on_device(table.token_ids[token_seats, positions].astype(np.int64)),
        positions=on_device(positions),
        slot_mapping=on_device(blocks * block_size + offsets),
        query_start=on_device(query_start.astype(np.int32)),
        context_lens=on_device(rows.ends.astype(np.int32)),
        block_tables=on_device(table.block_tables[rows.seats, :width]),
        logit_rows=on_device(logit_rows),
        max_query_len=max_query_len,
        max_context_len=longest,
    )


def starts_of(rows: StepRows) -> IntArray:
    """Start of each row's tokens among those of the step, and the end of the last: int64 [R + 1]."""
    if rows.is_decode:
        return np.arange(len(rows.seats) + 1)
    query_start = np.zeros(len(rows.seats) + 1, dtype=np.int64)
    np.cumsum(rows.num_tokens, out=query_start[1:])
    return query_start
