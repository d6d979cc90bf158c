"""Bytes of a pass for the other ranks: the batch as rank 0 has built it, whatever seats and samples it came from.

So the other ranks keep no seats: they need neither the tokens that rank 0 samples or forces nor the parameters of
sampling. Arrays follow one another, after a header with their sizes.
"""

import struct
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from worker_svc.model.batch import ForwardBatch

_HEADER = struct.Struct(
    "<7I"
)  # tokens, rows, width of block tables, wanted tokens, longest query, longest context, flag
_ROWS = struct.Struct("<II")


class PassOrder(NamedTuple):
    """A pass to compute."""

    batch: ForwardBatch
    with_logits: bool  # of all wanted tokens, at once


def encode_pass(batch: ForwardBatch, *, with_logits: bool) -> bytes:
    """The batch as bytes."""
    num_rows, width = batch.block_tables.shape
    header = _HEADER.pack(
        len(batch.token_ids),
        num_rows,
        width,
        len(batch.logit_rows),
        batch.max_query_len,
        batch.max_context_len,
        with_logits,
    )
    arrays = (
        batch.token_ids,
        batch.positions,
        batch.slot_mapping,
        batch.logit_rows,
        batch.query_start,
        batch.context_lens,
        batch.block_tables,
    )
    return b"".join((header, *(each.contiguous().numpy().tobytes() for each in arrays)))


def decode_pass(payload: bytes) -> PassOrder:
    """The batch of `encode_pass`. Raises ValueError if bytes are missing."""
    num_tokens, num_rows, width, num_wanted, max_query_len, max_context_len, with_logits = _HEADER.unpack_from(payload)
    parts = _Parts(payload, _HEADER.size)
    token_ids, positions, slots, logit_rows = (
        parts.take(count, np.int64) for count in (num_tokens, num_tokens, num_tokens, num_wanted)
    )
    query_start, context_lens, tables = (
        parts.take(count, np.int32) for count in (num_rows + 1, num_rows, num_rows * width)
    )
    batch = ForwardBatch(
        token_ids=token_ids,
        positions=positions,
        slot_mapping=slots,
        query_start=query_start,
        context_lens=context_lens,
        block_tables=tables.view(num_rows, width),
        logit_rows=logit_rows,
        max_query_len=max_query_len,
        max_context_len=max_context_len,
    )
    return PassOrder(batch, bool(with_logits))


def encode_rows(begin: int, end: int) -> bytes:
    return _ROWS.pack(begin, end)


def decode_rows(payload: bytes) -> slice:
    return slice(*_ROWS.unpack(payload))


class _Parts:
    """Arrays in order; copies, so that their memory is writable and aligned."""

    def __init__(self, payload: bytes, begin: int) -> None:
        self._payload, self._begin = payload, begin

    def take(self, count: int, dtype: npt.DTypeLike) -> Tensor:
        values = np.frombuffer(self._payload, dtype=dtype, count=count, offset=self._begin).copy()
        self._begin += values.nbytes
        return torch.from_numpy(values)
