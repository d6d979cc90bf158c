"""The compile gate lets a sound kernel pass, and stops each kind of bad one."""

from dataclasses import replace
from typing import Any

import pytest
import triton
import triton.language as tl

from benchmarks.gpu.gate.compile_gate import CAPABILITIES, compile_for, faults, main
from benchmarks.gpu.gate.launch_config import LaunchConfig
from benchmarks.gpu.gate.product_launches import int4_launch
from kernels.products.int4_tiling import MOST_ROWS


@triton.jit  # type: ignore[untyped-decorator]
def _sum_rows(x_ptr: tl.tensor, out_ptr: tl.tensor, num_rows: tl.tensor, WIDTH: tl.constexpr) -> None:
    """Keeps a tile of two accumulators, as wide as it is told."""
    o_width = tl.arange(0, WIDTH)
    b_sum = tl.zeros((WIDTH,), tl.float32)
    b_max = tl.zeros((WIDTH,), tl.float32)
    for i_row in range(num_rows):
        b_x = tl.load(x_ptr + i_row * WIDTH + o_width).to(tl.float32)
        b_sum += b_x
        b_max = tl.maximum(b_max, b_x)
    tl.store(out_ptr + o_width, b_sum * b_max)


@triton.jit  # type: ignore[untyped-decorator]
def _double(x_ptr: tl.tensor, out_ptr: tl.tensor, WIDTH: tl.constexpr) -> None:
    o_width = tl.arange(0, WIDTH)
    tl.store(out_ptr + o_width, tl.exp(tl.load(x_ptr + o_width).to(tl.float64)).to(tl.float32))


@triton.jit  # type: ignore[untyped-decorator]
def _matmul(
    a_ptr: tl.tensor,
    b_ptr: tl.tensor,
    out_ptr: tl.tensor,
    num_tiles: tl.tensor,
    M: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
) -> None:
    o_m, o_n, o_k = tl.arange(0, M), tl.arange(0, N), tl.arange(0, K)
    b_sum = tl.zeros((M, N), tl.float32)
    for i_tile in range(num_tiles):
        p_a = a_ptr + i_tile * M * K + o_m[:, None] * K + o_k[None, :]
        p_b = b_ptr + i_tile * K * N + o_k[:, None] * N + o_n[None, :]
        b_sum = tl.dot(tl.load(p_a), tl.load(p_b), b_sum)
    tl.store(out_ptr + o_m[:, None] * N + o_n[None, :], b_sum)


SUM = LaunchConfig(
    name="sum",
    kernel=_sum_rows,
    arguments={"x_ptr": "*fp16", "out_ptr": "*fp32", "num_rows": "i32"},
    constants={"WIDTH": 1024},
)
MATMUL = LaunchConfig(
    name="matmul",
    kernel=_matmul,
    arguments={"a_ptr": "*fp16", "b_ptr": "*fp16", "out_ptr": "*fp32", "num_tiles": "i32"},
    constants={"M": 64, "N": 32, "K": 64},
    wgmma=True,
)


def found(launch: LaunchConfig, capability: int = 90) -> str:
    return "; ".join(faults(launch, capability, compile_for(launch, capability)))


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("launch", [SUM, MATMUL], ids=lambda launch: launch.name)
def test_a_sound_kernel_passes(launch: LaunchConfig, capability: int) -> None:
    assert found(launch, capability) == ""


def test_a_kernel_that_spills_is_stopped() -> None:
    spilling = replace(SUM, constants={"WIDTH": 8192}, num_warps=1)  # 2 x 256 accumulators a thread, 255 registers
    assert "spilled" in found(spilling, 90)
    assert "spilled" in found(spilling, 80)


def test_a_kernel_that_needs_too_much_shared_memory_is_stopped() -> None:
    # Each stage holds two tiles of 64 x 256 halves, 64 KiB.
    deep: dict[str, Any] = {"constants": {"M": 64, "N": 64, "K": 256}, "num_stages": 6}
    assert "over the limit of 232,448" in found(replace(MATMUL, **deep))


def test_a_tile_too_low_for_hoppers_matrix_units_is_stopped_on_hopper_alone() -> None:
    low = replace(MATMUL, constants={"M": 16, "N": 64, "K": 64})
    assert "no wgmma" in found(low, 90)
    assert found(low, 80) == ""
    assert found(replace(low, wgmma=False), 90) == ""


def test_loads_that_are_not_known_to_be_aligned_are_stopped() -> None:
    narrow = replace(SUM, constants={"WIDTH": 128})  # one element a thread
    assert "no 16-byte loads" in found(narrow)
    assert found(replace(narrow, wide_loads=False)) == ""


def test_float64_is_stopped_where_it_is_not_wanted() -> None:
    arguments, constants = {"x_ptr": "*fp32", "out_ptr": "*fp32"}, {"WIDTH": 1024}
    double = LaunchConfig(name="double", kernel=_double, arguments=arguments, constants=constants)
    assert found(double) == ""
    assert found(replace(double, float64=False)) == "computes in float64"
    assert found(replace(SUM, float64=False)) == ""


def test_one_bad_configuration_fails_the_gate(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([SUM, MATMUL]) == 0
    assert main([SUM, replace(SUM, name="narrow", constants={"WIDTH": 128})]) == 2  # on both devices
    report = capsys.readouterr().out.splitlines()
    assert [line.endswith("ok") for line in report if "narrow" in line] == [False, False]


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_products_with_4_bits_in_float32_pass_for_many_rows(capability: int) -> None:
    assert found(int4_launch("fp32", MOST_ROWS, has_bias=True, is_split=True), capability) == ""
