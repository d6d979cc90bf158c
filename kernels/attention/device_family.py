"""Families of GPUs by which attention is tuned: what a multiprocessor holds, found by compute capability.

A device of another capability gets the nearest family's limits, and its configurations unless it was measured itself.
Imports no Triton.
"""

from dataclasses import dataclass, replace

import torch

Capability = tuple[int, int]  # major and minor
RESERVED_BYTES = 1024  # of shared memory, for each program


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceFamily:
    """One family; registers, 65,536 for a multiprocessor, are the same in all."""

    capability: Capability
    nearest: Capability  # family with rows for usual shapes; the same but for a device that is measured by itself
    shared_bytes: int  # of a multiprocessor
    max_warps: int  # of a multiprocessor
    max_programs: int  # of a multiprocessor

    @property
    def name(self) -> str:
        """Name of its own rows in the table of tuned shapes."""
        return f"sm_{self.number}"

    @property
    def number(self) -> int:
        """Compute capability as compilers write it, 90."""
        return 10 * self.capability[0] + self.capability[1]

    @property
    def names(self) -> tuple[str, ...]:
        """Names of rows that it may take, the best first."""
        major, minor = self.nearest
        return tuple(dict.fromkeys((self.name, f"sm_{major}{minor}")))

    @property
    def program_bytes(self) -> int:
        """Shared memory that one program may use."""
        return self.shared_bytes - RESERVED_BYTES

    @property
    def has_asynchronous_products(self) -> bool:
        """True if matrix products of a warp group run beside its other instructions."""
        return self.nearest >= (9, 0)

    @property
    def has_e4m3(self) -> bool:
        """True if kernels can convert e4m3."""
        return self.capability >= (8, 9)

    def programs_with(self, shared_bytes: int) -> int:
        """Programs with so much shared memory each that a multiprocessor holds at once, at least 1."""
        return max(1, min(self.max_programs, self.shared_bytes // (shared_bytes + RESERVED_BYTES)))


AMPERE = DeviceFamily(capability=(8, 0), nearest=(8, 0), shared_bytes=164 * 1024, max_warps=64, max_programs=32)  # A100
ADA = DeviceFamily(capability=(8, 9), nearest=(8, 9), shared_bytes=100 * 1024, max_warps=48, max_programs=24)  # L4
HOPPER = DeviceFamily(capability=(9, 0), nearest=(9, 0), shared_bytes=228 * 1024, max_warps=64, max_programs=32)  # H100
FAMILIES = (AMPERE, ADA, HOPPER)
_WORKSTATION = (12, 0)  # Blackwell of workstations has as little shared memory as Ada


def family_of_capability(capability: Capability) -> DeviceFamily:
    """The family of a compute capability, or the nearest one under this capability's name."""
    if capability in ((8, 0), (8, 7)):
        nearest = AMPERE
    elif capability < (9, 0) or capability >= _WORKSTATION:
        nearest = ADA
    else:
        nearest = HOPPER
    return replace(nearest, capability=capability)


def family_of(device: torch.device) -> DeviceFamily:
    """The family of a CUDA device; without one, Hopper."""
    return family_of_capability(torch.cuda.get_device_capability(device)) if device.type == "cuda" else HOPPER
