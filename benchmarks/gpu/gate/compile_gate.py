"""Compiles kernels without a GPU, and checks the machine code for known causes of slowness.

`python -m benchmarks.gpu.gate.compile_gate` does so for the whole launch table and fails on spilled registers, on
shared memory over the limit of the device, on a missing `wgmma`, on narrow loads, on float64 in sampling, on loops of
attention that have more instructions than the table says, and on prefill's loops that compute their products one
instruction after the other. Does not check results.
"""

import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import product
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from benchmarks.gpu.gate.launch_config import LaunchConfig
from benchmarks.gpu.gate.launch_table import LAUNCHES
from benchmarks.gpu.gate.sass import Loop, disassemble, matrix_loops
from kernels.attention.device_family import FAMILIES, family_of_capability
from kernels.launches.launch_compiler import compile_launch
from kernels.launches.launch_recorder import WARP_SIZE, RecordedLaunch

CAPABILITIES = tuple(each.number for each in FAMILIES)
_RESOURCES = re.compile(r"REG:(\d+) STACK:(\d+)")
_FLOAT64 = ".f64"
_WIDE_LOAD = re.compile(r"ld\.global\S*\.v4\.b32|ld\.global\S*\.v2\.b64|cp\.async\.cg|cp\.async\.bulk")


@dataclass(frozen=True, slots=True)
class MachineCode:
    """Machine code of one configuration for one compute capability."""

    registers: int  # per thread
    local_bytes: int  # per thread: what did not fit in registers
    shared_bytes: int  # per thread block
    ptx: str
    cubin: bytes


def compile_for(launch: LaunchConfig, capability: int) -> MachineCode:
    """Compile as a launch on a device of that capability would."""
    names = launch.kernel.arg_names
    signature = {name: launch.arguments.get(name, "constexpr") for name in names}
    aligned = [name for name, kind in signature.items() if kind.startswith("*") or name in launch.divisible_by_16]
    source = ASTSource(
        launch.kernel,
        signature,
        constexprs={(names.index(name),): value for name, value in launch.constants.items()},
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in aligned},
    )
    options = {"num_warps": launch.num_warps, "num_stages": launch.num_stages, "enable_fp_fusion": True}
    return _machine_code(triton.compile(source, target=GPUTarget("cuda", capability, WARP_SIZE), options=options))


def compile_recorded(launch: RecordedLaunch, capability: int) -> MachineCode:
    """Compile a recorded launch for a device of that capability."""
    return _machine_code(compile_launch(launch, capability))


def faults(launch: LaunchConfig, capability: int, code: MachineCode) -> list[str]:
    """Descriptions of the code's faults; empty if it passes."""
    found = resource_faults(capability, code)
    if launch.wgmma and capability == 90 and "wgmma.mma_async" not in code.ptx:
        found.append("no wgmma")
    if not launch.float64 and _FLOAT64 in code.ptx:
        found.append("computes in float64")
    if launch.wide_loads and not _WIDE_LOAD.search(code.ptx):
        found.append("no 16-byte loads from global memory")
    if capability in launch.max_loop_size:
        found += loop_faults(matrix_loops(disassemble(code.cubin)), launch.max_loop_size[capability])
    if launch.max_product_waits is not None and capability == 90:
        found += wait_faults(matrix_loops(disassemble(code.cubin)), launch.max_product_waits)
    return found


def wait_faults(loops: Sequence[Loop], max_waits: int) -> list[str]:
    """Descriptions of faults of loops of asynchronous products: one wait for each instruction of a product, which the
    compiler adds where it puts them one after the other.
    """
    waits = (loop.num_product_waits for loop in loops)
    return [f"{each} waits for products in a tile" for each in waits if each > max_waits]


def loop_faults(loops: Sequence[Loop], max_size: int) -> list[str]:
    """Descriptions of faults of the loops that multiply matrices: too many instructions, reads of single bytes."""
    found = [f"{loop.size} instructions a tile, more than {max_size}" for loop in loops if loop.size > max_size]
    found += [f"{loop.count('LDS.U8')} reads of single bytes" for loop in loops if loop.count("LDS.U8")]
    return found or ([] if loops else ["no loop that multiplies matrices"])


def resource_faults(capability: int, code: MachineCode) -> list[str]:
    """Descriptions of resources beyond the limits that hold for every launch."""
    found = []
    if code.local_bytes:
        found.append(f"{code.local_bytes} bytes per thread spilled to local memory")
    limit = family_of_capability(divmod(capability, 10)).program_bytes
    if code.shared_bytes > limit:
        found.append(f"{code.shared_bytes:,} bytes of shared memory, over the limit of {limit:,}")
    return found


def _machine_code(compiled: Any) -> MachineCode:
    """Machine code of Triton's compiled kernel."""
    registers, local_bytes = _resources(compiled.asm["cubin"])
    return MachineCode(registers, local_bytes, compiled.metadata.shared, compiled.asm["ptx"], compiled.asm["cubin"])


def _resources(cubin: bytes) -> tuple[int, int]:
    """Registers and bytes of local memory per thread."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
        usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    match = _RESOURCES.search(usage)
    assert match is not None, f"cuobjdump said nothing of resources: {usage!r}"
    return int(match[1]), int(match[2])


def main(launches: Sequence[LaunchConfig]) -> int:
    """Report every configuration on standard output; returns the number of those with a fault."""
    start = time.monotonic()
    jobs = [(launch, c) for launch, c in product(launches, CAPABILITIES) if c in launch.capabilities]
    with ThreadPoolExecutor(os.cpu_count()) as pool:  # the compiler releases the interpreter's lock
        codes = list(pool.map(lambda job: compile_for(*job), jobs))
    num_faulty = 0
    for (launch, capability), code in zip(jobs, codes, strict=True):
        found = faults(launch, capability, code)
        num_faulty += bool(found)
        line = f"sm_{capability} {launch.name:44} {code.registers:4} regs {code.shared_bytes:8,} B shared"
        sys.stdout.write(f"{line}  {'; '.join(found) or 'ok'}\n")
    seconds = time.monotonic() - start
    sys.stdout.write(f"{len(jobs)} configurations, {num_faulty} at fault, in {seconds:.1f} s\n")
    return num_faulty


if __name__ == "__main__":
    sys.exit(min(1, main(LAUNCHES)))
