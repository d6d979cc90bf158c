"""Trial of who attends in a runner's passes: its own operations or a library, on the model's shapes in a small pool.

Both get what they get in a step: all layers of the pool, shuffled blocks, a captured launch. Knows no settings.
"""

from collections.abc import Callable
from statistics import median
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kernels.attention.decode_reference import DecodeRows
from kernels.attention.prefill_reference import PrefillRows
from kernels.attention.shape import ScoreRule
from worker_svc.gpu.attention_plans import AttentionPlans, BatchAttention, LayerKeys
from worker_svc.gpu.device_loss import raise_if_lost
from worker_svc.gpu.graphs import CudaGraphs
from worker_svc.gpu.libraries.block_lists import SentBlockLists, block_lists
from worker_svc.gpu.libraries.library import AttentionLibrary, PassLibraries
from worker_svc.gpu.library_plans import LibraryPlans, PlannedPass
from worker_svc.gpu.mixed_batch import MixedSize
from worker_svc.memory.kv_pool import BlockShape, KVPool
from worker_svc.model.decoder import Decoder
from worker_svc.operations import Operations
from worker_svc.steps.step_check import IntArray
from worker_svc.steps.streams import DeviceEvent

_ROUNDS = 15
_ALLOWED_EPS = 4.0  # of the largest result: each side rounds weights and results

Launch = Callable[[], None]


class LaunchClock(Protocol):
    """Clock of what is queued on a device."""

    def launch_us(self, launch: Launch) -> float:
        """Microseconds of the device for what `launch` queues, which may be called several times.

        Raises what that raises; DeviceLostError if this process cannot use the device any more.
        """


class GraphClock:
    """Clock of a CUDA device: replays a launch that was captured, so that the host does not count."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._graphs = CudaGraphs(device)

    def launch_us(self, launch: Launch) -> float:
        """See LaunchClock.launch_us."""
        try:
            graph = self._graphs.capture(launch)
            graph.replay()
            return median(self._replay_us(graph.replay) for _ in range(_ROUNDS))
        except Exception as error:
            raise_if_lost(self._device, error)
            raise

    def _replay_us(self, replay: Launch) -> float:
        start, end = (DeviceEvent(self._device, timed=True) for _ in range(2))
        start.record()
        replay()
        end.record()
        end.synchronize()
        return end.nanoseconds_since(start) / 1e3


class TrialSize(NamedTuple):
    """Extent of the trial's passes."""

    num_rows: int  # of one token
    context: int  # keys of each row
    chunk: int  # tokens of the prompt beside them, in passes with prompts


class Trial(NamedTuple):
    """Measured pass."""

    us: float  # of attention in all layers that a library may compute
    out: Tensor  # [T, num_heads, head_dim], of the last layer


class TrialRows(NamedTuple):
    """Rows of a trial, on the host and on the device."""

    query_lens: IntArray
    context_lens: IntArray
    block_tables: Tensor  # [R, max_blocks] int32, on the device

    @property
    def num_tokens(self) -> int:
        return int(self.query_lens.sum())


