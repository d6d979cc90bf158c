"""Writes the table of launch configurations: one way to launch each kernel of attention for each shape.

On a CUDA device ways that the compile gate lets pass are timed, one field changed after another, and the fastest is
taken; each kernel takes some minutes. `--from-gate` needs no device: it takes what the rule says, or what is most like
it and passes, and the table says so. `--device cpu` tries the trials in Triton's interpreter, and writes nothing.

    python -m benchmarks.gpu.tune_kernels [--from-gate | --device cpu] [--only decode|prefill|prefix] [--output FILE]
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path

import torch
import triton

from benchmarks.gpu.kernel_bench.candidates import (
    KERNELS,
    Compiled,
    Resources,
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
from kernels.attention.shape import AttentionShape
from kernels.attention.tuned import ROWS
from kernels.attention.tuned_lookup import AttentionKernel, TunedRow

TABLE = ROOT / "kernels" / "attention" / "tuned.py"
Job = tuple[AttentionKernel, AttentionShape]

HEAD = '''"""Launch configurations of attention by shape: written by `benchmarks.gpu.tune_kernels`, not by hand.

A shape without a row is launched by a rule. `ORIGIN` names the source of the rows; a row without a time was chosen by
the compiler's report of registers and shared memory, and not measured.
"""

Row = tuple[str, str, int, int, int, int, int, int, int, int, int, int, int, float | None]

ORIGIN = {
%s
}

# Kernel, family of devices, heads that share a key-value head, head dimension, bits of queries, bits of keys:
# rows of a tile, keys, warps, stages, programs a multiprocessor, registers a thread, bytes shared, us
ROWS: tuple[Row, ...] = (
%s
)
'''


def rendered(rows: Sequence[TunedRow], origin: dict[str, str]) -> str:
    """Render the whole file."""
    facts = "\n".join(f"    {json.dumps(key)}: {json.dumps(value)}," for key, value in origin.items())
    return HEAD % (facts, "\n".join(f"    ({', '.join(map(_literal, row))})," for row in rows))


def _literal(value: object) -> str:
    return json.dumps(value) if isinstance(value, str) else repr(value)


def from_gate(jobs: Sequence[Job]) -> list[TunedRow]:
    """Make a row for each, from the compiler alone."""
    with ThreadPoolExecutor(os.cpu_count()) as pool:  # the compiler lets go of the interpreter's lock
        return list(pool.map(row_from_gate, jobs))


def row_from_gate(job: Job, resources: Resources = compiled) -> TunedRow:
    """Make a row with no more programs at once than the rule expects, since other compilers take more registers."""
    kernel, shape = job
    way = first_sound(kernel, shape, resources)
    programs = min(way.programs_per_sm, programs_by_rule(kernel, shape))
    return row_of(kernel, shape, way._replace(programs_per_sm=programs), None)


def measured(lab: Lab, jobs: Sequence[Job]) -> list[TunedRow]:
    """Make a row for each: the fastest configuration that passes the gate and computes correct results."""
    rows = []
    for kernel, shape in jobs:
        way, us = fastest(kernel, shape, trials(lab, kernel, shape))
        rows.append(row_of(kernel, shape, way, round(us, 2)))
        print(rows[-1], flush=True)
    return rows


def try_trials() -> None:
    """Try every kind of trial in small, with the rule's configuration; the times mean nothing."""
    lab, shape = host_lab(), shapes()[0]
    for kernel in KERNELS:
        tiling = tiling_by_rule(kernel, shape)
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
    jobs = [(kernel, shape) for kernel, shape in product(KERNELS, shapes()) if options.only in (None, kernel)]
    lab = None if options.from_gate else cuda_lab(Size.FULL)
    new = from_gate(jobs) if lab is None else measured(lab, jobs)
    old = [TunedRow(*row) for row in ROWS] if options.only else []
    options.output.write_text(rendered(merged(new, old), origin_of(lab)))
    return 0


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
