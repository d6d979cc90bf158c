"""The table of launch configurations is what its script makes of it, and is what attention is launched by."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import triton

from benchmarks.gpu.gate.attention_shapes import attention_shape
from benchmarks.gpu.gate.tuned_launches import TUNED, Tiling
from benchmarks.gpu.kernel_bench.candidates import (
    KERNELS,
    Compiled,
    TuningJob,
    compiled,
    fastest,
    first_sound,
    programs_at_once,
    programs_by_rule,
    shapes,
    tiling_by_rule,
    tilings,
)
from benchmarks.gpu.tune_kernels import TABLE, jobs_of, merged, rendered, row_from_gate
from kernels.attention.cascade_config import cascade_config
from kernels.attention.decode_config import decode_config, decode_rule
from kernels.attention.device_family import (
    ADA,
    AMPERE,
    FAMILIES,
    HOPPER,
    Capability,
    DeviceFamily,
    family_of_capability,
)
from kernels.attention.prefill_config import prefill_config, prefill_rule
from kernels.attention.shape import AttentionShape
from kernels.attention.tuned import ORIGINS, ROWS
from kernels.attention.tuned_lookup import AttentionKernel, TunedRow, tuned_row

ROOT = Path(__file__).resolve().parents[2]
TABLE_ROWS = [TunedRow(*row) for row in ROWS]
GQA = shapes()[0]
FAMILY_OF = {each.name: each for each in FAMILIES}


def shape(group: int, head_dim: int, dtype: torch.dtype = torch.bfloat16) -> AttentionShape:
    return AttentionShape(num_heads=group, num_kv_heads=1, head_dim=head_dim, dtype=dtype, kv_dtype=dtype)


PREFILL = TuningJob("prefill", GQA)


def job_of(row: TunedRow) -> TuningJob:
    return next(job for job in jobs_of(FAMILY_OF[row.family]) if job.kernel == row.kernel and key_of(job) == row[2:6])


def key_of(job: TuningJob) -> tuple[int, int, int, int]:
    own = job.shape
    return own.group, own.head_dim, 8 * own.dtype.itemsize, 8 * own.kv_dtype.itemsize


def as_compiled(job: TuningJob, tiling: Tiling) -> Compiled:
    return Compiled(tiling, programs_per_sm=2, registers=100, shared_bytes=1000)


def test_the_table_is_as_the_script_writes_it() -> None:
    assert TABLE.read_text() == rendered(TABLE_ROWS, ORIGINS)
    assert merged(TABLE_ROWS, []) == TABLE_ROWS
    for family, origin in ORIGINS.items():
        measured = [row for row in TABLE_ROWS if row.family == family and row.us is not None]
        assert bool(measured) == (origin["source"] == "measured")


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_every_kernel_and_shape_that_the_script_knows_has_a_row(family: DeviceFamily) -> None:
    rows = [tuned_row(job.kernel, job.shape, family) for job in jobs_of(family)]
    assert all(row is not None and row.family == family.name for row in rows)
    assert len(TUNED) == len(ROWS) == len({row[:6] for row in ROWS})


@pytest.mark.parametrize("kernel", KERNELS)
def test_rows_that_were_not_measured_are_the_rules_unless_the_gate_stops_that(kernel: AttentionKernel) -> None:
    for row in TABLE_ROWS:
        if row.kernel == kernel and row.us is None:
            by_rule = tiling_by_rule(job_of(row))
            assert Tiling(*row[6:10]) == by_rule or compiled(job_of(row), by_rule) is None, row


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
@pytest.mark.parametrize("kernel", KERNELS)
def test_the_script_would_make_the_same_row_from_the_gate_again(kernel: AttentionKernel, family: DeviceFamily) -> None:
    origin = ORIGINS[family.name]
    if origin["source"] == "measured" or origin["triton"] != triton.__version__:
        pytest.skip("measured, or another compiler than the table's")
    row = row_from_gate(TuningJob(kernel, GQA, family))
    assert row == tuned_row(kernel, GQA, family), "run benchmarks.gpu.tune_kernels --from-gate"


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_attention_is_launched_by_the_table_whatever_the_number_of_heads(family: DeviceFamily) -> None:
    row = tuned_row("decode", GQA, family)
    assert row is not None and row == tuned_row("decode", shape(4, 128, torch.float16), family)
    config = decode_config(GQA, family)
    assert (config.tile, config.num_warps, config.num_stages, config.programs_per_sm) == row[7:11]
    prefix, prefill = tuned_row("prefix", GQA, family), tuned_row("prefill", GQA, family)
    assert prefix is not None and prefill is not None
    cascade, prompts = cascade_config(GQA, family), prefill_config(GQA, family)
    assert (cascade.rows, cascade.prefix.tile) == prefix[6:8]
    assert cascade.suffix == config
    assert (prompts.rows, prompts.tile) == prefill[6:8]


@pytest.mark.parametrize(
    ("capability", "nearest"),
    [
        ((8, 0), AMPERE),
        ((8, 7), AMPERE),
        ((7, 5), ADA),
        ((8, 6), ADA),
        ((8, 9), ADA),
        ((12, 0), ADA),
        ((9, 0), HOPPER),
        ((10, 0), HOPPER),
        ((10, 3), HOPPER),
    ],
)
def test_a_device_that_was_not_measured_is_launched_as_the_nearest_family(
    capability: Capability, nearest: DeviceFamily
) -> None:
    """A multiprocessor of one with less shared memory could not hold what the others' rows take."""
    family = family_of_capability(capability)
    assert family.name == f"sm_{capability[0]}{capability[1]}"
    assert decode_config(GQA, family) == decode_config(GQA, nearest)
    assert prefill_config(GQA, family) == prefill_config(GQA, nearest)
    assert cascade_config(GQA, family) == cascade_config(GQA, nearest)


