"""FlashInfer as a library: wrappers with fixed memory, one for each size that a graph may have, planned on the host.

A plan is written to pinned memory and copied on the stream, before the launch or replay that it is for. It is made from
the host's own arrays and does not wait for the device: the pinned memory is free again when the copy of the same
size's last plan is done, which is when the step before that one has ended.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from kernels.attention.decode_reference import DecodeRows
from kernels.attention.prefill_reference import PrefillRows
from kernels.attention.shape import AttentionShape, ScoreRule
from worker_svc.gpu.libraries.block_lists import Int32Array, SentBlockLists, padding_lists
from worker_svc.gpu.libraries.library import LibraryPass, LibrarySetup, why_not_attention
from worker_svc.steps.streams import DeviceEvent, DeviceStreams

_LEAST_CAPABILITY = (8, 0)
_MIXED_CAPABILITY, _MIXED_BACKEND = (9, 0), "fa3"
_HEAD_DIMS = (64, 128, 256)
_LAYOUT = "NHD"  # [block, slot, head, element], as a layer's view of the pool
_LEAST_WORKSPACE_BYTES = 128 << 20  # as it recommends
_TILE_ROWS = (16, 64, 128)  # of a tile, each one query of one head; the least that holds a group of heads
_MOST_TILES = 512  # in flight, of all heads together
_LEAST_PLAN_BYTES, _BYTES_PER_WORK = 1 << 20, 64  # of a plan; more than any of its schedules takes
_WORK_TOKENS = 64  # a head's work is at least so many tokens, or a row

MakePlan = Callable[[Tensor, Tensor, Tensor, Tensor], None]  # query starts, block starts, blocks, last lengths


class FlashInfer:
    """FlashInfer, by its module."""

    name = "flashinfer"

    def __init__(self, module: Any, version: str) -> None:
        self.version = version
        self._module = module

    def why_not(self, shape: AttentionShape, rule: ScoreRule, capability: tuple[int, int]) -> str | None:
        """See AttentionLibrary.why_not."""
        if capability < _LEAST_CAPABILITY:
            return f"it needs compute capability 8.0, and the device has {'.'.join(map(str, capability))}"
        if shape.head_dim not in _HEAD_DIMS:
            return f"heads have {shape.head_dim} elements, and it takes {', '.join(map(str, _HEAD_DIMS))}"
        return why_not_attention(shape, rule)

    def why_not_mixed(self, capability: tuple[int, int]) -> str | None:
        """See AttentionLibrary.why_not_mixed."""
        if capability == _MIXED_CAPABILITY:
            return None
        return "where its kernels are not those of FlashAttention-3, a graph holds chunks of fixed lengths alone"

    def passes(self, setup: LibrarySetup) -> "FlashInferPasses":
        """See AttentionLibrary.passes."""
        return FlashInferPasses(self._module, setup)


class FlashInferPasses:
    """Passes of a runner by FlashInfer, which share the memory of split results and of lists of blocks."""

    needs_block_lists = True

    def __init__(self, module: Any, setup: LibrarySetup, streams: DeviceStreams | None = None) -> None:
        """`streams` are those of the device unless given."""
        self._module, self._setup = module, setup
        self._streams = streams or DeviceStreams(setup.device)
        most_blocks = max(setup.max_rows * setup.max_blocks, -(-setup.max_tokens // setup.block_size))
        self._workspace = torch.zeros(_workspace_bytes(setup), dtype=torch.uint8, device=setup.device)
        self._blocks = self._integers(most_blocks + setup.max_rows)
        self._decode: dict[int, _PlannedWrapper] = {}  # by rows
        self._mixed: dict[tuple[int, int], _PlannedWrapper] = {}  # by tokens and rows
        self._loose: _PlannedWrapper | None = None  # of mixed passes at other sizes, which are never captured

    def decode(self, rows: DecodeRows) -> LibraryPass:
        """See LibraryPasses.decode."""
        num_rows = len(rows.context_lens)
        if num_rows not in self._decode:
            self._decode[num_rows] = self._decode_wrapper(num_rows)
        return self._decode[num_rows]

    def mixed(self, rows: PrefillRows, num_tokens: int, *, is_padded: bool) -> LibraryPass:
        """See LibraryPasses.mixed."""
        return self._mixed_wrapper(num_tokens, len(rows.context_lens), is_padded)

    def prepare_mixed(self, num_tokens: int, num_rows: int) -> None:
        """See LibraryPasses.prepare_mixed."""
        if (num_tokens, num_rows) not in self._mixed:
            self._mixed[num_tokens, num_rows] = self._fixed_wrapper(num_tokens, num_rows)

    def plan_decode(self, sent: SentBlockLists) -> None:
        """See LibraryPasses.plan_decode."""
        self._decode[sent.lists.num_rows].plan(sent)

    def plan_mixed(self, sent: SentBlockLists, num_tokens: int, *, is_padded: bool) -> None:
        """See LibraryPasses.plan_mixed."""
        self._mixed_wrapper(num_tokens, sent.lists.num_rows, is_padded).plan(sent)

    def _mixed_wrapper(self, num_tokens: int, num_rows: int, is_padded: bool) -> "_PlannedWrapper":
        if is_padded:
            return self._mixed[num_tokens, num_rows]
        if self._loose is None:
            wrapper = self._module.BatchPrefillWithPagedKVCacheWrapper(self._workspace, _LAYOUT, backend=_MIXED_BACKEND)
            self._loose = self._planned(wrapper, self._prefill_plan(wrapper))
        return self._loose

    def _decode_wrapper(self, num_rows: int) -> "_PlannedWrapper":
        wrapper = self._module.BatchDecodeWithPagedKVCacheWrapper(
            self._workspace,
            _LAYOUT,
            use_cuda_graph=True,
            use_tensor_cores=self._setup.shape.group > 1,
            paged_kv_indptr_buffer=self._integers(num_rows + 1),
            paged_kv_indices_buffer=self._blocks,
            paged_kv_last_page_len_buffer=self._integers(num_rows),
        )

        def plan(query_start: Tensor, block_start: Tensor, blocks: Tensor, last_lens: Tensor) -> None:
            wrapper.plan(block_start, blocks, last_lens, *self._sizes(), **self._named())

        return self._fixed(wrapper, plan, num_rows, num_rows)

    def _fixed_wrapper(self, num_tokens: int, num_rows: int) -> "_PlannedWrapper":
        wrapper = self._module.BatchPrefillWithPagedKVCacheWrapper(
            self._workspace,
            _LAYOUT,
            use_cuda_graph=True,
            qo_indptr_buf=self._integers(num_rows + 1),
            paged_kv_indptr_buf=self._integers(num_rows + 1),
            paged_kv_indices_buf=self._blocks,
            paged_kv_last_page_len_buf=self._integers(num_rows),
            backend=_MIXED_BACKEND,
        )
        return self._fixed(wrapper, self._prefill_plan(wrapper), num_tokens, num_rows)

    def _prefill_plan(self, wrapper: Any) -> MakePlan:
        def plan(query_start: Tensor, block_start: Tensor, blocks: Tensor, last_lens: Tensor) -> None:
            wrapper.plan(query_start, block_start, blocks, last_lens, *self._sizes(), causal=True, **self._named())

        return plan

    def _fixed(self, wrapper: Any, plan: MakePlan, num_tokens: int, num_rows: int) -> "_PlannedWrapper":
        """A wrapper with a plan of padding: the most that it will ever have, by which it sizes what a graph launches.

        Its plans have memory of their own, since a capture launches the wrapper, too.
        """
        works = self._setup.shape.num_heads * (num_tokens // _WORK_TOKENS + num_rows)
        plan_bytes = _LEAST_PLAN_BYTES + _BYTES_PER_WORK * works
        memory = torch.zeros(plan_bytes, dtype=torch.uint8, device=self._setup.device)
        wrapper.reset_workspace_buffer(self._workspace, memory)
        planned = self._planned(wrapper, plan)
        lists = padding_lists(num_tokens, num_rows, self._setup.block_size)
        planned.plan(SentBlockLists(lists, self._integers(len(lists.blocks))))
        return planned

    def _planned(self, wrapper: Any, plan: MakePlan) -> "_PlannedWrapper":
        return _PlannedWrapper(wrapper, plan, self._streams.event(), is_pinned=self._setup.device.type == "cuda")

    def _sizes(self) -> tuple[int, int, int, int]:
        shape = self._setup.shape
        return shape.num_heads, shape.num_kv_heads, shape.head_dim, self._setup.block_size

    def _named(self) -> dict[str, Any]:
        shape = self._setup.shape
        return {"q_data_type": shape.dtype, "kv_data_type": shape.kv_dtype, "sm_scale": self._setup.rule.scale}

    def _integers(self, length: int) -> Tensor:
        return torch.zeros(length, dtype=torch.int32, device=self._setup.device)


class _PlannedWrapper:
    """One wrapper. Its plans are copied from pinned memory: ours for the row starts, and its own."""

    def __init__(self, wrapper: Any, plan: MakePlan, copied: DeviceEvent, *, is_pinned: bool) -> None:
        """`copied` is recorded behind the copies of a plan."""
        self._wrapper, self._plan, self._copied = wrapper, plan, copied
        self._is_pinned = is_pinned

    def plan(self, sent: SentBlockLists) -> None:
        """Queue the copies of a plan; see the module for when this waits."""
        self._copied.synchronize()
        lists = sent.lists
        self._plan(
            self._pinned(lists.query_start),
            self._pinned(lists.block_start),
            sent.blocks,
            self._pinned(lists.last_lens),
        )
        self._copied.record()

    def attend(self, query: Tensor, key_cache: Tensor, value_cache: Tensor, out: Tensor) -> None:
        """See LibraryPass.attend."""
        self._wrapper.run(query, (key_cache, value_cache), out=out)

    def _pinned(self, values: Int32Array) -> Tensor:
        tensor = torch.from_numpy(values)
        return tensor.pin_memory() if self._is_pinned else tensor


def _workspace_bytes(setup: LibrarySetup) -> int:
    """Memory for the partial results of split keys in float32: those of every tile of the largest decode pass."""
    shape = setup.shape
    tile = next((rows for rows in _TILE_ROWS if shape.group <= rows), _TILE_ROWS[-1])
    num_tiles = -(-setup.max_rows * shape.group // tile) + setup.max_rows + _MOST_TILES // shape.num_kv_heads
    partial_bytes = shape.num_heads * num_tiles * tile * (shape.head_dim + 1) * 4
    return max(partial_bytes, _LEAST_WORKSPACE_BYTES if setup.device.type == "cuda" else 0)
