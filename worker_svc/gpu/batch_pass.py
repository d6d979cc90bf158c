"""One forward pass for the rows of a step: replayed from a graph if each row has one token, else launch by launch.

Joins layout, inputs, attention plans and the decoder's pass, and owns the memory that graphs read and write. Knows
nothing of sampling.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kernels.attention.cascade_groups import (
    SharedPrefix,
    SharingCost,
    cascade_arrays,
    fill_cascade_arrays,
    find_shared_prefixes,
    num_shareable_blocks,
)
from kernels.attention.cascade_reference import prefix_groups
from kernels.attention.decode_reference import DecodeRows
from kernels.attention.prefill_reference import PrefillRows
from kernels.layers.step_inputs_reference import SeatTables, StepInputs, empty_step_inputs
from worker_svc.gpu.attention_plans import AttentionPlans, BatchAttention, DecodePlans, PrefillPlans
from worker_svc.gpu.batch_layout import BatchLayout
from worker_svc.gpu.device_seats import DeviceSeats
from worker_svc.gpu.forward import DeviceForward, ForwardState
from worker_svc.gpu.graphs import CapturedPass
from worker_svc.steps.seat_table import SeatTable
from worker_svc.steps.step_check import IntArray, StepRows
from worker_svc.steps.step_upload import StepUpload

_NO_ROW = -1
_PADDING = -1  # the position of a padding row


def fixed_arrays(max_tokens: int, max_rows: int) -> Mapping[str, tuple[int, torch.dtype]]:
    """Arrays at a fixed place of the upload: each token's seat and position, and the groups of rows that share keys."""
    tokens = {"seats": (max_tokens, torch.int32), "positions": (max_tokens, torch.int32)}
    return {**tokens, **cascade_arrays(max_rows)}


@dataclass(frozen=True, slots=True)
class PackedBatch:
    """A batch whose arrays are sent in the step's upload."""

    layout: BatchLayout
    logit_index: IntArray  # [R] index of each row's logits, -1 if they are not computed
    graph_size: int | None  # rows with padding; None: not by a graph
    prefixes: Sequence[SharedPrefix]  # that rows of a graph attend to together
    logit_tokens: Tensor | None  # [L] int64, of a pass without graph
    prefill: "_PackedPrefill | None"


@dataclass(frozen=True, slots=True)
class _PackedPrefill:
    """The rows of several tokens."""

    rows: PrefillRows
    tiles: Tensor


@dataclass(frozen=True, slots=True)
class Computed:
    """Results of a pass, valid until the next one."""

    logits: Tensor | None  # [at least L, vocab_size]; None if no row needs any
    state: ForwardState | None  # of all tokens, in the layout's order; None after a graph


