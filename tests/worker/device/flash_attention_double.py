"""A double of the module `flash_attn_interface` of FlashAttention-3: the documented semantics in plain torch.

Written from its docstrings and checks. It takes the arguments that the real function takes, and refuses those features
of it that nothing here should use. What the real one leaves undefined is NaN.
"""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from tests.worker.device.paged_double import attend_row, pages_of


class FlashAttentionDouble:
    """The module. `num_calls` counts launches; `whole` wraps what is one launch for a recorder of graphs."""

    def __init__(self, whole: Callable[[Callable[..., Any]], Callable[..., Any]] = lambda launch: launch) -> None:
        self.num_calls = 0
        self._launch = whole(self._attend)

    def flash_attn_with_kvcache(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        k: None = None,
        v: None = None,
        qv: None = None,
        rotary_cos: None = None,
        rotary_sin: None = None,
        cache_seqlens: Tensor | None = None,
        cache_batch_idx: None = None,
        cache_leftpad: None = None,
        page_table: Tensor | None = None,
        cu_seqlens_q: Tensor | None = None,
        cu_seqlens_k_new: None = None,
        max_seqlen_q: int | None = None,
        rotary_seqlens: None = None,
        q_descale: None = None,
        k_descale: None = None,
        v_descale: None = None,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: tuple[int, int] = (-1, -1),
        attention_chunk: int = 0,
        softcap: float = 0.0,
        rotary_interleaved: bool = True,
        scheduler_metadata: None = None,
        num_splits: int = 0,
        pack_gqa: bool | None = None,
        sm_margin: int = 0,
        return_softmax_lse: bool = False,
    ) -> Tensor:
        """Attention over pages; results in memory of their own."""
        unused = (k, v, qv, rotary_cos, rotary_sin, cache_batch_idx, cache_leftpad, cu_seqlens_k_new, rotary_seqlens)
        assert all(each is None for each in (*unused, q_descale, k_descale, v_descale, scheduler_metadata))
        assert (window_size, attention_chunk, softcap, num_splits, sm_margin) == ((-1, -1), 0, 0.0, 0, 0)
        assert causal and not return_softmax_lse and softmax_scale is not None
        assert cache_seqlens is not None and page_table is not None
        if cu_seqlens_q is not None:
            assert max_seqlen_q is not None, "max_seqlen_q must be provided if cu_seqlens_q is provided"
        result: Tensor = self._launch(
            q, k_cache, v_cache, cache_seqlens, page_table, cu_seqlens_q, max_seqlen_q, softmax_scale
        )
        return result

    def _attend(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        cache_seqlens: Tensor,
        page_table: Tensor,
        cu_seqlens_q: Tensor | None,
        max_seqlen_q: int | None,
        scale: float,
    ) -> Tensor:
        """Work of the device, which alone reads the content of tensors, whenever it is launched or replayed."""
        self.num_calls += 1
        num_rows = len(page_table)
        assert q.dtype == k_cache.dtype == v_cache.dtype
        assert q.stride(-1) == k_cache.stride(-1) == v_cache.stride(-1) == page_table.stride(-1) == 1
        assert k_cache.shape == v_cache.shape and q.shape[-2] % k_cache.shape[-2] == 0
        assert cache_seqlens.dtype == page_table.dtype == torch.int32 and cache_seqlens.shape == (num_rows,)
        assert cache_seqlens.is_contiguous()
        flat, starts = q, list(range(num_rows + 1))
        if cu_seqlens_q is None:
            assert q.dim() == 4 and q.shape[:2] == (num_rows, 1)
            flat = q[:, 0]
        else:
            assert q.dim() == 3 and cu_seqlens_q.dtype == torch.int32 and cu_seqlens_q.is_contiguous()
            assert cu_seqlens_q.shape == (num_rows + 1,), "one sequence for each row of the page table"
            starts = cu_seqlens_q.tolist()
            assert starts[0] == 0 and starts[-1] <= len(q)
        out = torch.full(flat.shape, torch.nan, dtype=q.dtype)
        for row, (start, end) in enumerate(pairwise(starts)):
            assert start <= end and (max_seqlen_q is None or end - start <= max_seqlen_q)
            length = int(cache_seqlens[row])
            keys, values = (pages_of(cache, page_table[row], length) for cache in (k_cache, v_cache))
            out[start:end] = attend_row(flat[start:end], keys, values, scale).to(q.dtype)
        return out if cu_seqlens_q is not None else out[:, None]
