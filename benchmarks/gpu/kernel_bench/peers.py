"""Other attention kernels, on the same inputs: torch's own, `transformers`' paged path, FlashInfer, FlashAttention-3.

Each says why it cannot run where it cannot. None of them is needed to install or test this project.
"""

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.gpu.kernel_bench.clock import Clock
from benchmarks.gpu.kernel_bench.figures import Check
from benchmarks.gpu.kernel_bench.lab import PagedInputs

Attend = Callable[[], Tensor]  # one launch; its result [T, num_heads, head_dim]
_WORKSPACE_BYTES = 512 << 20


class NotAvailable(Exception):
    """Reason why a peer cannot run here."""


class Peer(Protocol):
    """Causal attention of the inputs' first layer."""

    name: str

    def attend(self, inputs: PagedInputs) -> Attend:
        """Prepares a launch. Raises NotAvailable."""


class TorchSdpa:
    """Torch's SDPA over contiguous keys and values: one block a row, all rows alike."""

    name = "torch SDPA, contiguous"

    def attend(self, inputs: PagedInputs) -> Attend:
        num_rows, num_queries = len(inputs.contexts), inputs.query_lens[0]
        if len(set(inputs.contexts)) > 1 or len(set(inputs.query_lens)) > 1 or inputs.block_size < inputs.contexts[0]:
            raise NotAvailable("rows differ in length, or are not contiguous")
        if num_queries not in (1, inputs.contexts[0]):
            raise NotAvailable("SDPA's causal mask assumes queries from the first key on")
        num_heads, head_dim = inputs.query.shape[1:]
        key = inputs.key_cache()[:, : inputs.contexts[0]].transpose(1, 2)
        value = inputs.value_cache()[:, : inputs.contexts[0]].transpose(1, 2)
        if num_queries == 1:  # heads that share keys are the queries of one product
            query = inputs.query.view(num_rows, key.shape[1], -1, head_dim)
            return lambda: scaled_dot_product_attention(query, key, value).view(-1, num_heads, head_dim)
        query = inputs.query.view(num_rows, num_queries, num_heads, head_dim).transpose(1, 2)
        return lambda: (
            scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
            .transpose(1, 2)
            .reshape(-1, num_heads, head_dim)
        )


