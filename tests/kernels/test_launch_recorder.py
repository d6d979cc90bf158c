"""A launch is recorded as Triton would compile it, and what was recorded compiles."""

import pytest
import torch
import triton
import triton.language as tl

from benchmarks.gpu.gate.compile_gate import compile_recorded, resource_faults
from kernels.launches.launch_recorder import RecordedLaunch, recorded_launches

pytestmark = pytest.mark.skipif(triton.knobs.runtime.interpret, reason="the interpreter compiles nothing")


@triton.jit(do_not_specialize=["num_rows"])  # type: ignore[untyped-decorator]
def _double(x_ptr: tl.tensor, out_ptr: tl.tensor, stride: tl.tensor, num_rows: tl.tensor, TILE: tl.constexpr) -> None:
    o_x = tl.arange(0, TILE)
    for i_row in range(num_rows):
        tl.store(out_ptr + i_row * TILE + o_x, tl.load(x_ptr + i_row * stride + o_x) * 2)


def launches(*calls: tuple[torch.Tensor, int, int]) -> list[RecordedLaunch]:
    """Record launches with tensors, strides and numbers of rows."""
    with recorded_launches() as recorder:
        for x, stride, num_rows in calls:
            out = torch.full((8,), 3, dtype=x.dtype)
            _double[(1,)](x, out, stride, num_rows, TILE=8, num_warps=1, enable_fp_fusion=True)
            assert (out == 3).all(), "the kernel ran"
    return list(recorder.launches.values())


def test_launches_that_share_machine_code_are_recorded_once() -> None:
    x = torch.zeros(64)
    (launch,) = launches((x, 16, 1), (x, 32, 2), (x[4:], 48, 17))
    assert launch.types == {"x_ptr": "*fp32", "out_ptr": "*fp32", "stride": "i32", "num_rows": "i32"}
    assert launch.options["num_warps"] == 1


def test_what_triton_compiles_anew_for_is_told_apart() -> None:
    x = torch.zeros(64)
    calls = [(x, 16, 1), (x[1:], 16, 1), (x, 3, 1), (x, 1, 1), (x.bfloat16(), 16, 1), (x, 1 << 40, 1)]
    found = launches(*calls)
    assert len(found) == len(calls)
    assert [launch.signature["stride"] for launch in found] == ["i32", "i32", "i32", "constexpr", "i32", "i64"]
    assert found[4].signature["x_ptr"] == "*bf16"


def test_what_was_recorded_compiles_for_devices_that_are_not_there() -> None:
    (launch,) = launches((torch.zeros(64, dtype=torch.bfloat16), 16, 1))
    for capability in (80, 90):
        code = compile_recorded(launch, capability)
        assert not resource_faults(capability, code)
        assert f".target sm_{capability}" in code.ptx
