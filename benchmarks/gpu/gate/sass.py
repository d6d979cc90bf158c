"""Machine code in words: the instructions of a compiled kernel, and the loops in which it multiplies matrices.

`cuobjdump`, which comes with Triton, disassembles. Knows no kernel.
"""

import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import triton

_INSTRUCTION = re.compile(r"^\s*/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+\s+)?(\S+?)(?:\s+([^;]*))?\s*;", re.MULTILINE)
_TARGET = re.compile(r"0x([0-9a-f]+)\s*$|`\(\.L_x_\d+\)")
_MATRIX = ("HMMA", "HGMMA", "IMMA", "QGMMA")
_WAIT = "WARPGROUP.DEPBAR"


@dataclass(frozen=True, slots=True)
class Instruction:
    """One instruction of a warp."""

    address: int
    name: str  # with its modifiers: LDS.U8
    operands: str

    @property
    def operation(self) -> str:
        """Name without modifiers."""
        return self.name.partition(".")[0]

    def is_a(self, name: str) -> bool:
        """True if it has this name, or this and modifiers behind it."""
        return self.name == name or self.name.startswith(f"{name}.")

    @property
    def is_matrix_product(self) -> bool:
        return self.operation in _MATRIX


@dataclass(frozen=True, slots=True)
class Loop:
    """Instructions from the target of a backward branch to the branch."""

    instructions: Sequence[Instruction]

    @property
    def size(self) -> int:
        """Number of instructions that a warp executes in one round, if it takes no branch inside."""
        return len(self.instructions)

    @property
    def counts(self) -> Mapping[str, int]:
        """Number of instructions by name with modifiers."""
        return Counter(each.name for each in self.instructions)

    def count(self, name: str) -> int:
        """Number of instructions with this name, or with it and modifiers behind it."""
        return sum(each.is_a(name) for each in self.instructions)

    @property
    def num_product_waits(self) -> int:
        """Waits for asynchronous products. One for each instruction of a product means that the compiler has put them
        one after the other.
        """
        return self.count(_WAIT)


def disassemble(cubin: bytes) -> list[Instruction]:
    """Instructions of a cubin with one kernel, in order."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "-sass", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = _INSTRUCTION.finditer(text)
    return [Instruction(int(each[1], 16), each[2], each[3] or "") for each in found]


def matrix_loops(code: Sequence[Instruction]) -> list[Loop]:
    """Innermost loops that multiply matrices, in the order of the code."""
    spans = sorted((_target(each), each.address) for each in code if _is_backward(each))
    inner = [span for span in spans if not any(other != span and _is_within(other, span) for other in spans)]
    loops = [Loop([each for each in code if first <= each.address <= last]) for first, last in inner]
    return [loop for loop in loops if any(each.is_matrix_product for each in loop.instructions)]


def _is_backward(instruction: Instruction) -> bool:
    return instruction.operation == "BRA" and _target(instruction) < instruction.address


def _target(instruction: Instruction) -> int:
    match = _TARGET.search(instruction.operands)
    return int(match[1], 16) if match is not None and match[1] else instruction.address


def _is_within(inner: tuple[int, int], outer: tuple[int, int]) -> bool:
    return outer[0] <= inner[0] and inner[1] <= outer[1]
