"""FlashAttention-3 as a library: `flash_attn_with_kvcache`, which reads our block tables and lengths as they are.

Nothing is planned on the host, so a captured pass needs no preparation. Its results come in memory of their own, from
which the rows of a pass are taken over.
"""

from typing import Any

import torch
from torch import Tensor

from kernels.attention.decode_reference import DecodeRows
from kernels.attention.prefill_reference import PrefillRows
from kernels.attention.shape import AttentionShape, ScoreRule
from worker_svc.gpu.libraries.block_lists import SentBlockLists
from worker_svc.gpu.libraries.library import LibraryPass, LibrarySetup, why_not_attention

_CAPABILITY = (9, 0)  # the matrix units that it is written for
_MOST_HEAD_DIM, _HEAD_DIM_STEP = 256, 8


class FlashAttention:
    """FlashAttention-3, by its module `flash_attn_interface`."""

    name = "flash-attn"

    def __init__(self, module: Any, version: str) -> None:
        self.version = version
        self._module = module

    def why_not(self, shape: AttentionShape, rule: ScoreRule, capability: tuple[int, int]) -> str | None:
        """See AttentionLibrary.why_not."""
        if capability != _CAPABILITY:
            return f"it is for compute capability 9.0, and the device has {'.'.join(map(str, capability))}"
        head_dim = shape.head_dim
        if head_dim > _MOST_HEAD_DIM or head_dim % _HEAD_DIM_STEP:
            return f"heads have {head_dim} elements, and it takes multiples of {_HEAD_DIM_STEP} up to {_MOST_HEAD_DIM}"
        return why_not_attention(shape, rule)

    def why_not_mixed(self, capability: tuple[int, int]) -> str | None:
        """See AttentionLibrary.why_not_mixed."""
        return None

    def passes(self, setup: LibrarySetup) -> "FlashAttentionPasses":
        """See AttentionLibrary.passes."""
        return FlashAttentionPasses(self._module.flash_attn_with_kvcache, setup)


class FlashAttentionPasses:
    """Passes of a runner by FlashAttention-3."""

    needs_block_lists = False

    def __init__(self, with_kvcache: Any, setup: LibrarySetup) -> None:
        self._with_kvcache = with_kvcache
        self._scale = setup.rule.scale

    def decode(self, rows: DecodeRows) -> LibraryPass:
        """See LibraryPasses.decode."""
        return _DecodePass(self._with_kvcache, self._scale, rows)

    def mixed(self, rows: PrefillRows, num_tokens: int, *, is_padded: bool) -> LibraryPass:
        """See LibraryPasses.mixed."""
        return _MixedPass(self._with_kvcache, self._scale, rows, num_tokens)

    def prepare_mixed(self, num_tokens: int, num_rows: int) -> None:
        """Do nothing: its passes own no memory."""

    def plan_decode(self, sent: SentBlockLists) -> None:
        """Do nothing: it plans on the device."""

    def plan_mixed(self, sent: SentBlockLists, num_tokens: int, *, is_padded: bool) -> None:
        """Do nothing: it plans on the device."""


class _DecodePass:
    """One query a row, as sequences of one token. A row without keys gives zeros."""

    def __init__(self, with_kvcache: Any, scale: float, rows: DecodeRows) -> None:
        self._with_kvcache, self._scale, self._rows = with_kvcache, scale, rows

    def attend(self, query: Tensor, key_cache: Tensor, value_cache: Tensor, out: Tensor) -> None:
        """See LibraryPass.attend."""
        result: Tensor = self._with_kvcache(
            query[:, None],
            key_cache,
            value_cache,
            cache_seqlens=self._rows.context_lens,
            page_table=self._rows.block_tables,
            softmax_scale=self._scale,
            causal=True,
        )
        out.copy_(result[:, 0])


class _MixedPass:
    """Rows of any number of queries, one behind the other; what it returns behind the last of them is undefined."""

    def __init__(self, with_kvcache: Any, scale: float, rows: PrefillRows, num_tokens: int) -> None:
        self._with_kvcache, self._scale, self._rows = with_kvcache, scale, rows
        tokens = torch.arange(num_tokens, device=rows.query_start.device)
        self._is_token = (tokens < rows.query_start[-1:])[:, None, None]

    def attend(self, query: Tensor, key_cache: Tensor, value_cache: Tensor, out: Tensor) -> None:
        """See LibraryPass.attend."""
        result: Tensor = self._with_kvcache(
            query,
            key_cache,
            value_cache,
            cache_seqlens=self._rows.context_lens,
            page_table=self._rows.block_tables,
            cu_seqlens_q=self._rows.query_start,
            max_seqlen_q=len(query),
            softmax_scale=self._scale,
            causal=True,
        )
        torch.where(self._is_token, result, out, out=out)
