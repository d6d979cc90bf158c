"""Loops are found in machine code, and the compile gate stops those that are too long or read single bytes."""

from dataclasses import replace

from benchmarks.gpu.gate.compile_gate import compile_for, faults, loop_faults, wait_faults
from benchmarks.gpu.gate.prefill_launches import PREFILLS
from benchmarks.gpu.gate.sass import Instruction, Loop, disassemble, matrix_loops
from tests.kernels.test_compile_gate import MATMUL, SUM


def code(*lines: str) -> list[Instruction]:
    """Instructions 16 bytes apart, from names and operands."""
    parts = [line.partition(" ") for line in lines]
    return [Instruction(16 * place, name, operands) for place, (name, _, operands) in enumerate(parts)]


def test_only_innermost_loops_with_matrix_products_are_found() -> None:
    instructions = code(
        "MOV R0, R1",
        "FADD R2, R2, R3",  # 0x10: a loop without products
        "BRA 0x10",
        "LDS.U8 R4, [R5]",  # 0x30: an outer loop
        "HMMA.16816.F32 R8, R4, R6, R8",  # 0x40: the inner one
        "LDS R4, [R5]",
        "BRA 0x40",
        "BRA 0x30",
        "BRA 0x90",
        "EXIT ",
    )
    (loop,) = matrix_loops(instructions)
    assert [each.address for each in loop.instructions] == [0x40, 0x50, 0x60]
    assert loop.size == 3 and loop.counts["BRA"] == 1
    assert (loop.count("LDS"), loop.count("LDS.U8"), loop.count("HMMA")) == (1, 0, 1)


def test_a_compiled_product_has_a_loop_and_a_sum_has_none() -> None:
    for capability, name in ((80, "HMMA"), (90, "HGMMA")):
        (loop,) = matrix_loops(disassemble(compile_for(MATMUL, capability).cubin))
        assert loop.count(name) > 0 and loop.size > 10
        assert matrix_loops(disassemble(compile_for(SUM, capability).cubin)) == []


def test_products_one_instruction_after_the_other_are_stopped() -> None:
    product, wait = code("HGMMA.64x64x16.F32 R8, R4, R6, R8", "WARPGROUP.DEPBAR.LE gsb0, 0x0")
    assert wait_faults([Loop([product, product, wait])], 1) == []
    assert wait_faults([Loop([product, wait, product, wait])], 1) == ["2 waits for products in a tile"]


def test_prefill_waits_once_for_each_of_its_products() -> None:
    launch = PREFILLS[0]
    loops = matrix_loops(disassemble(compile_for(launch, 90).cubin))
    assert {loop.num_product_waits for loop in loops} <= {1, 2}
    assert faults(replace(launch, max_product_waits=0), 90, compile_for(launch, 90)) != []


def test_long_loops_and_reads_of_single_bytes_are_stopped() -> None:
    loop = Loop(code("LDS.U8 R1, [R2]", "LDS.U8 R3, [R2]", "HMMA.16816.F32 R8, R4, R6, R8"))
    assert loop_faults([loop], 2) == ["3 instructions a tile, more than 2", "2 reads of single bytes"]
    assert loop_faults([Loop(loop.instructions[2:])], 1) == []
    assert loop_faults([], 100) == ["no loop that multiplies matrices"]
