"""Ceilings of the device, measured in the same run: reading, copying, a product of matrices in bfloat16.

Shares in the table are of these, not of a data sheet.
"""

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

from benchmarks.gpu.kernel_bench.figures import Check, Figure
from benchmarks.gpu.kernel_bench.lab import Lab

READ, COPY, PRODUCT = "read bandwidth", "copy bandwidth", "product of matrices"
READ_BYTES = 1 << 32
COPY_BYTES = 1 << 31
PRODUCT_SIZE = 8192
# Elements of 4 bytes a program reads at once, warps, and programs for each multiprocessor.
READ_SHAPES = ((4096, 4, 8), (8192, 8, 4), (8192, 8, 8), (16384, 8, 4), (16384, 16, 2))
TINY_SHAPES = ((64, 4, 2),)


@triton.jit  # type: ignore[untyped-decorator]
def sum_kernel(
    x_ptr: tl.tensor,  # [num_tiles * num_programs * TILE] float32
    out_ptr: tl.tensor,  # [num_programs] float32
    num_tiles: tl.tensor,  # of each program
    TILE: tl.constexpr,
) -> None:
    """Each program adds up every num_programs-th tile: as little as can be done with what is read."""
    i_program = tl.program_id(0).to(tl.int64)
    p_x = x_ptr + i_program * TILE + tl.arange(0, TILE)
    b_sum = tl.zeros((TILE,), tl.float32)
    for _ in range(num_tiles):
        b_sum += tl.load(p_x)
        p_x += tl.num_programs(0) * TILE
    tl.store(out_ptr + i_program, tl.sum(b_sum))


def measure(lab: Lab) -> list[Figure]:
    """Measure all three ceilings, once a run."""
    return [_read(lab), _copy(lab), _product(lab)]


def _read(lab: Lab) -> Figure:
    size = 1 << 10 if lab.is_tiny else READ_BYTES // 4
    x = torch.ones(size, device=lab.device)
    best: tuple[float, str, Check] | None = None
    for tile, warps, per_sm in TINY_SHAPES if lab.is_tiny else READ_SHAPES:
        launch, out, num_read = _reader(x, tile, warps, lab.num_processors * per_sm)
        us = lab.clock.launch_us([launch])
        check = Check(abs(out.double().sum().item() - num_read), 0.0)
        rate = num_read * 4 / us / 1e3
        if best is None or rate > best[0]:
            best = (rate, f"{tile} elements, {warps} warps, {per_sm} programs a multiprocessor", check)
    assert best is not None
    return Figure(
        section="ceilings", case=READ, by="Triton sum", unit="GB/s", value=best[0], check=best[2], note=best[1]
    )


def _reader(x: Tensor, tile: int, warps: int, num_programs: int) -> tuple[Callable[[], object], Tensor, int]:
    """Launch of the kernel, its output, and the number of elements that it reads: all but an incomplete last round."""
    out = torch.empty(num_programs, device=x.device)
    num_tiles = x.numel() // (num_programs * tile)
    return (
        lambda: sum_kernel[(num_programs,)](x, out, num_tiles, TILE=tile, num_warps=warps, enable_fp_fusion=True),
        out,
        num_tiles * num_programs * tile,
    )


def _copy(lab: Lab) -> Figure:
    size = 1 << 10 if lab.is_tiny else COPY_BYTES
    source = torch.zeros(size, dtype=torch.uint8, device=lab.device)
    destination = torch.empty_like(source)
    us = lab.clock.launch_us([lambda: destination.copy_(source)])
    return Figure(
        section="ceilings", case=COPY, by="torch", unit="GB/s", value=2 * size / us / 1e3, us=us, note="read and write"
    )


def _product(lab: Lab) -> Figure:
    size = 32 if lab.is_tiny else PRODUCT_SIZE
    a, b = lab.random(size, size), lab.random(size, size)
    out = torch.empty_like(a)
    us = lab.clock.launch_us([lambda: torch.matmul(a, b, out=out)])
    note = f"{size} x {size} x {size}, {lab.dtype}"
    return Figure(
        section="ceilings", case=PRODUCT, by="torch", unit="TFLOP/s", value=2 * size**3 / us / 1e6, us=us, note=note
    )
