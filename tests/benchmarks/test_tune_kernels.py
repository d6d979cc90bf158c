"""The table of launch configurations is what its script makes of it, and is what attention is launched by."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import triton

from benchmarks.gpu.gate.tuned_launches import TUNED, Tiling, shape_of
from benchmarks.gpu.kernel_bench.candidates import (
    KERNELS,
    Compiled,
    compiled,
    fastest,
    first_sound,
    programs_at_once,
    shapes,
    tiling_by_rule,
    tilings,
)
from benchmarks.gpu.tune_kernels import TABLE, merged, rendered, row_from_gate
from kernels.attention.cascade_config import cascade_config
from kernels.attention.decode_config import decode_config, decode_rule
from kernels.attention.prefill_config import prefill_config, prefill_rule
from kernels.attention.shape import AttentionShape
from kernels.attention.tuned import ORIGIN, ROWS
from kernels.attention.tuned_lookup import AttentionKernel, TunedRow, tuned_row

ROOT = Path(__file__).resolve().parents[2]
TABLE_ROWS = [TunedRow(*row) for row in ROWS]
GQA = shapes()[0]


def shape(group: int, head_dim: int, dtype: torch.dtype = torch.bfloat16) -> AttentionShape:
    return AttentionShape(num_heads=group, num_kv_heads=1, head_dim=head_dim, dtype=dtype, kv_dtype=dtype)


def as_compiled(kernel: AttentionKernel, shape: AttentionShape, tiling: Tiling) -> Compiled:
    return Compiled(tiling, programs_per_sm=2, registers=100, shared_bytes=1000)


def test_the_table_is_as_the_script_writes_it() -> None:
    assert TABLE.read_text() == rendered(TABLE_ROWS, ORIGIN)
    assert merged(TABLE_ROWS, []) == TABLE_ROWS
    measured = [row for row in TABLE_ROWS if row.us is not None]
    assert bool(measured) == (ORIGIN["source"] == "measured")


def test_every_kernel_and_shape_that_the_script_knows_has_a_row() -> None:
    assert all(tuned_row(kernel, shape) is not None for kernel in KERNELS for shape in shapes())
    assert len(TUNED) == len(ROWS) == len({row[:6] for row in ROWS})


@pytest.mark.parametrize("kernel", KERNELS)
def test_rows_that_were_not_measured_are_the_rules_unless_the_gate_stops_that(kernel: AttentionKernel) -> None:
    for row in TABLE_ROWS:
        if row.kernel == kernel and row.us is None:
            by_rule = tiling_by_rule(kernel, shape_of(row))
            assert Tiling(*row[6:10]) == by_rule or compiled(kernel, shape_of(row), by_rule) is None, row


@pytest.mark.skipif(ORIGIN["triton"] != triton.__version__, reason="another compiler than the table's")
@pytest.mark.skipif(ORIGIN["source"] == "measured", reason="a table that was measured")
@pytest.mark.parametrize("kernel", KERNELS)
def test_the_script_would_make_the_same_row_from_the_gate_again(kernel: AttentionKernel) -> None:
    assert row_from_gate((kernel, GQA)) == tuned_row(kernel, GQA), "run benchmarks.gpu.tune_kernels --from-gate"


def test_attention_is_launched_by_the_table_whatever_the_number_of_heads() -> None:
    row = tuned_row("decode", shape(4, 128))
    assert row is not None and row == tuned_row("decode", shape(4, 128, torch.float16)) == tuned_row("decode", GQA)
    config = decode_config(shape(4, 128))
    assert (config.tile, config.num_warps, config.num_stages, config.programs_per_sm) == row[7:11]
    prefix, prefill = tuned_row("prefix", GQA), tuned_row("prefill", GQA)
    assert prefix is not None and prefill is not None
    assert (cascade_config(GQA).rows, cascade_config(GQA).prefix.tile) == prefix[6:8]
    assert (prefill_config(GQA).rows, prefill_config(GQA).tile) == prefill[6:8]


@pytest.mark.parametrize("absent", [shape(4, 80), shape(3, 128), shape(4, 128, torch.float32)], ids=str)
def test_a_shape_without_a_row_is_launched_by_rule(absent: AttentionShape) -> None:
    assert tuned_row("decode", absent) is None
    assert decode_config(absent) == decode_rule(absent)
    assert prefill_config(absent) == prefill_rule(absent)
    assert tuned_row("decode", GQA, family="sm_80") is None


def test_the_rules_way_is_taken_first_and_the_one_most_like_it_where_the_gate_stops_that() -> None:
    first, second = tilings("prefill", GQA)[:2]
    assert first == tiling_by_rule("prefill", GQA)
    assert sum(a != b for a, b in zip(first, second, strict=True)) == 1
    assert first_sound("prefill", GQA, as_compiled).tiling == first
    assert first_sound("prefill", GQA, lambda k, s, t: None if t == first else as_compiled(k, s, t)).tiling == second


def test_the_fastest_way_is_found_field_by_field_among_those_that_are_right() -> None:
    wanted = Tiling(rows=64, tile=32, num_warps=4, num_stages=7)

    def trial(way: Compiled) -> float:
        wrong = way.tiling.num_stages == 3
        return float("inf") if wrong else 1.0 + sum(a != b for a, b in zip(way.tiling, wanted, strict=True))

    way, us = fastest("prefill", GQA, trial, as_compiled)
    assert (way.tiling, us) == (wanted, 1.0)
    with pytest.raises(AssertionError, match="computes what it should"):
        fastest("prefill", GQA, lambda way: float("inf"), as_compiled)


def test_as_many_programs_run_at_once_as_registers_shared_memory_and_warps_allow() -> None:
    assert programs_at_once(registers=168, shared_bytes=70_000, num_warps=4) == 3  # 3 x 168 x 128 of 65,536
    assert programs_at_once(registers=161, shared_bytes=1000, num_warps=4) == 3  # given out as 168
    assert programs_at_once(registers=64, shared_bytes=115_000, num_warps=4) == 2
    assert programs_at_once(registers=16, shared_bytes=0, num_warps=8) == 8  # 64 warps
    assert programs_at_once(registers=255, shared_bytes=1000, num_warps=16) == 1


def test_every_trial_runs_in_the_interpreter() -> None:
    command = [sys.executable, "-m", "benchmarks.gpu.tune_kernels", "--device", "cpu"]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert [line.split()[0] for line in done.stdout.splitlines()] == list(KERNELS)
