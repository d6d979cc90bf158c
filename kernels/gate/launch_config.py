"""What one compilation of a kernel is: its argument types, its constants, and what the machine code must show.

It says nothing of how a kernel is launched or compiled, and it imports no Triton.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchConfig:
    """One kernel as a wrapper launches it.

    `kernel` is what `@triton.jit` returns. `arguments` gives each argument that is not constexpr its Triton type
    ("*bf16", "*fp32", "i32", "fp32"), in any order; `constants` gives the others their values. All pointers are
    taken to be 16-byte aligned; integers are so only if named in `divisible_by_16`.
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
