"""Configurations of shared-prefix attention and its planning for the compile gate."""

from collections.abc import Mapping
from typing import Any

import torch

from benchmarks.gpu.gate.attention_shapes import argument_types, attention_shape, capabilities, in_words
from benchmarks.gpu.gate.launch_config import LaunchConfig
from kernels.attention import cascade_attention, cascade_plan, decode_attention, decode_plan
from kernels.attention.cascade_config import cascade_config
from kernels.attention.cascade_groups import GROUP_FIELDS
from kernels.attention.cascade_reference import CascadePlan, PrefixGroups, empty_cascade_plan
from kernels.attention.decode_config import DecodeConfig
from kernels.attention.decode_reference import DecodeRows
from kernels.attention.shape import AttentionShape

_HOPPER_PROCESSORS = 132


def _plan(shape: AttentionShape) -> CascadePlan:
    """A plan for one row and blocks of 16 tokens."""
    entry = torch.zeros(1, dtype=torch.int32)
    groups = PrefixGroups(entry.expand(1, GROUP_FIELDS), entry, entry)
    rows = DecodeRows(entry, entry.expand(1, 1))
    return empty_cascade_plan(rows, groups, shape, cascade_config(shape), 16, _HOPPER_PROCESSORS)


def prefix_launch(shape: AttentionShape, *, soft_cap: bool = False) -> LaunchConfig:
    """The kernel that attends prefixes."""
    plan = _plan(shape)
    constants = cascade_attention.launch_constants(plan, soft_cap)
    return _launch("prefix", shape, cascade_attention.prefix_kernel, constants, plan.config.prefix, wgmma=True)


def _suffix_launch(shape: AttentionShape) -> LaunchConfig:
    """Decode attention that merges results of prefixes."""
    plan = _plan(shape)
    constants = decode_attention.launch_constants(plan.suffixes, soft_cap=False, with_lse=False)
    return _launch("decode suffix", shape, decode_attention.decode_kernel, constants, plan.config.suffix, wgmma=False)


def _launch(
    name: str,
    shape: AttentionShape,
    kernel: Any,
    constants: Mapping[str, object],
    config: DecodeConfig,
    *,
    wgmma: bool,
) -> LaunchConfig:
    types = _argument_types(shape, [name for name in kernel.arg_names if name not in constants])
    return LaunchConfig(
        name=f"{name} {in_words(shape)}",
        kernel=kernel,
        arguments=types,
        constants=constants,
        divisible_by_16=tuple(name for name in types if name.startswith("stride_")),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        capabilities=capabilities(shape),
        wgmma=wgmma and shape.dtype != torch.float32,
    )


def _argument_types(shape: AttentionShape, names: list[str]) -> Mapping[str, str]:
    """Types of arguments, as the wrappers pass them."""
    known = argument_types(shape) | dict.fromkeys(("lse_ptr", "partial_out_ptr", "partial_lse_ptr"), "*fp32")
    return {name: known.get(name, "*i32" if name.endswith("_ptr") else "i32") for name in names}


def _prefix_plan_launch(padded_groups: int) -> LaunchConfig:
    constants = cascade_plan.plan_constants(_plan(attention_shape((32, 8, 128))), padded_groups)
    names = [name for name in cascade_plan.prefix_plan_kernel.arg_names if name not in constants]
    return LaunchConfig(
        name=f"plan cascade of {padded_groups} groups",
        kernel=cascade_plan.prefix_plan_kernel,
        arguments={name: "*i32" if name.endswith("_ptr") else "i32" for name in names},
        constants=constants,
        num_warps=decode_plan.plan_warps(padded_groups),
        wide_loads=False,
    )


CASCADES = (
    prefix_launch(attention_shape((32, 8, 128))),
    prefix_launch(attention_shape((32, 8, 128), kv_dtype=torch.float8_e4m3fn)),
    prefix_launch(attention_shape((32, 32, 128), torch.float16)),
    prefix_launch(attention_shape((32, 8, 128), torch.float16)),
    prefix_launch(attention_shape((128, 1, 128))),
    prefix_launch(attention_shape((12, 12, 64))),
    prefix_launch(attention_shape((40, 8, 80))),
    prefix_launch(attention_shape((16, 8, 256)), soft_cap=True),
    prefix_launch(attention_shape((16, 8, 256), kv_dtype=torch.float8_e4m3fn)),
    prefix_launch(attention_shape((32, 8, 128), torch.float32)),
    prefix_launch(attention_shape((16, 8, 256), torch.float32)),
    _suffix_launch(attention_shape((32, 8, 128))),
    _suffix_launch(attention_shape((32, 32, 128), torch.float16)),
    _suffix_launch(attention_shape((40, 8, 80))),
    _prefix_plan_launch(128),
)
