"""Attention of passes by libraries: which layers of which passes they compute, and what is planned before a launch.

Layers with a sliding window, and passes whose rows of one token share prefixes, stay with the runner's own operations.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch

from kernels.attention.decode_reference import DecodeRows
from kernels.attention.prefill_reference import PrefillRows
from worker_svc.gpu.batch_layout import BatchLayout
from worker_svc.gpu.libraries.block_lists import Int32Array, SentBlockLists, block_lists, padding_lists
from worker_svc.gpu.libraries.library import LibraryPass, LibraryPasses, LibrarySetup, PassLibraries
from worker_svc.gpu.mixed_batch import MixedSize
from worker_svc.steps.seat_table import SeatTable
from worker_svc.steps.step_check import IntArray, StepRows
from worker_svc.steps.step_upload import StepUpload

Window = int | None
LibraryByWindow = Mapping[Window, LibraryPass]  # of the windows that the library attends to


@dataclass(frozen=True, slots=True)
class PlannedPass:
    """Block lists of a pass whose library plans on the host."""

    sent: SentBlockLists
    mixed: MixedSize | None  # None: every row has one token


class LibraryPlans:
    """Passes of a runner by libraries; without any of them, nothing. For the execution thread alone."""

    def __init__(self, libraries: PassLibraries, setup: LibrarySetup, windows: Iterable[Window]) -> None:
        made = {each.name: each.passes(setup) for each in set(libraries) if each is not None and None in windows}
        self._decode = None if libraries.decode is None else made.get(libraries.decode.name)
        self._mixed = None if libraries.mixed is None else made.get(libraries.mixed.name)
        self._block_size, self._device = setup.block_size, setup.device

    def decode(self, rows: DecodeRows) -> LibraryByWindow:
        """The pass of one token in each row, for layers that a library computes."""
        return {} if self._decode is None else {None: self._decode.decode(rows)}

    def mixed(self, rows: PrefillRows, num_tokens: int, *, is_padded: bool) -> LibraryByWindow:
        """The pass of rows of any number of tokens, for layers that a library computes.

        is_padded: to a size that `prepare_mixed` has got
        """
        if self._mixed is None:
            return {}
        return {None: self._mixed.mixed(rows, num_tokens, is_padded=is_padded)}

    def prepare_mixed(self, sizes: Iterable[MixedSize]) -> None:
        """Take the memory of padded passes, so that they can be captured."""
        if self._mixed is not None:
            for size in sizes:
                self._mixed.prepare_mixed(size.num_tokens, size.num_rows)

    def plan_padding(self, size: MixedSize) -> None:
        """Plan a mixed pass of padding alone, which is not captured."""
        if self._mixed is not None and self._mixed.needs_block_lists:
            lists = padding_lists(size.num_tokens, size.num_rows, self._block_size)
            blocks = torch.zeros(len(lists.blocks), dtype=torch.int32, device=self._device)
            self._mixed.plan_mixed(SentBlockLists(lists, blocks), size.num_tokens, is_padded=False)

    def pack_decode(self, upload: StepUpload, table: SeatTable, rows: StepRows, size: int) -> PlannedPass | None:
        """Block lists of rows of one token, padded to `size`; None if nothing is planned."""
        if not _plans(self._decode):
            return None
        tables = self._own_blocks(table, rows.seats, rows.ends)
        lists = block_lists(rows.num_tokens, rows.ends, tables, self._block_size, size, 1)
        return PlannedPass(SentBlockLists(lists, upload.add(lists.blocks)), None)

    def pack_mixed(
        self, upload: StepUpload, table: SeatTable, rows: StepRows, layout: BatchLayout, size: MixedSize
    ) -> PlannedPass | None:
        """Block lists of rows of any number of tokens, in the layout's order, padded; None if nothing is planned."""
        if not _plans(self._mixed):
            return None
        order = layout.order
        contexts = rows.ends[order]
        tables = self._own_blocks(table, rows.seats[order], contexts)
        lists = block_lists(rows.num_tokens[order], contexts, tables, self._block_size, size.num_rows, 0)
        return PlannedPass(SentBlockLists(lists, upload.add(lists.blocks)), size)

    def plan(self, planned: PlannedPass, *, is_padded: bool) -> None:
        """Plan the next launch, after the upload was sent. is_padded: of a graph of prompts."""
        if planned.mixed is None:
            assert self._decode is not None
            self._decode.plan_decode(planned.sent)
        else:
            assert self._mixed is not None
            self._mixed.plan_mixed(planned.sent, planned.mixed.num_tokens, is_padded=is_padded)

    def _own_blocks(self, table: SeatTable, seats: IntArray, contexts: IntArray) -> Int32Array:
        """Block tables of these seats, as wide as the longest context: whole ones may be megabytes."""
        width = -(-int(contexts.max()) // self._block_size)
        return table.block_tables[:, :width][seats]


def _plans(passes: LibraryPasses | None) -> bool:
    return passes is not None and passes.needs_block_lists
