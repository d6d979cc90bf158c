"""A double of the module `flashinfer`: its two wrappers of paged attention in plain torch, by their documents.

A plan is in the wrapper's memory for plans, as the real one keeps its schedule there, and a launch reads nothing of the
host: so a plan that is overwritten before its launch, or never made, is seen. What is undocumented is refused.
"""

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from tests.worker.device.paged_double import attend_row, pages_of
from tests.worker.device.two_streams import Operation

Whole = Callable[[Callable[..., Any]], Callable[..., Any]]


class FlashInferDouble:
    """The module. `whole` wraps what is one launch for a recorder of graphs; plans cannot be captured.

    `queue` gets the device's work, copies and launches, which it may do later, in order.
    """

    def __init__(
        self,
        whole: Whole = lambda launch: launch,
        is_capturing: Callable[[], bool] = lambda: False,
        queue: Callable[[Operation], object] = lambda operation: operation(),
    ) -> None:
        self.num_calls, self.num_plans = {"decode": 0, "prefill": 0}, 0
        self.whole, self.is_capturing, self.queue = whole, is_capturing, queue

    def BatchDecodeWithPagedKVCacheWrapper(
        self,
        float_workspace_buffer: Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        use_tensor_cores: bool = False,
        paged_kv_indptr_buffer: Tensor | None = None,
        paged_kv_indices_buffer: Tensor | None = None,
        paged_kv_last_page_len_buffer: Tensor | None = None,
        backend: str = "auto",
        jit_args: None = None,
    ) -> "DecodeWrapperDouble":
        """The constructor of its class."""
        buffers = (None, paged_kv_indptr_buffer, paged_kv_indices_buffer, paged_kv_last_page_len_buffer)
        return DecodeWrapperDouble(self, float_workspace_buffer, kv_layout, use_cuda_graph, buffers)

    def BatchPrefillWithPagedKVCacheWrapper(
        self,
        float_workspace_buffer: Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        qo_indptr_buf: Tensor | None = None,
        paged_kv_indptr_buf: Tensor | None = None,
        paged_kv_indices_buf: Tensor | None = None,
        paged_kv_last_page_len_buf: Tensor | None = None,
        custom_mask_buf: None = None,
        mask_indptr_buf: None = None,
        backend: str = "auto",
        jit_args: None = None,
        jit_kwargs: None = None,
    ) -> "PrefillWrapperDouble":
        """The constructor of its class."""
        assert backend == "fa3", "the other backends leave works of former plans in a graph"
        buffers = (qo_indptr_buf, paged_kv_indptr_buf, paged_kv_indices_buf, paged_kv_last_page_len_buf)
        return PrefillWrapperDouble(self, float_workspace_buffer, kv_layout, use_cuda_graph, buffers)


