"""Writes the table of launch configurations: for each family of devices one way to launch each kernel of attention for
each shape.

On a CUDA device ways that the compile gate lets pass are timed, one field changed after another, and the fastest is
taken; each kernel takes some minutes. The rows are those of the device's compute capability, also if it has had none;
other rows stay. `--from-gate` needs no device: for every family it takes what the rule says, or what is most like it
and passes, and the table says so. `--device cpu` tries the trials in Triton's interpreter, and writes nothing.

    python -m benchmarks.gpu.tune_kernels [--from-gate | --device cpu] [--only decode|prefill|prefix] [--output FILE]
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path

import torch
import triton

from benchmarks.gpu.kernel_bench.candidates import (
    KERNELS,
    Compiled,
    Resources,
    TuningJob,
    compiled,
    fastest,
    first_sound,
    programs_by_rule,
    row_of,
    shapes,
    tiling_by_rule,
)
from benchmarks.gpu.kernel_bench.lab import Lab, Size, cuda_lab, host_lab
from benchmarks.gpu.kernel_bench.trials import trials
from benchmarks.report import ROOT
from kernels.attention.device_family import FAMILIES, DeviceFamily, family_of
from kernels.attention.tuned import ORIGINS, ROWS
from kernels.attention.tuned_lookup import AttentionKernel, TunedRow

TABLE = ROOT / "kernels" / "attention" / "tuned.py"
Origins = Mapping[str, Mapping[str, str]]

HEAD = '''"""Launch configurations of attention by shape: written by `benchmarks.gpu.tune_kernels`, not by hand.

A device of another compute capability than these takes the rows of the nearest; a shape without a row is launched by a
rule. `ORIGINS` names the source of each capability's rows; a row without a time was chosen by the compiler's report of
registers and shared memory, and not measured.
"""

Row = tuple[str, str, int, int, int, int, int, int, int, int, int, int, int, float | None]

ORIGINS = {
%s
}

# Kernel, compute capability, heads that share a key-value head, head dimension, bits of queries, bits of keys:
# rows of a tile, keys, warps, stages, programs a multiprocessor, registers a thread, bytes shared, us
ROWS: tuple[Row, ...] = (
%s
)
'''


def rendered(rows: Sequence[TunedRow], origins: Origins) -> str:
    """Render the whole file."""
    lines = []
    for family, origin in sorted(origins.items()):
        facts = (f"        {json.dumps(key)}: {json.dumps(value)}," for key, value in origin.items())
        lines += [f"    {json.dumps(family)}: {{", *facts, "    },"]
    return HEAD % ("\n".join(lines), "\n".join(f"    ({', '.join(map(_literal, row))})," for row in rows))


def _literal(value: object) -> str:
    return json.dumps(value) if isinstance(value, str) else repr(value)


def from_gate(jobs: Sequence[TuningJob]) -> list[TunedRow]:
    """Make a row for each, from the compiler alone."""
    with ThreadPoolExecutor(os.cpu_count()) as pool:  # the compiler lets go of the interpreter's lock
        return list(pool.map(row_from_gate, jobs))


def row_from_gate(job: TuningJob, resources: Resources = compiled) -> TunedRow:
    """Make a row with no more programs at once than the rule expects, since other compilers take more registers."""
    way = first_sound(job, resources)
    programs = min(way.programs_per_sm, programs_by_rule(job))
    return row_of(job, way._replace(programs_per_sm=programs), None)


def measured(lab: Lab, jobs: Sequence[TuningJob]) -> list[TunedRow]:
    """Make a row for each: the fastest configuration that passes the gate and computes correct results."""
    rows = []
    for job in jobs:
        way, us = fastest(job, trials(lab, job.kernel, job.shape))
        rows.append(row_of(job, way, round(us, 2)))
        print(rows[-1], flush=True)
    return rows


def try_trials() -> None:
    """Try every kind of trial in small, with the rule's configuration; the times mean nothing."""
    lab, shape = host_lab(), shapes()[0]
    for kernel in KERNELS:
        tiling = tiling_by_rule(TuningJob(kernel, shape))
        is_right = trials(lab, kernel, shape)(Compiled(tiling, 1, 0, 0)) < float("inf")
        print(f"{kernel} {tiling}: {'right' if is_right else 'WRONG'}")
        assert is_right


def merged(new: Sequence[TunedRow], old: Sequence[TunedRow]) -> list[TunedRow]:
    """Merge the new rows with old rows of other keys, in the order of keys."""
    by_key = {row[:6]: row for row in (*old, *new)}
    return [by_key[key] for key in sorted(by_key)]


def origin_of(lab: Lab | None) -> dict[str, str]:
    """Origin of the rows: command, commit and device."""
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
    return {
        "source": "compile gate, not measured" if lab is None else "measured",
        "command": f"python -m benchmarks.gpu.tune_kernels {' '.join(sys.argv[1:])}".strip(),
        "device": "none" if lab is None else torch.cuda.get_device_name(lab.device),
        "triton": triton.__version__,
        "torch": torch.__version__,
        "commit": head.stdout.strip() or "unknown",
    }


def main() -> int:
    """Reads the command line, and writes the table."""
    options = parse_arguments()
    if options.device == "cpu":
        try_trials()
        return 0
    if not options.from_gate and not torch.cuda.is_available():
        print("Nothing can be measured without a CUDA device; --from-gate asks the compiler alone.")
        return 2
    lab = None if options.from_gate else cuda_lab(Size.FULL)
    families = FAMILIES if lab is None else (family_of(lab.device),)
    jobs = [job for family in families for job in jobs_of(family, options.only)]
    new = from_gate(jobs) if lab is None else measured(lab, jobs)
    names = {family.name for family in families}
    old = [row for row in map(TunedRow._make, ROWS) if row.family not in names or options.only is not None]
    origins = {**ORIGINS, **dict.fromkeys(names, origin_of(lab))}
    options.output.write_text(rendered(merged(new, old), origins))
    return 0


def jobs_of(family: DeviceFamily, only: AttentionKernel | None = None) -> list[TuningJob]:
    """Rows that a family gets, of all kernels or of one."""
    kernels = KERNELS if only is None else (only,)
    return [TuningJob(kernel, shape, family) for kernel, shape in product(kernels, shapes(family))]


def parse_arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--from-gate", action="store_true", help="choose by what the compiler reports")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--only", choices=KERNELS, help="keep the other rows of the table")
    parser.add_argument("--output", type=Path, default=TABLE)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