class TransformersPaged:
    """Attention of `transformers`' continuous batching: all rows' keys gathered by index, then SDPA under one mask."""

    name = "transformers, paged"

    def attend(self, inputs: PagedInputs) -> Attend:
        sdpa = _imported("transformers.modeling_utils").ALL_ATTENTION_FUNCTIONS["sdpa"]
        device, block_size = inputs.query.device, inputs.block_size
        keys, values = (cache.flatten(0, 1).contiguous() for cache in (inputs.key_cache(), inputs.value_cache()))
        indices, seen, first_key = [], [], 0
        num_keys = sum(inputs.contexts)
        columns = torch.arange(num_keys, device=device)
        for row, (queries, context) in enumerate(zip(inputs.query_lens, inputs.contexts, strict=True)):
            position = torch.arange(context, device=device)
            indices.append(inputs.block_tables[row].long()[position // block_size] * block_size + position % block_size)
            last = first_key + context - queries + torch.arange(queries, device=device)[:, None]
            seen.append((columns >= first_key) & (columns <= last))
            first_key += context
        read_index, mask = torch.cat(indices), torch.cat(seen)[None, None]
        module = _Layer(inputs.shape.group)
        query = inputs.query.transpose(0, 1)[None]

        def attend() -> Tensor:
            key, value = (cache.index_select(0, read_index).transpose(0, 1)[None] for cache in (keys, values))
            out, _ = sdpa(module, query, key, value, mask, scaling=inputs.rule.scale)
            return out[0]  # type: ignore[no-any-return]

        return attend


class _Layer(torch.nn.Module):
    """Attributes of a layer that `transformers`' attention functions read."""

    is_causal = False

    def __init__(self, num_key_value_groups: int) -> None:
        super().__init__()
        self.num_key_value_groups = num_key_value_groups
        self.eval()


class FlashInfer:
    """Paged wrappers of FlashInfer, planned once; FlashInfer compiles them on first use."""

    name = "FlashInfer"

    def attend(self, inputs: PagedInputs) -> Attend:
        flashinfer = _imported("flashinfer")
        counts = [-(-context // inputs.block_size) for context in inputs.contexts]
        indptr = torch.tensor([0, *counts], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        blocks = torch.cat([row[:count] for row, count in zip(inputs.block_tables.cpu(), counts, strict=True)])
        last = [context - (n - 1) * inputs.block_size for context, n in zip(inputs.contexts, counts, strict=True)]
        last_lens = torch.tensor(last, dtype=torch.int32)
        shape, device = inputs.shape, inputs.query.device
        workspace = torch.empty(_WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        heads = (shape.num_heads, shape.num_kv_heads, shape.head_dim, inputs.block_size)
        dtypes = {"q_data_type": shape.dtype, "kv_data_type": shape.kv_dtype}
        table = (indptr.to(device), blocks.to(device), last_lens.to(device))
        if max(inputs.query_lens) == 1:
            wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=shape.group > 1)
            wrapper.plan(*table, *heads, **dtypes)
        else:
            wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD")
            wrapper.plan(inputs.query_start, *table, *heads, causal=True, **dtypes)
        cache = inputs.pool[:, 0]  # [num_blocks, 2, block_size, num_kv_heads, head_dim]
        out = torch.empty_like(inputs.query)

        def attend() -> Tensor:
            wrapper.run(inputs.query, cache, out=out)
            return out

        return attend


class FlashAttention3:
    """The operator of vLLM's wheel, from a file that the caller names."""

    name = "FlashAttention-3"

    def __init__(self, library: Path | None) -> None:
        self._library = library

    def attend(self, inputs: PagedInputs) -> Attend:
        if self._library is None:
            raise NotAvailable("no --fa3-library given")
        try:
            torch.ops.load_library(str(self._library))
        except (OSError, ImportError) as error:
            raise NotAvailable(f"its library does not load: {error}") from error
        forward = torch.ops._vllm_fa3_C.fwd
        out = torch.empty_like(inputs.query)
        known: dict[str, Any] = {
            "q": inputs.query,
            "k": inputs.key_cache(),
            "v": inputs.value_cache(),
            "out": out,
            "cu_seqlens_q": inputs.query_start,
            "seqused_k": inputs.context_lens,
            "max_seqlen_q": max(inputs.query_lens),
            "max_seqlen_k": max(inputs.contexts),
            "page_table": inputs.block_tables,
            "softmax_scale": inputs.rule.scale,
            "is_causal": True,
            "window_size_left": -1,
            "window_size_right": -1,
            "softcap": 0.0,
            "is_rotary_interleaved": True,
            "num_splits": 0,  # chosen by it
            "sm_margin": 0,
            "cp_world_size": 1,
            "cp_rank": 0,
        }
        # Its versions differ in order and number; what is not named here is optional in those that are known.
        arguments = [known.get(argument.name) for argument in forward.default._schema.arguments]

        def attend() -> Tensor:
            forward(*arguments)
            return out

        return attend


class Peers(NamedTuple):
    """Peers of the attention kernels; `sdpa` reads contiguous keys and values, the others blocks."""

    flash_attention: Peer
    flashinfer: Peer
    transformers: Peer
    sdpa: Peer


class Timed(NamedTuple):
    """One peer's launch."""

    us: float
    check: Check


def all_peers(fa3_library: Path | None) -> Peers:
    return Peers(FlashAttention3(fa3_library), FlashInfer(), TransformersPaged(), TorchSdpa())


def timed(peer: Peer, inputs: PagedInputs, clock: Clock, check: Callable[[Tensor], Check]) -> Timed | str:
    """Time a peer and check its result; a reason if it cannot run."""
    try:
        launch = peer.attend(inputs)
        us = clock.launch_us([launch])
        return Timed(us, check(launch()))
    except NotAvailable as error:
        return f"not available here: {error}"
    except Exception as error:  # another project's code: whatever it raises ends its row, not the run
        return f"failed here: {type(error).__name__}: {error}"[:300]


def _imported(module: str) -> Any:
    """Import by name, since the package may be absent, or fail to load beside this torch."""
    try:
        return importlib.import_module(module)
    except Exception as error:  # whatever it raises, it is not available
        raise NotAvailable(f"cannot import {module}: {error}") from error
