"""The CPU's kernels in C++, compiled at first use and called on the memory of tensors.

The library has threads of its own (`src/team.h`), which sleep where there is nothing to do and which no call waits for
that could do without. A call releases the interpreter's lock. `src/cache.h` says how a block
lies inside.
"""

import os
import weakref
from collections.abc import Mapping, Sequence
from ctypes import CDLL, addressof

import torch
from torch import Tensor

from kernels.attention.paged_attention import RaggedRows
from kernels.layers.layer_ops import Activation
from kernels.native.cpu_kernels import (
    CpuKernels,
    CpuPlan,
    GreedyTokens,
    HeadNorms,
    LayerCache,
    NativeUnavailableError,
    NormRule,
)
from kernels.native.library import CacheMemory, load_library
from kernels.native.program import ACTIVATE, ATTEND, GATHER, NORM, ROTATE, Program, recorded
from kernels.native.torch_kernels import TorchKernels

DTYPES = (torch.float32, torch.bfloat16)
_MAX_HEAD_DIM = 512
_ACTIVATIONS: dict[Activation, int] = {"relu": 0, "silu": 1, "gelu": 2, "gelu_tanh": 3}
_BFLOAT16 = torch.bfloat16


class NativePlan(CpuPlan):
    """Units of work in memory of the library, which grows with the largest step and is kept."""

    __slots__ = ("__weakref__", "handle", "rows")

    def __init__(self, library: CDLL) -> None:
        self.handle: int = library.quire_plan_new()
        self.rows: RaggedRows | None = None  # the library reads its block tables
        weakref.finalize(self, library.quire_plan_delete, self.handle)


