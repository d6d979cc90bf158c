"""Assumptions about decode attention's configurations, against the compiler's output."""

import pytest
import torch

from benchmarks.gpu.gate.compile_gate import compile_for
from benchmarks.gpu.gate.decode_launches import decode_launch
from kernels.attention.decode_config import DecodeConfig, decode_config
from kernels.attention.shape import AttentionShape

HOPPER_REGISTERS, HOPPER_SHARED_BYTES, RESERVED_BYTES = 65_536, 228 * 1024, 1024  # of a multiprocessor; per program
E4M3 = torch.float8_e4m3fn


def config_of(heads: tuple[int, int, int], kv_dtype: torch.dtype = torch.bfloat16) -> DecodeConfig:
    num_heads, num_kv_heads, head_dim = heads
    shape = AttentionShape(
        num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, dtype=torch.bfloat16, kv_dtype=kv_dtype
    )
    return decode_config(shape)


@pytest.mark.parametrize("kv_dtype", [torch.bfloat16, E4M3], ids=str)
@pytest.mark.parametrize("heads", [(32, 8, 128), (32, 1, 128), (64, 1, 128)])
def test_a_multiprocessor_holds_as_many_programs_as_plans_reckon_with(
    heads: tuple[int, int, int], kv_dtype: torch.dtype
) -> None:
    config = config_of(heads, kv_dtype)
    code = compile_for(decode_launch(heads, kv_dtype=kv_dtype), 90)
    assert config.programs_per_sm * (code.shared_bytes + RESERVED_BYTES) <= HOPPER_SHARED_BYTES
    assert config.programs_per_sm * code.registers * 32 * config.num_warps <= HOPPER_REGISTERS
    assert code.local_bytes == 0


def test_the_next_tile_is_copied_while_one_is_worked_on() -> None:
    tile_bytes = 2 * 32 * 128 * 2  # keys and values
    assert config_of((32, 8, 128)).tile == 32
    assert compile_for(decode_launch((32, 8, 128)), 90).shared_bytes >= 3 * tile_bytes


def test_shapes_that_are_not_served_are_refused() -> None:
    with pytest.raises(AssertionError, match="equally many heads"):
        AttentionShape(num_heads=5, num_kv_heads=2, head_dim=64, dtype=torch.float16, kv_dtype=torch.float16)
    with pytest.raises(AssertionError, match="no keys of"):
        AttentionShape(num_heads=4, num_kv_heads=2, head_dim=64, dtype=torch.float16, kv_dtype=torch.bfloat16)