class AttentionTrial:
    """Passes of random queries over random keys, the same for all who attend."""

    def __init__(self, decoder: Decoder, shape: BlockShape, operations: Operations, size: TrialSize) -> None:
        blocks_of_row = -(-size.context // shape.block_size)
        num_rows = size.num_rows + 1
        self._operations, self._decoder = operations, decoder
        self._rule = ScoreRule(decoder.config.attention_scale)
        self._pool = KVPool(shape, num_rows * blocks_of_row, decoder.device)
        self._fill(self._pool.blocks)
        self._plans = AttentionPlans(decoder, self._pool, operations, max_rows=num_rows, max_blocks=blocks_of_row)
        tables = torch.randperm(self._pool.num_blocks, generator=torch.Generator().manual_seed(0)).to(torch.int32)
        self._tables = tables.view(num_rows, blocks_of_row).to(decoder.device)
        self._ones, self._contexts = np.ones(size.num_rows, dtype=np.int64), np.full(num_rows, size.context)
        self._chunk = min(size.chunk, size.context)

    def decode(self, library: AttentionLibrary | None, clock: LaunchClock) -> Trial:
        """Measure a pass of one token in each row; None: by the runner's own operations."""
        num_rows = len(self._ones)
        rows = TrialRows(self._ones, self._contexts[:num_rows], self._tables[:num_rows])
        device_rows = DecodeRows(self._sent(rows.context_lens), rows.block_tables)
        if library is None:
            plans = self._plans.decode(device_rows)
            self._plans.fill(plans)
            attention = BatchAttention(num_decode_tokens=num_rows, decode=plans, prefill={})
        else:
            passes = self._passes(library, rows)
            attention = BatchAttention(
                num_decode_tokens=num_rows, decode={}, prefill={}, library=passes.decode(device_rows)
            )
            passes.plan(PlannedPass(self._lists(rows), None), is_padded=True)
        return self._measure(attention, rows, clock)

    def mixed(self, library: AttentionLibrary | None, clock: LaunchClock) -> Trial:
        """Measure a pass of a prompt's last tokens beside the rows of one token."""
        num_ones = len(self._ones)
        rows = TrialRows(np.append(self._ones, self._chunk), self._contexts, self._tables)
        starts = np.concatenate(([0], rows.query_lens.cumsum()))
        contexts = self._sent(rows.context_lens)
        device_rows = PrefillRows(self._sent(starts), contexts, rows.block_tables)
        if library is None:
            work = self._plans.prefill_work(rows.query_lens[num_ones:], self._contexts[num_ones:], num_ones)
            decode = self._plans.decode(DecodeRows(contexts[:num_ones], rows.block_tables[:num_ones]))
            self._plans.fill(decode)
            prefill = self._plans.prefill(device_rows, [torch.from_numpy(own).to(contexts.device) for own in work])
            attention = BatchAttention(num_decode_tokens=num_ones, decode=decode, prefill=prefill)
        else:
            passes, size = self._passes(library, rows), _mixed_size(rows)
            passes.prepare_mixed([size])
            own = passes.mixed(device_rows, rows.num_tokens, is_padded=True)
            attention = BatchAttention(num_decode_tokens=num_ones, decode={}, prefill={}, library=own)
            passes.plan(PlannedPass(self._lists(rows), size), is_padded=True)
        return self._measure(attention, rows, clock)

    def _measure(self, attention: BatchAttention, rows: TrialRows, clock: LaunchClock) -> Trial:
        config = self._decoder.config
        size = (rows.num_tokens, config.num_heads, config.head_dim)
        query = self._fill(torch.empty(size, dtype=self._decoder.dtype, device=self._decoder.device))
        out = torch.zeros_like(query)
        layers = [
            LayerKeys(self._pool.key_cache(layer), self._pool.value_cache(layer), window)
            for layer, window in enumerate(config.sliding_windows)
            if window is None
        ]

        def launch() -> None:
            for layer in layers:
                attention.attend(self._operations, self._rule, layer, query, out)

        return Trial(clock.launch_us(launch), out)

    def _passes(self, library: AttentionLibrary, rows: TrialRows) -> LibraryPlans:
        return self._plans.library_plans(PassLibraries(library, library), self._rule, rows.num_tokens)

    def _lists(self, rows: TrialRows) -> SentBlockLists:
        tables, count = rows.block_tables.cpu().numpy(), len(rows.query_lens)
        lists = block_lists(rows.query_lens, rows.context_lens, tables, self._pool.block_size, count, 0)
        return SentBlockLists(lists, self._sent(lists.blocks))

    def _sent(self, numbers: npt.NDArray[np.integer]) -> Tensor:
        return torch.from_numpy(numbers.astype(np.int32)).to(self._decoder.device)

    def _fill(self, tensor: Tensor) -> Tensor:
        """Set to random numbers, the same for each tensor of as many."""
        generator = torch.Generator(tensor.device).manual_seed(tensor.numel())
        return tensor.normal_(generator=generator)


def results_agree(ours: Tensor, theirs: Tensor) -> bool:
    """True if two results of the same attention differ by no more than what both may have rounded."""
    allowed = _ALLOWED_EPS * torch.finfo(ours.dtype).eps * ours.abs().max()
    return bool(((ours - theirs).abs() <= allowed).all())


def _mixed_size(rows: TrialRows) -> MixedSize:
    count = len(rows.query_lens)
    return MixedSize(num_tokens=rows.num_tokens, num_rows=count, num_decode=count, num_work=0)
