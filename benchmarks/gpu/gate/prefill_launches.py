"""Configurations of prefill attention for the compile gate, one per kind of shape."""

from collections.abc import Mapping

import torch

from benchmarks.gpu.gate.attention_shapes import argument_types, attention_shape, capabilities, in_words
from benchmarks.gpu.gate.launch_config import LaunchConfig
from kernels.attention import prefill_attention
from kernels.attention.prefill_config import prefill_config
from kernels.attention.prefill_plan import WORK_FIELDS
from kernels.attention.prefill_reference import PrefillPlan, PrefillRows, empty_partials
from kernels.attention.shape import AttentionShape

_INT_POINTERS = ("query_start_ptr", "context_lens_ptr", "table_ptr", "work_ptr", "num_arrived_ptr")


def prefill_launch(
    heads: tuple[int, int, int],
    dtype: torch.dtype = torch.bfloat16,
    kv_dtype: torch.dtype | None = None,
    *,
    window: int | None = None,
    soft_cap: bool = False,
    block_size: int = 16,
    max_loop_size: Mapping[int, int] | None = None,
) -> LaunchConfig:
    """Launch of prefill attention. heads: query heads, key-value heads, head dimension.

    max_loop_size: most instructions of a warp and a tile of keys, with masks, by compute capability
    """
    shape = attention_shape(heads, dtype, kv_dtype)
    plan = PrefillPlan(
        rows=PrefillRows(torch.zeros(2), torch.zeros(1), torch.zeros(1, 1)),
        shape=shape,
        config=prefill_config(shape),
        block_size=block_size,
        sliding_window=window,
        work=torch.zeros(1, WORK_FIELDS),
        partials=empty_partials(shape, prefill_config(shape), 1, torch.device("meta")),
    )
    window_name, cap_name = " window" if window else "", " cap" if soft_cap else ""
    arguments = _argument_types(shape)
    return LaunchConfig(
        name=f"prefill {in_words(shape)} blocks of {block_size}{window_name}{cap_name}",
        kernel=prefill_attention.prefill_kernel,
        arguments=arguments,
        constants=prefill_attention.launch_constants(plan, soft_cap, with_lse=False),
        divisible_by_16=tuple(name for name in arguments if name.startswith("stride_") and name != "stride_table"),
        num_warps=plan.config.num_warps,
        num_stages=plan.config.num_stages,
        capabilities=capabilities(shape),
        wgmma=dtype != torch.float32,
        # Of a tile of keys: with keys, and with values, which come in two halves if they are of e4m3.
        max_product_waits=None if dtype == torch.float32 else 3,
        max_loop_size=max_loop_size or {},
    )


def _argument_types(shape: AttentionShape) -> Mapping[str, str]:
    """Types of arguments, as the wrapper passes them. The stride of block tables has no known alignment, but is only
    read as a scalar.
    """
    types = {name: "i32" for name in prefill_attention.prefill_kernel.arg_names if name.startswith("stride_")}
    types |= dict.fromkeys(_INT_POINTERS, "*i32")
    types |= dict.fromkeys(("lse_ptr", "partial_out_ptr", "partial_lse_ptr"), "*fp32")
    return types | argument_types(shape) | {"window": "i32"}


_E4M3 = torch.float8_e4m3fn
PREFILLS = (
    prefill_launch((32, 8, 128)),
    prefill_launch((32, 8, 128), kv_dtype=_E4M3),
    prefill_launch((32, 8, 128), block_size=64),
    prefill_launch((32, 8, 128), window=4096),
    prefill_launch((32, 32, 128), torch.float16),
    prefill_launch((28, 4, 128)),
    prefill_launch((12, 12, 64)),
    prefill_launch((40, 8, 80)),
    prefill_launch((16, 8, 256), window=4096, soft_cap=True),
    prefill_launch((16, 8, 256), kv_dtype=_E4M3),
    prefill_launch((16, 8, 256), torch.float32),
)