class NativeKernels:
    """Compiled kernels behind the interface `CpuKernels`. One thread at a time may use them."""

    def __init__(self, library: CDLL, num_threads: int) -> None:
        self.name = f"native, {32 * library.quire_lanes()}-bit vectors"
        self._library = library
        self._num_threads = num_threads
        self._plans: dict[int | None, NativePlan] = {}
        # By id, which stays the cache's own while it is kept here.
        self._memories: dict[int, tuple[LayerCache, CacheMemory, int]] = {}

    def plan(self, rows: RaggedRows, cache: LayerCache, sliding_window: int | None) -> NativePlan:
        """See CpuKernels.plan."""
        plan = self._plans.get(sliding_window)
        if plan is None:
            plan = self._plans[sliding_window] = NativePlan(self._library)
        plan.rows = rows
        tables = rows.block_tables
        assert tables.dtype == rows.query_start.dtype == rows.context_lens.dtype == torch.int32
        assert tables.stride(1) == 1 or tables.shape[1] <= 1, "a row's entries must be contiguous"
        self._library.quire_plan_fill(
            plan.handle,
            self._address(cache),
            rows.query_start.data_ptr(),
            rows.context_lens.data_ptr(),
            len(rows.context_lens),
            tables.data_ptr(),
            tables.stride(0),
            sliding_window or 0,
            self._num_threads,
        )
        return plan

    def attend(self, query: Tensor, cache: LayerCache, plan: CpuPlan, scale: float, out: Tensor) -> None:
        """See CpuKernels.attend."""
        assert isinstance(plan, NativePlan), "not a plan of these kernels"
        assert query.dtype == out.dtype == cache.shape.dtype
        if (program := recorded()) is not None:
            program.add(ATTEND, query, out, first=self._address(cache), second=plan.handle, number=scale)
        self._library.quire_attend(
            plan.handle,
            self._address(cache),
            query.data_ptr(),
            query.stride(0),
            out.data_ptr(),
            out.stride(0),
            scale,
        )

    def rotate_and_write(
        self,
        qkv: Tensor,
        rotary: Tensor | None,
        positions: Tensor,
        slot_mapping: Tensor,
        cache: LayerCache,
        norms: HeadNorms | None = None,
    ) -> None:
        """See CpuKernels.rotate_and_write."""
        assert qkv.dtype == cache.shape.dtype
        assert positions.dtype == slot_mapping.dtype == torch.int64
        if (program := recorded()) is not None:
            program.add(
                ROTATE,
                qkv,
                qkv,
                first=self._address(cache),
                second=None if rotary is None else rotary.data_ptr(),
                num_inputs=0 if rotary is None else rotary.shape[1],
                query_norm=None if norms is None else norms.query.data_ptr(),
                key_norm=None if norms is None else norms.key.data_ptr(),
                number=0.0 if norms is None else norms.eps,
            )
        self._library.quire_rotate_and_write(
            self._address(cache),
            qkv.data_ptr(),
            qkv.stride(0),
            None if rotary is None else rotary.data_ptr(),
            0 if rotary is None else rotary.shape[1],
            positions.data_ptr(),
            slot_mapping.data_ptr(),
            len(qkv),
            None if norms is None else norms.query.data_ptr(),
            None if norms is None else norms.key.data_ptr(),
            0.0 if norms is None else norms.eps,
            self._num_threads,
        )

    def add_norm(self, x: Tensor, residual: Tensor | None, norm: NormRule, out: Tensor) -> None:
        """See CpuKernels.add_norm."""
        weight, bias, eps, rms = norm
        if (program := recorded()) is not None:
            program.add(
                NORM,
                x,
                out,
                choice=rms,
                half=x.dtype == _BFLOAT16,
                number=eps,
                num_outputs=x.shape[1],
                first=None if residual is None else residual.data_ptr(),
                first_stride=0 if residual is None else residual.stride(0),
                second=None if weight is None else weight.data_ptr(),
                third=None if bias is None else bias.data_ptr(),
            )
        self._library.quire_add_norm(
            x.data_ptr(),
            x.stride(0),
            None if residual is None else residual.data_ptr(),
            0 if residual is None else residual.stride(0),
            None if weight is None else weight.data_ptr(),
            None if bias is None else bias.data_ptr(),
            eps,
            rms,
            out.data_ptr(),
            out.stride(0),
            *x.shape,
            x.dtype == _BFLOAT16,
            self._num_threads,
        )

    def gated_activation(self, gate_up: Tensor, activation: Activation, out: Tensor) -> None:
        """See CpuKernels.gated_activation."""
        self._activate(gate_up, activation, True, out)

    def activation(self, x: Tensor, activation: Activation, out: Tensor) -> None:
        """See CpuKernels.activation."""
        self._activate(x, activation, False, out)

    def gather_rows(self, x: Tensor, rows: Tensor, out: Tensor) -> None:
        """See CpuKernels.gather_rows."""
        size = x.element_size()
        if (program := recorded()) is not None:
            program.add(GATHER, x, out, num_outputs=x.shape[1] * size)
        self._library.quire_gather_rows(
            x.data_ptr(),
            x.stride(0) * size,
            rows.data_ptr(),
            len(rows),
            x.shape[1] * size,
            out.data_ptr(),
            out.stride(0) * size,
        )

    def new_program(self) -> Program:
        """For a pass whose native kernels are to be recorded."""
        return Program(self._library, self._num_threads)

    def greedy(self, logits: Tensor) -> GreedyTokens:
        """See CpuKernels.greedy."""
        num_rows, size = logits.shape
        tokens, finite = torch.empty(num_rows, dtype=torch.int64), torch.empty(num_rows, dtype=torch.bool)
        self._library.quire_greedy(
            logits.data_ptr(),
            logits.stride(0),
            num_rows,
            size,
            tokens.data_ptr(),
            finite.data_ptr(),
            logits.dtype == _BFLOAT16,
            self._num_threads,
        )
        return GreedyTokens(tokens, finite)

    def num_units(self, plan: NativePlan) -> int:
        """Into how many units of work a plan divides its rows."""
        return int(self._library.quire_plan_num_units(plan.handle))

    def _activate(self, x: Tensor, activation: Activation, gated: bool, out: Tensor) -> None:
        if (program := recorded()) is not None:
            program.add(
                ACTIVATE,
                x,
                out,
                choice=_ACTIVATIONS[activation],
                gated=gated,
                num_outputs=out.shape[1],
                half=x.dtype == _BFLOAT16,
            )
        self._library.quire_activate(
            _ACTIVATIONS[activation],
            x.data_ptr(),
            x.stride(0),
            gated,
            out.data_ptr(),
            out.stride(0),
            *out.shape,
            x.dtype == _BFLOAT16,
            self._num_threads,
        )

    def _address(self, cache: LayerCache) -> int:
        known = self._memories.get(id(cache))
        if known is None:
            memory = _memory(cache)
            known = self._memories[id(cache)] = (cache, memory, addressof(memory))
        return known[2]


def _memory(cache: LayerCache) -> CacheMemory:
    shape = cache.shape
    assert shape.dtype in DTYPES, f"no native kernels for {shape.dtype}"
    assert shape.head_dim <= _MAX_HEAD_DIM, f"no native kernels for heads of {shape.head_dim}"
    return CacheMemory(
        cache.keys.data_ptr(),
        cache.values.data_ptr(),
        cache.keys.stride(0),
        cache.values.stride(0),
        shape.num_heads,
        shape.num_kv_heads,
        shape.head_dim,
        shape.block_size,
        shape.dtype == torch.bfloat16,
        shape.int8,
    )


def native_kernels(environment: Mapping[str, str] = os.environ, flags: Sequence[str] = ()) -> NativeKernels:
    """Compiled kernels, from the cache or anew, for as many threads as torch uses.

    Raises NativeUnavailableError, which says why there are none.
    """
    return NativeKernels(load_library(environment, flags), torch.get_num_threads())


def choose_kernels(choice: str, dtype: torch.dtype) -> tuple[CpuKernels, str | None]:
    """The kernels for `choice` (auto, native, torch) and a dtype, and with auto why they are not native.

    Raises NativeUnavailableError if native ones were asked for and there are none.
    """
    if choice == "torch":
        return TorchKernels(), None
    try:
        if dtype not in DTYPES:
            raise NativeUnavailableError(f"there are native kernels for float32 and bfloat16, not for {dtype}")
        return native_kernels(), None
    except NativeUnavailableError as error:
        if choice == "native":
            raise
        return TorchKernels(), str(error)
