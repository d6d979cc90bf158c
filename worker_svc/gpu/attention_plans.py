"""Plans how attention's work is split in a step: one plan for all layers with the same sliding window.

Knows a model's shape and the memory that plans work in; neither the sequences behind the rows nor their keys.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kernels.attention.cascade_config import cascade_config
from kernels.attention.cascade_groups import cascade_arrays
from kernels.attention.cascade_reference import (
    CascadePlan,
    PrefixGroups,
    empty_cascade_plan,
    part_of_plan,
    prefix_groups,
)
from kernels.attention.decode_config import decode_config, num_processors
from kernels.attention.decode_reference import DecodePlan, DecodeRows, empty_plan, part_of_decode_plan
from kernels.attention.device_family import family_of
from kernels.attention.prefill_config import prefill_config
from kernels.attention.prefill_plan import most_work, prefill_work, work_room
from kernels.attention.prefill_reference import PrefillPlan, PrefillRows, empty_partials
from kernels.attention.shape import AttentionShape, ScoreRule
from kernels.layers.step_inputs_reference import SeatTables, StepInputs
from worker_svc.gpu.libraries.library import LibrarySetup, PassLibraries
from worker_svc.gpu.library_plans import LibraryByWindow, LibraryPlans, Window
from worker_svc.memory.kv_pool import KVPool
from worker_svc.model.decoder import Decoder
from worker_svc.operations import Operations
from worker_svc.steps.step_check import IntArray

DecodePlans = Mapping[Window, DecodePlan | CascadePlan]
PrefillPlans = Mapping[Window, PrefillPlan]


class LayerKeys(NamedTuple):
    """Keys and values of one layer, [num_blocks, block_size, num_kv_heads, head_dim] each, and its window."""

    key_cache: Tensor
    value_cache: Tensor
    window: Window


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchAttention:
    """Attention plans for the tokens of a forward pass: rows of one token first, then those of several.

    In layers of a window that a library has, it attends to all rows. In the others decode attention writes the first
    tokens; then prefill attention writes those of its rows.
    """

    num_decode_tokens: int  # with padding, which may reach into rows of several tokens
    decode: DecodePlans  # not read without decode tokens
    prefill: PrefillPlans  # empty without other tokens
    library: LibraryByWindow = field(default_factory=dict)

    def attend(self, operations: Operations, rule: ScoreRule, layer: LayerKeys, query: Tensor, out: Tensor) -> None:
        """Attention of all rows in one layer. query, out: [T, num_heads, head_dim]; padding may stay as it is."""
        keys, values, window = layer
        if window in self.library:
            self.library[window].attend(query, keys, values, out)
            return
        if self.num_decode_tokens:
            plan, count = self.decode[window], self.num_decode_tokens
            if isinstance(plan, CascadePlan):
                operations.cascade_attention(query[:count], keys, values, plan, rule, out[:count])
            else:
                operations.decode_attention(query[:count], keys, values, plan, rule, False, out[:count])
        if self.prefill:
            operations.prefill_attention(query, keys, values, self.prefill[window], rule, False, out)


class AttentionPlans:
    """Makes plans. Those of a kind (`decode`, `cascade`, `prefill`) share one memory, so they need the same stream."""

    def __init__(
        self, decoder: Decoder, kv_pool: KVPool, operations: Operations, *, max_rows: int, max_blocks: int
    ) -> None:
        config, device = decoder.config, decoder.device
        self.shape = AttentionShape(
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            dtype=decoder.dtype,
            kv_dtype=kv_pool.shape.dtype,
        )
        self._operations = operations
        self._device, self._max_rows, self._max_blocks = device, max_rows, max_blocks
        self.block_size = kv_pool.block_size
        self._windows = tuple(dict.fromkeys(config.sliding_windows))
        self._family = family_of(device)
        self._decode_config = decode_config(self.shape, self._family)
        self._prefill_config = prefill_config(self.shape, self._family)
        self._num_processors = num_processors(device)
        self._num_programs = self._num_processors * self._decode_config.programs_per_sm
        self._partials = empty_partials(self.shape, self._prefill_config, self._num_processors, device)
        rows = _empty_rows(max_rows, max_blocks, device)
        self._cascade = self._empty_cascade(rows) if None in self._windows else None
        whole = self._empty_decode(rows)
        # Plans of several windows are filled together, but their launches use this memory one after the other.
        self._memory = {
            window: replace(
                whole,
                sliding_window=window,
                work=torch.zeros_like(whole.work),
                num_work=torch.zeros_like(whole.num_work),
            )
            for window in self._windows
        }

    @property
    def num_windows(self) -> int:
        """Sliding windows of the layers, counting none as one."""
        return len(self._windows)

    @property
    def can_share_prefixes(self) -> bool:
        """True if any layer sees all keys of a row."""
        return self._cascade is not None

    def library_plans(self, libraries: PassLibraries, rule: ScoreRule, max_tokens: int) -> LibraryPlans:
        """Passes by these libraries, of at most `max_tokens` tokens, in the layers that they can compute."""
        setup = LibrarySetup(
            shape=self.shape,
            rule=rule,
            block_size=self.block_size,
            device=self._device,
            max_rows=self._max_rows,
            max_blocks=self._max_blocks,
            max_tokens=max_tokens,
        )
        return LibraryPlans(libraries, setup, self._windows)

    def gather(self, tables: SeatTables, seats: Tensor, positions: Tensor, inputs: StepInputs) -> None:
        """Fill `inputs`, which contain the rows of plans, for these tokens. Can be captured in a graph."""
        self._operations.step_inputs(tables, seats, positions, self.block_size, inputs)

    def decode(self, rows: DecodeRows) -> DecodePlans:
        """Plans for at most `max_rows` rows, to be filled; valid until others are filled.

        The rows' tensors are kept: filling the plans again uses the tensors' new content.
        """
        num_rows, num_blocks = rows.block_tables.shape
        size = self._empty_decode(_empty_rows(num_rows, num_blocks, torch.device("meta")))
        return {window: part_of_decode_plan(plan, rows, size) for window, plan in self._memory.items()}

    def cascade(self, rows: DecodeRows, groups: PrefixGroups) -> DecodePlans:
        """Plans like `decode`, for rows of which some begin with the same blocks; for layers without a window."""
        assert self._cascade is not None, "no layer can share prefixes"
        return {**self.decode(rows), None: part_of_plan(self._cascade, rows, groups)}

    def fill(self, plans: DecodePlans) -> None:
        """Split the rows' keys by the context lengths now on the device. Can be captured in a graph."""
        for plan in plans.values():
            if isinstance(plan, CascadePlan):
                self._operations.fill_cascade_plan(plan)
            else:
                self._operations.fill_decode_plan(plan)

    def prefill_work(
        self, query_lens: IntArray, context_lens: IntArray, first_row: int = 0
    ) -> list[npt.NDArray[np.int32]]:
        """Work that `prefill` needs on the device, for rows with these lengths [R]: int32 [num_work, 6] by window."""
        return [
            prefill_work(
                query_lens,
                context_lens,
                self.shape,
                self._prefill_config,
                self._num_processors,
                window=window,
                first_row=first_row,
            )
            for window in self._windows
        ]

    def work_room(self, num_tokens: int, max_rows: int) -> int:
        """Work of prefill attention that a graph of so many tokens has room for."""
        return work_room(num_tokens, max_rows, self.shape, self._prefill_config, self._num_processors)

    def most_work(self, num_tokens: int, num_rows: int) -> int:
        """The most work of prefill attention that so many tokens in so many rows can have."""
        return most_work(num_tokens, num_rows, self.shape, self._prefill_config, self._num_processors)

    def prefill(self, rows: PrefillRows, work: Sequence[Tensor]) -> PrefillPlans:
        """Plans for rows of any number of tokens, with the work of each window; they need no filling."""
        return {
            window: PrefillPlan(
                rows=rows,
                shape=self.shape,
                config=self._prefill_config,
                block_size=self.block_size,
                sliding_window=window,
                work=own,
                partials=self._partials,
            )
            for window, own in zip(self._windows, work, strict=True)
        }

    def _empty_decode(self, rows: DecodeRows) -> DecodePlan:
        return empty_plan(rows, self.shape, self._decode_config, self.block_size, self._num_programs)

    def _empty_cascade(self, rows: DecodeRows) -> CascadePlan:
        return empty_cascade_plan(
            rows,
            _empty_groups(len(rows.context_lens), rows.context_lens.device),
            self.shape,
            cascade_config(self.shape, self._family),
            self.block_size,
            self._num_processors,
        )


def _empty_rows(num_rows: int, num_blocks: int, device: torch.device) -> DecodeRows:
    """Rows without content, whose block tables take no memory."""
    table = torch.zeros((1, 1), dtype=torch.int32, device=device)
    return DecodeRows(torch.zeros(num_rows, dtype=torch.int32, device=device), table.expand(num_rows, num_blocks))


def _empty_groups(num_rows: int, device: torch.device) -> PrefixGroups:
    arrays = {
        name: torch.zeros(length, dtype=dtype, device=device)
        for name, (length, dtype) in cascade_arrays(num_rows).items()
    }
    return prefix_groups(arrays, num_rows)
