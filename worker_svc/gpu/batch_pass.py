"""One forward pass for the rows of a step: replayed from a graph, or launched kernel by kernel where there is none.

Joins layout, inputs, attention plans and the decoder's pass, and owns the memory that graphs read and write. Knows
nothing of sampling.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from kernels.attention.cascade_groups import (
    MIN_SHARERS,
    SharedPrefix,
    SharingCost,
    cascade_arrays,
    fill_cascade_arrays,
    find_shared_prefixes,
    num_shareable_blocks,
)
from kernels.attention.cascade_reference import prefix_groups
from kernels.attention.decode_reference import DecodeRows
from kernels.layers.step_inputs_reference import SeatTables, StepInputs, empty_step_inputs
from worker_svc.gpu.attention_plans import AttentionPlans, BatchAttention, DecodePlans
from worker_svc.gpu.batch_layout import BatchLayout
from worker_svc.gpu.device_seats import DeviceSeats
from worker_svc.gpu.forward import DeviceForward
from worker_svc.gpu.graphs import CapturedPass, GraphMaker
from worker_svc.gpu.library_plans import LibraryByWindow, LibraryPlans, PlannedPass
from worker_svc.gpu.mixed_batch import (
    PADDING,
    MixedSize,
    mixed_arrays,
    mixed_rows,
    put_mixed,
    put_padded,
    work_names,
)
from worker_svc.gpu.mixed_graphs import MixedGraphs
from worker_svc.gpu.pass_counts import GraphKind, NoGraph, PassCounts
from worker_svc.steps.seat_table import SeatTable
from worker_svc.steps.step_check import IntArray, StepRows
from worker_svc.steps.step_upload import StepUpload

_NO_ROW = -1


def fixed_arrays(
    max_tokens: int, max_rows: int, max_work: int, num_windows: int
) -> Mapping[str, tuple[int, torch.dtype]]:
    """Arrays at a fixed place of the upload: each token's seat and position, rows, work, and rows that share keys."""
    tokens = {"seats": (max_tokens, torch.int32), "positions": (max_tokens, torch.int32)}
    return {**tokens, **mixed_arrays(max_rows, max_work, num_windows), **cascade_arrays(max_rows)}


@dataclass(frozen=True, slots=True)
class PackedBatch:
    """A batch whose arrays are sent in the step's upload: a decode pass of some size, or a mixed one."""

    logit_index: IntArray  # [R] index of each row's logits, -1 if they are not computed
    decode_size: int | None  # rows with padding
    prefixes: Sequence[SharedPrefix]  # that rows of one token attend to together
    mixed: MixedSize | None
    how: GraphKind | NoGraph  # a mixed pass is launched
    num_tokens: int  # without padding
    logit_tokens: Tensor | None  # [L] int64, of a mixed pass
    planned: PlannedPass | None  # what a library plans before the launch