class BatchPass:
    """Computes passes. For the execution thread alone; all work is queued on the current stream."""

    def __init__(
        self,
        forward: DeviceForward,
        plans: AttentionPlans,
        seats: DeviceSeats,
        upload: StepUpload,
        sizes: tuple[int, ...],
        sharing_cost: SharingCost,
    ) -> None:
        device = seats.tokens.device
        self._forward = forward
        self._plans = plans
        self._tables = SeatTables(seats.tokens, seats.block_tables)
        self._upload = upload
        self._sharing_cost = sharing_cost
        self._inputs = empty_step_inputs(len(upload.fixed["seats"]), sizes[-1], seats.block_tables.shape[1], device)
        self._logits = torch.zeros((sizes[-1], forward.vocab_size), dtype=forward.dtype, device=device)
        rows = {size: _decode_rows(self._inputs.first(size, size)) for size in sizes}
        self._decode_plans = {size: plans.decode(rows[size]) for size in sizes}
        self._decode = CapturedPass(lambda size: self._decode_pass(size, self._decode_plans[size]), sizes, device)
        self._shared_plans: Mapping[int, DecodePlans] = {}
        if plans.can_share_prefixes:
            groups = {size: prefix_groups(upload.fixed, size) for size in sizes}
            self._shared_plans = {size: plans.cascade(rows[size], groups[size]) for size in sizes}
        self._shared = CapturedPass(
            lambda size: self._decode_pass(size, self._shared_plans[size]), list(self._shared_plans), device
        )

    @property
    def logits(self) -> Tensor:
        """[largest size, vocab_size]: the memory to which graphs write logits."""
        return self._logits

    def warm_up(self) -> None:
        """Computes padding at all sizes, launch by launch, which compiles the kernels of decode passes."""
        self._send_padding()
        for plans in (self._decode_plans, self._shared_plans):
            for size in plans:
                self._decode_pass(size, plans[size])

    def capture(self) -> None:
        """Captures the graphs, which compute padding meanwhile."""
        self._send_padding()
        self._decode.capture()
        self._shared.capture(sharing=self._decode)

    def release(self) -> None:
        """Drops the graphs."""
        self._shared.release()
        self._decode.release()

    def pack(self, table: SeatTable, rows: StepRows, layout: BatchLayout, *, keep_state: bool) -> PackedBatch:
        """Adds a batch to the step's upload, between its `begin` and `send`.

        keep_state: True if more is needed than logits of sampled and ranked rows, which a graph does not keep.
        """
        num_tokens = len(layout.positions)
        if layout.is_decode and not keep_state:
            size = self._decode.size_for(num_tokens)
            self._put_tokens(layout.token_seats, layout.positions, size)
            prefixes = self._find_prefixes(table, rows)
            if prefixes:
                self._put_prefixes(prefixes)
            return PackedBatch(layout, layout.order, size, prefixes, None, None)
        self._put_tokens(layout.token_seats, layout.positions, num_tokens)
        logit_rows = np.unique(np.concatenate([rows.sample_rows, rows.candidate_rows]))
        logit_index = np.full(len(layout.order), _NO_ROW)
        logit_index[logit_rows] = np.arange(len(logit_rows))
        logit_tokens = self._upload.add(layout.last_tokens[logit_rows]) if len(logit_rows) else None
        return PackedBatch(layout, logit_index, None, (), logit_tokens, self._pack_prefill(table, rows, layout))

    def launch(self, packed: PackedBatch) -> Computed:
        """Queues the pass, after the upload was sent, and all that the rows read is in the pool or queued."""
        if packed.graph_size is not None:
            (self._shared if packed.prefixes else self._decode).replay(packed.graph_size)
            return Computed(self._logits, None)
        state = self._mixed_pass(packed)
        logits = None if packed.logit_tokens is None else self._forward.logits(state, packed.logit_tokens)
        return Computed(logits, state)

    def _send_padding(self) -> None:
        """Uploads the greatest number of rows, all of them padding."""
        nothing = np.zeros(0, dtype=np.int64)
        self._upload.begin()
        self._put_tokens(nothing, nothing, self._decode.max_rows)
        self._put_prefixes([])
        self._upload.send()

    def _put_tokens(self, seats: IntArray, positions: IntArray, size: int) -> None:
        """Upload seats and positions of tokens, padded to `size`."""
        padded = np.zeros((2, size), dtype=np.int32)
        padded[1] = _PADDING
        padded[0, : len(seats)], padded[1, : len(seats)] = seats, positions
        self._upload.put("seats", padded[0])
        self._upload.put("positions", padded[1])

    def _put_prefixes(self, prefixes: Sequence[SharedPrefix]) -> None:
        for name, array in fill_cascade_arrays(prefixes, self._decode.max_rows, self._plans.block_size).items():
            self._upload.put(name, array)

    def _find_prefixes(self, table: SeatTable, rows: StepRows) -> list[SharedPrefix]:
        if not self._shared_plans:
            return []
        block_size = table.limits.block_size
        shareable = num_shareable_blocks(rows.ends.astype(np.int32), block_size)
        tables = table.block_tables[rows.seats, : int(shareable.max())]
        return find_shared_prefixes(tables, shareable, block_size, self._sharing_cost)

    def _pack_prefill(self, table: SeatTable, rows: StepRows, layout: BatchLayout) -> _PackedPrefill | None:
        which = layout.prefill_rows
        if not len(which):
            return None
        counts, ends = rows.num_tokens[which], rows.ends[which]
        query_start = np.zeros(len(which) + 1, dtype=np.int32)
        np.cumsum(counts, out=query_start[1:])
        width = -(-int(ends.max()) // table.limits.block_size)
        return _PackedPrefill(
            PrefillRows(
                query_start=self._upload.add(query_start),
                context_lens=self._upload.add(ends.astype(np.int32)),
                block_tables=self._upload.add(table.block_tables[rows.seats[which], :width]),
            ),
            self._upload.add(self._plans.prefill_tiles(counts, ends)),
        )

    def _decode_pass(self, size: int, plans: DecodePlans) -> None:
        """One decode pass as it is captured: all memory that it reads and writes has a fixed address."""
        inputs = self._gather(size, size)
        self._plans.fill(plans)
        state = self._forward.forward(inputs, BatchAttention(num_decode_tokens=size, decode=plans, prefill={}))
        self._logits[:size].copy_(self._forward.logits(state, None))

    def _mixed_pass(self, packed: PackedBatch) -> ForwardState:
        num_decode = packed.layout.num_decode
        inputs = self._gather(len(packed.layout.positions), num_decode)
        decode: DecodePlans = {}
        prefill: PrefillPlans = {}
        if num_decode:
            decode = self._plans.decode(_decode_rows(inputs.first(num_decode, num_decode)))
            self._plans.fill(decode)
        if packed.prefill is not None:
            prefill = self._plans.prefill(packed.prefill.rows, packed.prefill.tiles)
        return self._forward.forward(
            inputs, BatchAttention(num_decode_tokens=num_decode, decode=decode, prefill=prefill)
        )

    def _gather(self, num_tokens: int, num_rows: int) -> StepInputs:
        inputs = self._inputs.first(num_tokens, num_rows)
        fixed = self._upload.fixed
        self._plans.gather(self._tables, fixed["seats"][:num_tokens], fixed["positions"][:num_tokens], inputs)
        return inputs


def _decode_rows(inputs: StepInputs) -> DecodeRows:
    return DecodeRows(inputs.context_lens, inputs.block_tables)
