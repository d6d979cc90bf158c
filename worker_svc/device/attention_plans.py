"""How attention's work is split in a step: one plan for all layers with the same sliding window.

It knows a model's shape and the memory that plans work in; not whose rows they are, nor what is attended to.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kernels.attention.decode_config import DecodeConfig, decode_config
from kernels.attention.decode_reference import DecodePlan, DecodeRows, empty_plan
from kernels.attention.prefill_config import prefill_config
from kernels.attention.prefill_plan import prefill_tiles
from kernels.attention.prefill_reference import PrefillPlan, PrefillRows
from kernels.attention.shape import AttentionShape
from kernels.layers.step_inputs_reference import SlotTables, StepInputs
from worker_svc.device.operations import Operations
from worker_svc.kv_pool import KVPool
from worker_svc.model.decoder import Decoder
from worker_svc.step_check import IntArray

Window = int | None
DecodePlans = Mapping[Window, DecodePlan]
PrefillPlans = Mapping[Window, PrefillPlan]

_CPU_PROGRAMS = 4  # at once, where no device says how many


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchAttention:
    """How the tokens of a forward pass attend: rows of one token first, then those of several."""

    num_decode_tokens: int
    decode: DecodePlans  # not read without decode tokens
    prefill: PrefillPlans  # not read without other tokens


class AttentionPlans:
    """Makes plans. Those of decode rows all share one memory, so work with them follows on one stream."""

    def __init__(
        self, decoder: Decoder, kv_pool: KVPool, operations: Operations, *, max_rows: int, max_blocks: int
    ) -> None:
        config = decoder.config
        self._operations = operations
        self._block_size = kv_pool.block_size
        self._shape = AttentionShape(
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            dtype=decoder.dtype,
            kv_dtype=kv_pool.shape.dtype,
        )
        self._config = decode_config(self._shape)
        self._prefill_config = prefill_config(self._shape)
        self._num_programs = _num_programs(decoder.device, self._config)
        self._windows = tuple(dict.fromkeys(config.sliding_windows))
        # Plans of several windows are filled together, but launches work in this memory one after the other.
        largest = self._empty(max_rows, max_blocks, decoder.device)
        self._memory = {
            window: replace(
                largest,
                sliding_window=window,
                work=torch.zeros_like(largest.work),
                num_work=torch.zeros_like(largest.num_work),
            )
            for window in self._windows
        }

    def gather(self, tables: SlotTables, slots: Tensor, positions: Tensor, inputs: StepInputs) -> None:
        """Fill `inputs`, which rows of plans are part of, for these tokens. Can be captured in a graph."""
        self._operations.step_inputs(tables, slots, positions, self._block_size, inputs)

    def decode(self, rows: DecodeRows) -> DecodePlans:
        """Plans for at most `max_rows` rows, to be filled; valid until others are filled.

        The rows' tensors are kept: filled again, the plans follow what these hold by then.
        """
        num_rows, num_blocks = rows.block_tables.shape
        num_work = len(self._empty(num_rows, num_blocks, torch.device("meta")).work)
        return {window: _part(plan, rows, num_work) for window, plan in self._memory.items()}

    def fill(self, plans: DecodePlans) -> None:
        """Split the rows' keys by the context lengths that are on the device now. Can be captured in a graph."""
        for plan in plans.values():
            self._operations.fill_decode_plan(plan)

    def prefill_tiles(self, query_lens: IntArray, context_lens: IntArray) -> npt.NDArray[np.int32]:
        """What `prefill` needs on the device of rows with these lengths [R]: int32 [num_tiles, 2]."""
        return prefill_tiles(query_lens, context_lens, self._shape, self._prefill_config)

    def prefill(self, rows: PrefillRows, tiles: Tensor) -> PrefillPlans:
        """Plans for rows of any number of tokens; nothing is filled."""
        return {
            window: PrefillPlan(
                rows=rows,
                shape=self._shape,
                config=self._prefill_config,
                block_size=self._block_size,
                sliding_window=window,
                tiles=tiles,
            )
            for window in self._windows
        }

    def _empty(self, num_rows: int, num_blocks: int, device: torch.device) -> DecodePlan:
        """Of rows without content; on `meta` without memory."""
        context_lens = torch.empty(num_rows, dtype=torch.int32, device=device)
        tables = torch.empty((1, 1), dtype=torch.int32, device=device).expand(num_rows, num_blocks)
        rows = DecodeRows(context_lens, tables)
        return empty_plan(rows, self._shape, self._config, self._block_size, self._num_programs)


def _part(plan: DecodePlan, rows: DecodeRows, num_work: int) -> DecodePlan:
    return replace(
        plan,
        rows=rows,
        work=plan.work[:num_work],
        partial_out=plan.partial_out[:num_work],
        partial_lse=plan.partial_lse[:num_work],
        num_arrived=plan.num_arrived[: len(rows.context_lens)],
    )


def _num_programs(device: torch.device, config: DecodeConfig) -> int:
    if device.type != "cuda":
        return _CPU_PROGRAMS
    return int(torch.cuda.get_device_properties(device).multi_processor_count) * config.programs_per_sm
