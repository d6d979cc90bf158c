"""From the rows of a step to the tensors of a forward pass, without a loop over rows or tokens.

It reads the slot table and changes nothing.
"""

import numpy as np
import torch

from worker_svc.model.batch import ForwardBatch
from worker_svc.slot_table import SlotTable
from worker_svc.step_check import IntArray, StepRows


def build_batch(
    table: SlotTable, rows: StepRows, query_start: IntArray, logit_rows: IntArray, device: torch.device
) -> ForwardBatch:
    """The batch of `rows`; `query_start` [R + 1] from `starts_of`; logits of the tokens `logit_rows` [L]."""
    num_tokens = rows.num_tokens
    positions = np.arange(query_start[-1]) + np.repeat(rows.starts - query_start[:-1], num_tokens)
    token_slots = np.repeat(rows.slots, num_tokens)
    block_size = table.limits.block_size
    columns, offsets = np.divmod(positions, block_size)
    blocks = table.block_tables[token_slots, columns].astype(np.int64)
    longest = int(rows.ends.max())
    width = -(-longest // block_size)
    return ForwardBatch(
        token_ids=torch.from_numpy(table.token_ids[token_slots, positions].astype(np.int64)).to(device),
        positions=torch.from_numpy(positions).to(device),
        slot_mapping=torch.from_numpy(blocks * block_size + offsets).to(device),
        query_start=torch.from_numpy(query_start.astype(np.int32)).to(device),
        context_lens=torch.from_numpy(rows.ends.astype(np.int32)).to(device),
        block_tables=torch.from_numpy(table.block_tables[rows.slots, :width]).to(device),
        logit_rows=torch.from_numpy(logit_rows).to(device),
        max_query_len=int(num_tokens.max()),
        max_context_len=longest,
    )


def starts_of(rows: StepRows) -> IntArray:
    """Where the tokens of each row begin among all of the step, and where they end: int64 [R + 1]."""
    query_start = np.zeros(len(rows.slots) + 1, dtype=np.int64)
    np.cumsum(rows.num_tokens, out=query_start[1:])
    return query_start