@pytest.mark.parametrize("capability", [(7, 5), (8, 0), (8, 6), (8, 7)])
def test_devices_that_lack_e4m3_get_no_rows_for_it(capability: Capability) -> None:
    family = family_of_capability(capability)
    assert not family.has_e4m3
    assert all(each.kv_dtype == each.dtype for each in shapes(family))
    assert ADA.has_e4m3 and HOPPER.has_e4m3 and family_of_capability((12, 0)).has_e4m3


def test_what_the_compiler_refuses_is_no_way() -> None:
    keys = attention_shape((32, 8, 128), kv_dtype=torch.float8_e4m3fn)
    job = TuningJob("decode", keys, family_of_capability((8, 6)))
    assert compiled(job, tiling_by_rule(job)) is None


def test_no_family_plans_with_more_programs_than_a_multiprocessor_holds() -> None:
    for row in TABLE_ROWS:
        family = family_of_capability(divmod(int(row.family.removeprefix("sm_")), 10))
        assert row.programs_per_sm <= programs_at_once(family, row.registers, row.shared_bytes, row.num_warps)
        assert row.shared_bytes <= family.program_bytes


@pytest.mark.parametrize("absent", [shape(4, 80), shape(3, 128), shape(4, 128, torch.float32)], ids=str)
def test_a_shape_without_a_row_is_launched_by_rule(absent: AttentionShape) -> None:
    assert tuned_row("decode", absent, HOPPER) is None
    assert decode_config(absent) == decode_rule(absent)
    assert prefill_config(absent) == prefill_rule(absent)
    assert decode_config(absent, ADA).programs_per_sm <= decode_rule(absent).programs_per_sm


@pytest.mark.parametrize("heads", [(40, 8, 80), (16, 8, 256)], ids=str)
@pytest.mark.parametrize("family", [AMPERE, ADA], ids=lambda family: family.name)
@pytest.mark.parametrize("kernel", KERNELS)
def test_the_rules_way_passes_the_gate_where_a_shape_has_no_row(
    kernel: AttentionKernel, family: DeviceFamily, heads: tuple[int, int, int]
) -> None:
    job = TuningJob(kernel, attention_shape(heads), family)
    assert tuned_row(kernel, job.shape, family) is None
    way = compiled(job, tiling_by_rule(job))
    assert way is not None and programs_by_rule(job) <= way.programs_per_sm


def test_the_rules_way_is_taken_first_and_the_one_most_like_it_where_the_gate_stops_that() -> None:
    first, second = tilings(PREFILL)[:2]
    assert first == tiling_by_rule(PREFILL)
    assert sum(a != b for a, b in zip(first, second, strict=True)) == 1
    assert first_sound(PREFILL, as_compiled).tiling == first
    assert first_sound(PREFILL, lambda job, way: None if way == first else as_compiled(job, way)).tiling == second


def test_the_fastest_way_is_found_field_by_field_among_those_that_are_right() -> None:
    wanted = Tiling(rows=64, tile=32, num_warps=4, num_stages=5)

    def trial(way: Compiled) -> float:
        wrong = way.tiling.num_stages == 3
        return float("inf") if wrong else 1.0 + sum(a != b for a, b in zip(way.tiling, wanted, strict=True))

    way, us = fastest(PREFILL, trial, as_compiled)
    assert (way.tiling, us) == (wanted, 1.0)
    with pytest.raises(AssertionError, match="computes what it should"):
        fastest(PREFILL, lambda way: float("inf"), as_compiled)


def test_as_many_programs_run_at_once_as_registers_shared_memory_and_warps_allow() -> None:
    assert programs_at_once(HOPPER, registers=168, shared_bytes=70_000, num_warps=4) == 3  # 3 x 168 x 128 of 65,536
    assert programs_at_once(HOPPER, registers=161, shared_bytes=1000, num_warps=4) == 3  # given out as 168
    assert programs_at_once(HOPPER, registers=64, shared_bytes=115_000, num_warps=4) == 2
    assert programs_at_once(HOPPER, registers=16, shared_bytes=0, num_warps=8) == 8  # 64 warps
    assert programs_at_once(HOPPER, registers=255, shared_bytes=1000, num_warps=16) == 1
    assert programs_at_once(AMPERE, registers=96, shared_bytes=72_192, num_warps=4) == 2
    assert programs_at_once(ADA, registers=96, shared_bytes=72_192, num_warps=4) == 1


@pytest.mark.long
def test_every_trial_runs_in_the_interpreter() -> None:
    command = [sys.executable, "-m", "benchmarks.gpu.tune_kernels", "--device", "cpu"]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert [line.split()[0] for line in done.stdout.splitlines()] == list(KERNELS)
