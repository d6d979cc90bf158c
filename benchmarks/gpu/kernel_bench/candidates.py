"""Ways to launch attention kernels that are worth a trial, and what the compiler makes of them for a family of devices.

A way that the compiler refuses, that spills, takes too much shared memory or misses Hopper's matrix units is none.
"""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import product
from typing import NamedTuple

import torch
from triton.errors import TritonError

from benchmarks.gpu.gate.compile_gate import compile_for, faults
from benchmarks.gpu.gate.tuned_launches import Tiling, launch_with
from kernels.attention.cascade_config import cascade_rule
from kernels.attention.decode_config import decode_rule
from kernels.attention.device_family import HOPPER, DeviceFamily
from kernels.attention.prefill_config import prefill_rule
from kernels.attention.shape import AttentionShape
from kernels.attention.tuned_lookup import AttentionKernel, TunedRow

KERNELS: tuple[AttentionKernel, ...] = ("decode", "prefill", "prefix")
# Heads of queries, of keys and values, and their dimension: one model of each kind stands for all with its group.
HEADS = (
    (32, 8, 128),  # LLaMA 3 8B, Mistral 7B, Qwen3 8B
    (64, 8, 128),  # LLaMA 3 70B, Qwen2 72B
    (32, 32, 128),  # LLaMA 2 7B, OPT 6.7B
    (28, 4, 128),  # Qwen2 7B
    (40, 8, 128),  # Qwen2.5 14B
    (16, 8, 128),  # Qwen3 0.6B
    (32, 8, 64),  # LLaMA 3.2 1B
    (12, 12, 64),  # GPT-2, OPT 125M
)
E4M3_HEADS = HEADS[:3]  # with caches of e4m3, too
# Registers of a multiprocessor, which are given out in units of 8 for each thread.
_REGISTERS, _REGISTER_UNIT, _WARP_SIZE = 65_536, 8, 32

Resources = Callable[["TuningJob", Tiling], "Compiled | None"]


class TuningJob(NamedTuple):
    """Kernel and shape that get a row of a family's."""

    kernel: AttentionKernel
    shape: AttentionShape
    family: DeviceFamily = HOPPER


class Compiled(NamedTuple):
    """Configuration that passes the gate."""

    tiling: Tiling
    programs_per_sm: int
    registers: int
    shared_bytes: int


def shapes(family: DeviceFamily = HOPPER) -> list[AttentionShape]:
    """Shapes that get an entry in the table."""
    bf16, e4m3 = torch.bfloat16, torch.float8_e4m3fn
    kinds = [*((heads, bf16) for heads in HEADS), *((heads, e4m3) for heads in E4M3_HEADS if family.has_e4m3)]
    return [
        AttentionShape(num_heads=heads[0], num_kv_heads=heads[1], head_dim=heads[2], dtype=bf16, kv_dtype=kv_dtype)
        for heads, kv_dtype in kinds
    ]


def tiling_by_rule(job: TuningJob) -> Tiling:
    shape, family = job.shape, job.family
    match job.kernel:
        case "decode":
            decode = decode_rule(shape, family)
            return Tiling(shape.dot_rows, decode.tile, decode.num_warps, decode.num_stages)
        case "prefill":
            prefill = prefill_rule(shape, family)
            return Tiling(prefill.rows, prefill.tile, prefill.num_warps, prefill.num_stages)
        case "prefix":
            cascade = cascade_rule(shape, family)
            return Tiling(cascade.rows, cascade.prefix.tile, cascade.prefix.num_warps, cascade.prefix.num_stages)


def choices(kernel: AttentionKernel, shape: AttentionShape) -> dict[str, tuple[int, ...]]:
    """Values that each field may take."""
    return {
        "tile": (32, 64, 128),
        "num_stages": (2, 3, 4, 5),
        "num_warps": (4, 8),
        "rows": (shape.dot_rows,) if kernel == "decode" else (64, 128),
    }


def programs_by_rule(job: TuningJob) -> int:
    """Number of programs that the rule expects at once, for any compiler; a prefill's launch does not depend on it."""
    match job.kernel:
        case "decode":
            return decode_rule(job.shape, job.family).programs_per_sm
        case "prefix":
            return cascade_rule(job.shape, job.family).prefix.programs_per_sm
        case "prefill":
            return 1


def tilings(job: TuningJob) -> list[Tiling]:
    """Yield the rule's configuration first, then the others by distance from it."""
    rule, fields = tiling_by_rule(job), choices(job.kernel, job.shape)
    others = {Tiling(**dict(zip(fields, each, strict=True))) for each in product(*fields.values())}
    return [rule, *sorted(others - {rule}, key=lambda each: (_distance(each, rule), each))]


def _distance(tiling: Tiling, rule: Tiling) -> int:
    """Count the fields that differ; larger tiles count as further than smaller ones, which need less."""
    return sum(own != other for own, other in zip(tiling, rule, strict=True)) + (tiling.tile > rule.tile)


def compiled(job: TuningJob, tiling: Tiling) -> Compiled | None:
    """Compile for the family; None if the compiler or the gate refuses the configuration."""
    launch = launch_with(job.kernel, job.shape, tiling, job.family)
    try:
        code = compile_for(launch, job.family.number)
    except (TritonError, RuntimeError):  # the second of passes that fail
        return None
    if faults(launch, job.family.number, code):
        return None
    programs = programs_at_once(job.family, code.registers, code.shared_bytes, tiling.num_warps)
    return Compiled(tiling, programs, code.registers, code.shared_bytes)


def programs_at_once(family: DeviceFamily, registers: int, shared_bytes: int, num_warps: int) -> int:
    """Number of programs that one multiprocessor holds at once."""
    registers = -(-registers // _REGISTER_UNIT) * _REGISTER_UNIT * _WARP_SIZE * num_warps
    return max(1, min(_REGISTERS // registers, family.programs_with(shared_bytes), family.max_warps // num_warps))


def first_sound(job: TuningJob, resources: Resources = compiled) -> Compiled:
    """First configuration that passes the gate: the rule's, or the one nearest to it."""
    ways = (resources(job, tiling) for tiling in tilings(job))
    way = next((way for way in ways if way is not None), None)
    assert way is not None, f"nothing passes the gate for {job}"
    return way


def fastest(
    job: TuningJob, trial: Callable[[Compiled], float], resources: Resources = compiled
) -> tuple[Compiled, float]:
    """A way that no change of one field makes faster, fields tried once each in turn; and its time.

    `trial` says how long a way takes, infinitely where its result is wrong.
    """
    best = first_sound(job, resources)
    best_us = trial(best)
    for field, values in choices(job.kernel, job.shape).items():
        tried = [best.tiling._replace(**{field: value}) for value in values if value != getattr(best.tiling, field)]
        with ThreadPoolExecutor(os.cpu_count()) as pool:  # the compiler lets go of the interpreter's lock
            ways = list(pool.map(partial(resources, job), tried))
        for way in filter(None, ways):
            us = trial(way)
            if us < best_us:
                best, best_us = way, us
    assert best_us < float("inf"), f"no way computes what it should for {job}"
    return best, best_us


def row_of(job: TuningJob, way: Compiled, us: float | None) -> TunedRow:
    """Make the table's entry."""
    shape = job.shape
    return TunedRow(
        job.kernel,
        job.family.name,
        shape.group,
        shape.head_dim,
        8 * shape.dtype.itemsize,
        8 * shape.kv_dtype.itemsize,
        *way.tiling,
        way.programs_per_sm,
        way.registers,
        way.shared_bytes,
        us,
    )
