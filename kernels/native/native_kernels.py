"""The CPU's kernels in C++, compiled and called on the memory of tensors.

The library has its own threads (`src/team.h`), which sleep when idle; a call never waits for a thread that has not
begun. A call releases the interpreter's lock. `src/cache.h` defines the layout of a block.
"""

import os
import weakref
from collections.abc import Mapping, Sequence
from ctypes import CDLL, addressof
from functools import partial

import torch
from torch import Tensor

from kernels.attention.paged_attention import RaggedRows
from kernels.layers.layer_ops import Activation
from kernels.native.build import prebuilt_library
from kernels.native.compiling import NativeUnavailableError
from kernels.native.cpu_kernels import (
    CpuKernels,
    CpuPlan,
    GreedyTokens,
    HeadNorms,
    LayerCache,
    NormRule,
)
from kernels.native.library import CacheMemory, load_library
from kernels.native.native_sampling import NativeSampling
from kernels.native.program import ACTIVATE, ATTEND, COPY, EMBED, GATHER, GREEDY, NORM, ROTATE, Program, address, call
from kernels.native.torch_kernels import TorchKernels

DTYPES = (torch.float32, torch.bfloat16)
_MAX_HEAD_DIM = 512
_ACTIVATIONS: dict[Activation, int] = {"relu": 0, "silu": 1, "gelu": 2, "gelu_tanh": 3}


# Of every variant. Another number for another layout in `src/cache.h`: workers of both may fetch each other's blocks.
_BLOCK_LAYOUT = "native-1"


class NativePlan(CpuPlan):
    """Units of work in the library's memory, which grows to the largest step and is reused."""

    __slots__ = ("__weakref__", "handle", "rows")

    def __init__(self, library: CDLL) -> None:
        self.handle: int = library.quire_plan_new()
        self.rows: RaggedRows | None = None  # kept alive: the library reads its block tables
        weakref.finalize(self, library.quire_plan_delete, self.handle)


