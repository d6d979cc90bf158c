"""Tokens and block tables of all seats on the device, so that a step sends only changes.

A sampled token is written where the next step reads its input, without the host. The tables mirror `SeatTable` on
the host, which has checked every change. Only the device knows the sampled tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from common.step import SequenceState
from worker_svc.steps.step_check import Appended, CheckedStep, IntArray
from worker_svc.steps.step_limits import StepLimits
from worker_svc.steps.step_upload import StepUpload


@dataclass(frozen=True, slots=True)
class _Writes:
    """Writes of elements to a table, by flat index."""

    places: Tensor  # [N] int64, flat
    values: Tensor  # [N] int32


@dataclass(frozen=True, slots=True)
class SeatChanges:
    """Writes of a step to both tables before its rows are computed; None where there are none."""

    tokens: _Writes | None
    blocks: _Writes | None


class DeviceSeats:
    """Token table and block tables; writes are queued on the current stream."""

    def __init__(self, limits: StepLimits, device: torch.device) -> None:
        # One token more than the longest sequence, as on the host: for the token sampled after its last one.
        self.tokens = torch.zeros((limits.num_seats, limits.max_model_len + 1), dtype=torch.int32, device=device)
        self.block_tables = torch.zeros((limits.num_seats, limits.max_blocks), dtype=torch.int32, device=device)

    def pack(self, upload: StepUpload, whole: Sequence[SequenceState], checked: CheckedStep) -> SeatChanges:
        return SeatChanges(
            tokens=self._pack_tokens(upload, whole),
            blocks=self._pack_blocks(upload, whole, checked.appended),
        )

    def apply(self, changes: SeatChanges) -> None:
        """Queue the writes of a step before its rows are computed."""
        for table, writes in ((self.tokens, changes.tokens), (self.block_tables, changes.blocks)):
            if writes is not None:
                table.view(-1).index_copy_(0, writes.places, writes.values)

    def places(self, seats: IntArray, positions: IntArray) -> IntArray:
        """Places of tokens in the flat table, int64."""
        return seats * self.tokens.shape[1] + positions

    def write_tokens(self, places: Tensor, token_ids: Tensor) -> None:
        """Queue the write of `token_ids` [N] int32 at `places` [N] int64, no place twice."""
        self.tokens.view(-1).index_copy_(0, places, token_ids)

    def _pack_tokens(self, upload: StepUpload, whole: Sequence[SequenceState]) -> _Writes | None:
        width = self.tokens.shape[1]
        spans = [(state.seat * width, state.history) for state in whole]
        spans += [(state.seat * width + state.position, state.token_ids) for state in whole]
        return _pack_spans(upload, spans)

    def _pack_blocks(self, upload: StepUpload, whole: Sequence[SequenceState], appended: Appended) -> _Writes | None:
        width = self.block_tables.shape[1]
        spans = [(state.seat * width, state.block_table) for state in whole]
        places, blocks = appended.seats * width + appended.columns, appended.blocks
        if not spans and not len(places):
            return None
        if not spans:
            return _Writes(upload.add(places), upload.add(blocks.astype(np.int32)))
        return _pack_spans(upload, spans, places, blocks)


def _pack_spans(
    upload: StepUpload,
    spans: Sequence[tuple[int, Sequence[int]]],
    places: IntArray | None = None,
    values: IntArray | None = None,
) -> _Writes | None:
    """Pack runs of values, each from a start place on, and single values."""
    all_places = [np.arange(start, start + len(run)) for start, run in spans if len(run)]
    all_values = [np.asarray(run, dtype=np.int32) for _, run in spans if len(run)]
    if places is not None and values is not None and len(places):
        all_places.append(places)
        all_values.append(values.astype(np.int32))
    if not all_places:
        return None
    return _Writes(upload.add(np.concatenate(all_places)), upload.add(np.concatenate(all_values)))