@dataclass(frozen=True, slots=True)
class Computed:
    """Results of a pass, valid until the next one."""

    logits: Tensor | None  # [at least L, vocab_size]; None if no row needs any
    hidden: Tensor | None  # of all tokens, in the layout's order, from which logits are; None after a decode pass


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
        libraries: LibraryPlans,
    ) -> None:
        device, max_blocks = seats.tokens.device, seats.block_tables.shape[1]
        self._forward = forward
        self._plans = plans
        self._tables = SeatTables(seats.tokens, seats.block_tables)
        self._upload = upload
        self._sharing_cost = sharing_cost
        self._libraries = libraries
        self._inputs = empty_step_inputs(len(upload.fixed["seats"]), sizes[-1], max_blocks, device)
        self._row_inputs = empty_step_inputs(sizes[-1], sizes[-1], max_blocks, device)
        self._logits = torch.zeros((sizes[-1], forward.vocab_size), dtype=forward.dtype, device=device)
        rows = {size: _decode_rows(self._inputs.first(size, size)) for size in sizes}
        self._library_passes = {size: libraries.decode(rows[size]) for size in sizes}
        self._decode_plans = {size: _without(plans.decode(rows[size]), self._library_passes[size]) for size in sizes}
        self._decode = CapturedPass(
            lambda size: self._decode_pass(size, self._decode_plans[size], self._library_passes[size]), sizes
        )
        self._shared_plans: Mapping[int, DecodePlans] = {}
        if plans.can_share_prefixes:
            groups = {size: prefix_groups(upload.fixed, size) for size in sizes}
            self._shared_plans = {size: plans.cascade(rows[size], groups[size]) for size in sizes}
        self._shared = CapturedPass(
            lambda size: self._decode_pass(size, self._shared_plans[size], {}), list(self._shared_plans)
        )
        # By whether rows of one token attend to common prefixes together.
        self._mixed = {
            shared: MixedGraphs(
                partial(self._mixed_pass, shared=shared, is_padded=True),
                lambda num_tokens: plans.work_room(num_tokens, sizes[-1]),
                max_rows=sizes[-1],
                max_tokens=len(upload.fixed["seats"]),
            )
            for shared in ((False, True) if plans.can_share_prefixes else (False,))
        }
        self.counts = PassCounts()

    @property
    def logits(self) -> Tensor:
        """[largest size, vocab_size]: the memory to which graphs write logits."""
        return self._logits

    def warm_up(self) -> None:
        """Computes padding at all sizes, launch by launch, which compiles the kernels of passes."""
        self._send_padding()
        for size in self._decode_plans:
            self._decode_pass(size, self._decode_plans[size], self._library_passes[size])
        for size in self._shared_plans:
            self._decode_pass(size, self._shared_plans[size], {})
        for shared, graphs in self._mixed.items():
            self._libraries.plan_padding(graphs.smallest)
            self._mixed_pass(graphs.smallest, shared=shared, is_padded=False)

    def capture(self, maker: GraphMaker, max_mixed_tokens: int | None) -> None:
        """Captures the graphs, which compute padding meanwhile; those with prompts of at most so many tokens."""
        self._send_padding()
        self._libraries.prepare_mixed(self._mixed[False].sizes_up_to(max_mixed_tokens))
        for graphs in self._mixed.values():
            graphs.capture(maker, max_mixed_tokens)
        self._decode.capture(maker)
        self._shared.capture(maker)

    def release(self) -> None:
        """Drops the graphs."""
        self._shared.release()
        self._decode.release()
        for graphs in self._mixed.values():
            graphs.release()

    def pack(self, table: SeatTable, rows: StepRows, layout: BatchLayout, *, keep_hidden: bool) -> PackedBatch:
        """Adds a batch to the step's upload, between its `begin` and `send`.

        keep_hidden: True if more is needed than logits of sampled and ranked rows, which a decode pass does not keep.
        """
        if not layout.is_decode or keep_hidden:
            return self._pack_mixed(table, rows, layout)
        num_tokens = len(layout.positions)
        size = self._decode.size_for(num_tokens)
        self._put_tokens(layout.token_seats, layout.positions, size)
        prefixes = self._pack_prefixes(table, rows.seats, rows.ends)
        how = GraphKind.SHARED_PREFIX if prefixes else GraphKind.DECODE
        planned = None if prefixes else self._libraries.pack_decode(self._upload, table, rows, size)
        return PackedBatch(layout.order, size, prefixes, None, how, num_tokens, None, planned)

    def launch(self, packed: PackedBatch) -> Computed:
        """Queues the pass, after the upload was sent, and all that the rows read is in the pool or queued."""
        if packed.planned is not None:
            self._libraries.plan(packed.planned, is_padded=isinstance(packed.how, GraphKind))
        if packed.decode_size is not None:
            by_graph = (self._shared if packed.prefixes else self._decode).replay(packed.decode_size)
            self.counts.record(packed.how if by_graph else NoGraph.NO_GRAPHS)
            return Computed(self._logits, None)
        assert packed.mixed is not None
        self.counts.record(packed.how)
        if isinstance(packed.how, GraphKind):
            hidden = self._mixed[bool(packed.prefixes)].replay(packed.mixed)
        else:
            hidden = self._mixed_pass(packed.mixed, shared=bool(packed.prefixes), is_padded=False)
        logits = None if packed.logit_tokens is None else self._forward.logits(hidden, packed.logit_tokens)
        return Computed(logits, hidden)

    def _pack_mixed(self, table: SeatTable, rows: StepRows, layout: BatchLayout) -> PackedBatch:
        num_tokens, which = len(layout.positions), layout.prefill_rows
        work = self._plans.prefill_work(rows.num_tokens[which], rows.ends[which], first_row=layout.num_decode)
        exact = MixedSize(
            num_tokens=num_tokens,
            num_rows=len(layout.order),
            num_decode=layout.num_decode,
            num_work=max(map(len, work)),
        )
        ones = layout.order[: layout.num_decode]
        prefixes = self._pack_prefixes(table, rows.seats[ones], rows.ends[ones])
        size, how = self._mixed[bool(prefixes)].choose(exact)
        self._put_tokens(layout.token_seats, layout.positions, size.num_tokens)
        put_mixed(self._upload, rows, layout, work, size)
        logit_rows = np.unique(np.concatenate([rows.sample_rows, rows.candidate_rows]))
        logit_index = np.full(len(layout.order), _NO_ROW)
        logit_index[logit_rows] = np.arange(len(logit_rows))
        logit_tokens = self._upload.add(layout.last_tokens[logit_rows]) if len(logit_rows) else None
        planned = None if prefixes else self._libraries.pack_mixed(self._upload, table, rows, layout, size)
        return PackedBatch(logit_index, None, prefixes, size, how, num_tokens, logit_tokens, planned)

    def _send_padding(self) -> None:
        """Uploads the most tokens, rows and work, all of them padding."""
        upload = self._upload
        nothing = np.zeros(0, dtype=np.int64)
        upload.begin()
        self._put_tokens(nothing, nothing, len(upload.fixed["seats"]))
        for name in ("row_positions", *work_names(self._plans.num_windows)):
            put_padded(upload, name, nothing, len(upload.fixed[name]), PADDING)
        for name in ("row_seats", "decode_lens", "query_start"):
            put_padded(upload, name, nothing, len(upload.fixed[name]), 0)
        self._put_prefixes([])
        upload.send()

    def _put_tokens(self, seats: IntArray, positions: IntArray, size: int) -> None:
        """Upload seats and positions of tokens, padded to `size`."""
        put_padded(self._upload, "seats", seats, size, 0)
        put_padded(self._upload, "positions", positions, size, PADDING)

    def _put_prefixes(self, prefixes: Sequence[SharedPrefix]) -> None:
        for name, array in fill_cascade_arrays(prefixes, self._decode.largest, self._plans.block_size).items():
            self._upload.put(name, array)

    def _pack_prefixes(self, table: SeatTable, seats: IntArray, ends: IntArray) -> list[SharedPrefix]:
        """Find the prefixes that rows of one token should attend to together, and upload them, if any."""
        if not self._shared_plans or len(seats) < MIN_SHARERS:
            return []
        block_size = table.limits.block_size
        shareable = num_shareable_blocks(ends.astype(np.int32), block_size)
        prefixes = find_shared_prefixes(table.block_tables, shareable, block_size, self._sharing_cost, seats)
        if prefixes:
            self._put_prefixes(prefixes)
        return prefixes

    def _decode_pass(self, size: int, plans: DecodePlans, library: LibraryByWindow) -> None:
        """One decode pass as it is captured: all memory that it reads and writes has a fixed address."""
        inputs = self._inputs.first(size, size)
        fixed = self._upload.fixed
        self._plans.gather(self._tables, fixed["seats"][:size], fixed["positions"][:size], inputs)
        self._plans.fill(plans)
        attention = BatchAttention(num_decode_tokens=size, decode=plans, prefill={}, library=library)
        hidden = self._forward.forward(inputs, attention)
        self._logits[:size].copy_(self._forward.logits(hidden, None))

    def _mixed_pass(self, size: MixedSize, *, shared: bool, is_padded: bool) -> Tensor:
        """One pass with prompts as it is captured; of the same batch it also reads only its fixed arrays.

        is_padded: to the size of a graph, captured or not
        """
        fixed = self._upload.fixed
        inputs = self._inputs.first(size.num_tokens, 0)
        rows = mixed_rows(fixed, self._row_inputs, size, self._plans.num_windows)
        self._plans.gather(
            self._tables, fixed["seats"][: size.num_tokens], fixed["positions"][: size.num_tokens], inputs
        )
        self._plans.gather(self._tables, rows.seats, rows.positions, rows.inputs)
        library: LibraryByWindow = {}
        if not shared:
            library = self._libraries.mixed(rows.prefill, size.num_tokens, is_padded=is_padded)
        decode: DecodePlans = {}
        if size.num_decode:
            if shared:
                decode = self._plans.cascade(rows.decode, prefix_groups(fixed, size.num_decode))
            else:
                decode = _without(self._plans.decode(rows.decode), library)
            self._plans.fill(decode)
        prefill = self._plans.prefill(rows.prefill, rows.work) if size.num_work else {}
        attention = BatchAttention(num_decode_tokens=size.num_decode, decode=decode, prefill=prefill, library=library)
        return self._forward.forward(inputs, attention)


def _without(plans: DecodePlans, library: LibraryByWindow) -> DecodePlans:
    """Plans of the windows that no library has; the others need no filling."""
    return {window: plan for window, plan in plans.items() if window not in library}


def _decode_rows(inputs: StepInputs) -> DecodeRows:
    return DecodeRows(inputs.context_lens, inputs.block_tables)
