"""`LaunchConfig`, one compilation of a kernel: argument types, constants, and requirements on the machine code.

Neither launches nor compiles, and imports no Triton.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchConfig:
    """One kernel as a wrapper launches it.

    `kernel` is the result of `@triton.jit`. `arguments` has the Triton type ("*bf16", "*fp32", "i32", "fp32") of each
    argument that is not constexpr, in any order; `constants` has the values of the others. All pointers are assumed to
    be 16-byte aligned, and integers only if named in `divisible_by_16`.
    """

    name: str  # unique, for people: kernel, dtype, shape
    kernel: Any
    arguments: Mapping[str, str]
    constants: Mapping[str, object] = field(default_factory=dict)
    divisible_by_16: tuple[str, ...] = ()
    num_warps: int = 4
    num_stages: int = 3
    capabilities: tuple[int, ...] = (80, 90)  # compute capabilities to compile for; e4m3 needs at least 89
    wgmma: bool = False  # must use Hopper's matrix units on 90
    wide_loads: bool = True  # must read global memory 16 bytes at a time, at least in one place
    float64: bool = True  # may compute in float64, which devices other than 80 and 90 do at a 64th of float32's rate
    max_product_waits: int | None = None  # on 90, in a round of a loop: for asynchronous products
    max_loop_size: Mapping[int, int] = field(default_factory=dict)  # by capability: instructions of a warp and a tile