class _WrapperDouble:
    """Part that both wrappers share."""

    kind: str

    def __init__(
        self,
        module: FlashInferDouble,
        workspace: Tensor,
        kv_layout: str,
        use_cuda_graph: bool,
        buffers: tuple[Tensor | None, ...],
    ) -> None:
        assert kv_layout == "NHD", "the pool's layout is [page, slot, head, element]"
        assert workspace.dtype == torch.uint8
        self._module, self._use_cuda_graph, self._buffers = module, use_cuda_graph, buffers
        self._plans = torch.zeros(1 << 12, dtype=torch.uint8)
        self._pinned = torch.zeros(1 << 10, dtype=torch.int32)  # of plans, until they are copied
        self._facts: tuple[object, ...] = ()
        self._most_queries: int | None = None
        self._launch = module.whole(self._attend)
        if use_cuda_graph:
            own = [buffer for buffer in buffers if buffer is not None]
            assert len(own) == (4 if self.kind == "prefill" else 3), "a graph needs buffers at fixed addresses"

    def reset_workspace_buffer(self, float_workspace_buffer: Tensor, int_workspace_buffer: Tensor) -> None:
        """Take other memory for results and for plans."""
        self._plans = int_workspace_buffer

    def _plan(
        self,
        queries: Tensor,
        indptr: Tensor,
        indices: Tensor,
        last_page_len: Tensor,
        sizes: tuple[int, ...],
        dtypes: tuple[torch.dtype, torch.dtype],
        scale: float,
    ) -> None:
        assert not self._module.is_capturing(), "a plan cannot be captured"
        self._module.num_plans += 1
        for tensor in (queries, indptr, indices, last_page_len):
            assert tensor.dtype == torch.int32
        num_rows, page_size = len(last_page_len), sizes[3]
        assert len(indptr) == len(queries) == num_rows + 1 and int(indptr[-1]) <= len(indices)
        assert int(queries[0]) == int(indptr[0]) == 0 and bool((queries.diff() >= 0).all())
        assert bool((indptr.diff() >= 1).all()) and bool(((last_page_len >= 1) & (last_page_len <= page_size)).all())
        lens = (indptr.diff() - 1) * page_size + last_page_len
        total = int(queries[-1])
        if self._use_cuda_graph:
            fixed = [buffer for buffer in self._buffers if buffer is not None]
            assert num_rows == len(fixed[-1]), "the batch size is fixed for a graph"
            assert len(indices) <= len(fixed[-2]), "more indices than the buffer holds"
            self._most_queries = total if self._most_queries is None else self._most_queries
            assert total <= self._most_queries, "more queries than the first plan had"
            given = (queries, indptr, indices, last_page_len)[-len(fixed) :]
            for buffer, values in zip(fixed, given, strict=True):
                self._module.queue(partial(buffer[: len(values)].copy_, values))
            self._device = (*self._buffers[1:],)
        else:
            self._device = tuple(tensor.clone() for tensor in (indptr, indices, last_page_len))
        self._facts = (*sizes, *dtypes, scale, total)
        plan = torch.cat((torch.tensor([num_rows], dtype=torch.int32), queries, lens))
        self._pinned[: len(plan)].copy_(plan)
        self._module.queue(partial(self._plans.view(torch.int32)[: len(plan)].copy_, self._pinned[: len(plan)]))

    def run(self, q: Tensor, paged_kv_cache: tuple[Tensor, Tensor], *, out: Tensor) -> Tensor:
        """Attention by the last plan, into `out`."""
        assert self._facts, "nothing was planned"
        keys, values = paged_kv_cache
        num_heads, num_kv_heads, head_dim, page_size, q_dtype, kv_dtype, scale, total = self._facts
        assert keys.shape[1:] == values.shape[1:] == (page_size, num_kv_heads, head_dim)
        assert keys.stride() == values.stride() and keys.stride(-1) == q.stride(-1) == 1
        assert q.shape == out.shape == (total, num_heads, head_dim), "as many queries as were planned"
        assert q.dtype == out.dtype == q_dtype and keys.dtype == values.dtype == kv_dtype and out.is_contiguous()
        self._module.queue(partial(self._launch, q, keys, values, self._plans, *self._device, scale, out))
        return out

    def _attend(
        self,
        q: Tensor,
        keys: Tensor,
        values: Tensor,
        plans: Tensor,
        indptr: Tensor,
        indices: Tensor,
        last_page_len: Tensor,
        scale: float,
        out: Tensor,
    ) -> Tensor:
        """Work of the device, which alone reads the content of tensors, whenever it is launched or replayed."""
        self._module.num_calls[self.kind] += 1
        plan = plans.view(torch.int32)
        num_rows = len(last_page_len)
        assert int(plan[0]) == num_rows, "the plan in memory is another pass's"
        starts = plan[1 : num_rows + 2].tolist()
        lens = plan[num_rows + 2 : 2 * num_rows + 2].tolist()
        firsts = indptr.tolist()
        for row, (start, end) in enumerate(pairwise(starts)):
            length = (firsts[row + 1] - firsts[row] - 1) * keys.shape[1] + int(last_page_len[row])
            assert length == lens[row], "the plan in memory is of other rows"
            pages = indices[firsts[row] : firsts[row + 1]]
            row_keys, row_values = (pages_of(cache, pages, length) for cache in (keys, values))
            out[start:end] = attend_row(q[start:end], row_keys, row_values, scale).to(out.dtype)
        return out


class DecodeWrapperDouble(_WrapperDouble):
    """BatchDecodeWithPagedKVCacheWrapper: one query a row."""

    kind = "decode"

    def plan(
        self,
        indptr: Tensor,
        indices: Tensor,
        last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        *,
        q_data_type: torch.dtype,
        kv_data_type: torch.dtype,
        sm_scale: float,
    ) -> None:
        """See FlashInfer's document of it."""
        queries = torch.arange(len(last_page_len) + 1, dtype=torch.int32)
        sizes = (num_qo_heads, num_kv_heads, head_dim, page_size)
        self._plan(queries, indptr, indices, last_page_len, sizes, (q_data_type, kv_data_type), sm_scale)


class PrefillWrapperDouble(_WrapperDouble):
    """BatchPrefillWithPagedKVCacheWrapper: any number of queries a row."""

    kind = "prefill"

    def plan(
        self,
        qo_indptr: Tensor,
        paged_kv_indptr: Tensor,
        paged_kv_indices: Tensor,
        paged_kv_last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        *,
        causal: bool = False,
        sm_scale: float,
        q_data_type: torch.dtype,
        kv_data_type: torch.dtype,
    ) -> None:
        """See FlashInfer's document of it."""
        assert causal
        sizes = (num_qo_heads, num_kv_heads, head_dim_qk, page_size)
        dtypes = (q_data_type, kv_data_type)
        self._plan(qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, sizes, dtypes, sm_scale)
