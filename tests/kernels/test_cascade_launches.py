"""Assumptions about the prefix kernel's configurations, against the compiler's output."""

import pytest
import torch

from benchmarks.gpu.gate.cascade_launches import prefix_launch
from benchmarks.gpu.gate.compile_gate import compile_for
from kernels.attention.cascade_config import cascade_config
from kernels.attention.shape import AttentionShape

HOPPER_REGISTERS, HOPPER_SHARED_BYTES, RESERVED_BYTES = 65_536, 228 * 1024, 1024  # of a multiprocessor; per program


@pytest.mark.parametrize("kv_dtype", [torch.bfloat16, torch.float8_e4m3fn], ids=str)
def test_a_multiprocessor_holds_as_many_programs_as_plans_reckon_with(kv_dtype: torch.dtype) -> None:
    shape = AttentionShape(num_heads=32, num_kv_heads=8, head_dim=128, dtype=torch.bfloat16, kv_dtype=kv_dtype)
    config = cascade_config(shape).prefix
    code = compile_for(prefix_launch(shape), 90)
    assert config.programs_per_sm * (code.shared_bytes + RESERVED_BYTES) <= HOPPER_SHARED_BYTES
    assert config.programs_per_sm * code.registers * 32 * config.num_warps <= HOPPER_REGISTERS
    assert "wgmma.mma_async" in code.ptx
    assert code.local_bytes == 0