class NativeKernels:
    """Compiled kernels behind the interface `CpuKernels`. One thread at a time may use them."""

    block_layout = _BLOCK_LAYOUT

    def __init__(
        self, library: CDLL, num_threads: int, origin: str = "compiled here", num_cores: int | None = None
    ) -> None:
        """`num_cores`: that this process may keep busy; None: all on which it may run."""
        self.name = f"native, {32 * library.quire_lanes()}-bit vectors, {origin}"
        self.sampling = NativeSampling(library, num_threads).operations
        self._library = library
        self._num_threads = num_threads
        self._num_cores = num_cores or len(os.sched_getaffinity(0))
        self._call = partial(call, library, num_threads)
        self._plans: dict[tuple[int | None, bool], NativePlan] = {}  # by window, and whether it is the second one
        # By id(cache), which stays unique while the cache is kept here.
        self._memories: dict[int, tuple[LayerCache, CacheMemory, int]] = {}

    def plan(
        self, rows: RaggedRows, cache: LayerCache, sliding_window: int | None, *, is_second: bool = False
    ) -> NativePlan:
        """See CpuKernels.plan."""
        plan = self._plans.get((sliding_window, is_second))
        if plan is None:
            plan = self._plans[sliding_window, is_second] = NativePlan(self._library)
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
        self._call(
            ATTEND,
            query,
            out,
            num_inputs=query.shape[1],
            first=self._address(cache),
            second=plan.handle,
            number=scale,
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
        self._call(
            ROTATE,
            qkv,
            qkv,
            positions=positions,
            slots=slot_mapping,
            first=self._address(cache),
            second=address(rotary),
            num_inputs=0 if rotary is None else rotary.shape[1],
            query_norm=None if norms is None else norms.query.data_ptr(),
            key_norm=None if norms is None else norms.key.data_ptr(),
            number=0.0 if norms is None else norms.eps,
        )

    def add_norm(self, x: Tensor, residual: Tensor | None, norm: NormRule, out: Tensor) -> None:
        """See CpuKernels.add_norm."""
        self._call(
            NORM,
            x,
            out,
            choice=norm.rms | norm.then_add << 1,
            number=norm.eps,
            num_outputs=x.shape[1],
            first=address(residual),
            first_stride=0 if residual is None else residual.stride(0),
            second=address(norm.weight),
            third=address(norm.bias),
        )

    def gated_activation(self, gate_up: Tensor, activation: Activation, out: Tensor) -> None:
        """See CpuKernels.gated_activation."""
        self._call(ACTIVATE, gate_up, out, choice=_ACTIVATIONS[activation], gated=True, num_outputs=out.shape[1])

    def activation(self, x: Tensor, activation: Activation, out: Tensor) -> None:
        """See CpuKernels.activation."""
        self._call(ACTIVATE, x, out, choice=_ACTIVATIONS[activation], num_outputs=out.shape[1])

    def gather_rows(self, x: Tensor, rows: Tensor, out: Tensor) -> None:
        """See CpuKernels.gather_rows."""
        self._call(GATHER, x, out, rows=rows, num_outputs=x.shape[1] * x.element_size())

    def embed(self, table: Tensor, token_ids: Tensor, out: Tensor, first_id: int = 0) -> None:
        """See CpuKernels.embed."""
        row_bytes = table.shape[1] * table.element_size()
        self._call(EMBED, table, out, token_ids=token_ids, num_inputs=len(table), num_outputs=row_bytes, begin=first_id)

    def copy_rows(self, x: Tensor, out: Tensor) -> None:
        """See CpuKernels.copy_rows."""
        self._call(COPY, x, out, num_outputs=x.shape[1] * x.element_size())

    def new_program(self) -> Program:
        """New program, to record the native kernels of a pass."""
        return Program(self._library, self._num_threads, self._num_cores)

    def greedy(self, logits: Tensor, out: GreedyTokens) -> None:
        """See CpuKernels.greedy."""
        assert out.token_ids.dtype == torch.int64
        assert out.is_finite.dtype == torch.bool
        self._call(GREEDY, logits, out.token_ids, num_inputs=logits.shape[1], finite=out.is_finite.data_ptr())

    def num_units(self, plan: NativePlan) -> int:
        """Number of units of work in a plan."""
        return int(self._library.quire_plan_num_units(plan.handle))

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


def native_kernels(
    environment: Mapping[str, str] = os.environ, flags: Sequence[str] = (), num_cores: int | None = None
) -> NativeKernels:
    """Compiled kernels, from the cache or a new build, for as many threads as torch uses; see NativeKernels.

    Raises NativeUnavailableError, with the reason.
    """
    prebuilt = prebuilt_library(environment, flags)
    origin = "compiled here" if prebuilt is None else f"built for {prebuilt[0].name}"
    return NativeKernels(load_library(environment, flags), torch.get_num_threads(), origin, num_cores)


def choose_kernels(
    choice: str, dtype: torch.dtype, head_dim: int | None = None, num_cores: int | None = None
) -> tuple[CpuKernels, str | None]:
    """Kernels for `choice` (auto, native, torch), a dtype and, if they attend, heads of this size; see NativeKernels.

    With auto also the reason why they are not native.

    Raises NativeUnavailableError if native kernels were asked for and are unavailable.
    """
    if choice == "torch":
        return TorchKernels(), None
    try:
        if dtype not in DTYPES:
            name = str(dtype).removeprefix("torch.")
            raise NativeUnavailableError(f"there are native kernels for float32 and bfloat16, not for {name}")
        if head_dim is not None and head_dim > _MAX_HEAD_DIM:
            raise NativeUnavailableError(
                f"there are native kernels for heads of up to {_MAX_HEAD_DIM}, not of {head_dim}"
            )
        return native_kernels(num_cores=num_cores), None
    except NativeUnavailableError as error:
        if choice == "native":
            raise
        return TorchKernels(), str(error)
