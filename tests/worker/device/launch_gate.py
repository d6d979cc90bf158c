"""Compiles what a start launches, exactly as it is launched, for GPUs that need not be there.

`python -m tests.worker.device.launch_gate` does so for tiny models and fails on what the compiler refuses, on spilled
registers and on too much shared memory. The interpreter, which runs the same launches, lets pass much that it refuses.
"""

import os
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from benchmarks.gpu.gate.compile_gate import compile_recorded, resource_faults
from kernels.launches.launch_recorder import LaunchKey, RecordedLaunch
from tests.worker.device.launched_steps import CASES

CAPABILITIES = {
    "bf16": (80, 90),
    "cache of e4m3": (90,),
    "fp16": (90,),
    "weights of e4m3": (90,),
    "weights of 4 bits": (80, 90),
    "rank of two": (90,),
}


def compile_faults(launch: RecordedLaunch, capability: int) -> list[str]:
    """Compile a launch; faults that the compiler reports count too."""
    try:
        return resource_faults(capability, compile_recorded(launch, capability))
    except Exception as error:  # of any kind, by the stage of the compiler
        return [f"{type(error).__name__}: {error}"]


def recorded_jobs() -> list[tuple[RecordedLaunch, int]]:
    """Each launch for each of its devices, but once."""
    jobs: dict[tuple[LaunchKey, int], RecordedLaunch] = {}
    for name, case in CASES.items():
        with tempfile.TemporaryDirectory() as folder:
            launches = case.launches_of_start(case.decoder(Path(folder)))
        for capability in CAPABILITIES[name]:
            jobs |= {(key, capability): launch for key, launch in launches.items()}
    return [(launch, capability) for (_, capability), launch in jobs.items()]


def main() -> int:
    """Report faults on standard output; their number."""
    start = time.monotonic()
    torch.manual_seed(0)
    jobs = recorded_jobs()
    with ThreadPoolExecutor(os.cpu_count()) as pool:  # the compiler lets go of the interpreter's lock
        found = list(pool.map(lambda job: compile_faults(*job), jobs))
    for (launch, capability), faults in zip(jobs, found, strict=True):
        if faults:
            sys.stdout.write(f"sm_{capability} {launch}\n    {'; '.join(faults)}\n")
    num_faulty = sum(map(bool, found))
    seconds = time.monotonic() - start
    sys.stdout.write(f"{len(jobs)} recorded launches, {num_faulty} at fault, in {seconds:.1f} s\n")
    return num_faulty


if __name__ == "__main__":
    sys.exit(min(1, main()))
