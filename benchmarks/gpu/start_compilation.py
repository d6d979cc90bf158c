"""Time that the kernels of a start take to compile, on one core and on several. Needs no GPU.

Records what a worker launches at its start with LLaMA's 8 B shape (one layer of it, since all launch the same), as for
one kind of GPU, and compiles it from nothing: the process bound to one core, then to more. Prints a table and writes
JSON.

    python -m benchmarks.gpu.start_compilation [--capability 90] [--cores 1 2] [--seats N] [--out DIR]
"""

import argparse
import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median

import torch

from benchmarks.page_section import Document, Headline, PageSection, Section, at_most, grid, number
from benchmarks.random_models import SHAPES, ModelShape, scratch_folder, write_random_model
from benchmarks.report import RESULTS, table, write_result
from kernels.launches.launch_compiler import compile_launches
from kernels.launches.launch_recorder import RecordedLaunch
from worker_svc.gpu.graphs import graph_sizes
from worker_svc.gpu.launch_compilation import record_start, recording_operations
from worker_svc.gpu.runner import DeviceRunner
from worker_svc.memory.kv_pool import KVPool
from worker_svc.model.decoder import load_decoder
from worker_svc.steps.step_limits import StepLimits
from worker_svc.steps.trial_steps import num_trial_blocks

BLOCK_SIZE = 16
MAX_MODEL_LEN = 8192
MAX_BATCHED_TOKENS = 8192
MOST_OF_ONE = 0.6  # of the time on one core, on two


@dataclass(frozen=True, slots=True, kw_only=True)
class Compiled:
    """Compilation of all launches on some cores; medians of the rounds."""

    cores: int
    seconds: float
    cpu_s: float  # of this process and the compiler's children
    of_one: float  # median of the rounds' ratios to the time on one core


def launches_of(shape: ModelShape, num_seats: int, capability: int) -> list[RecordedLaunch]:
    """Distinct launches of a start with one layer of this shape, in bfloat16."""
    folder = scratch_folder(4 * 2 * shape.vocab_size * shape.hidden_size)
    try:
        write_random_model(replace(shape, num_layers=1), folder, torch.device("cpu"))
        decoder = load_decoder(folder, torch.bfloat16, torch.device("cpu"))
    finally:
        shutil.rmtree(folder)
    limits = StepLimits(
        num_seats=num_seats,
        num_blocks=1,
        num_host_blocks=0,
        block_size=BLOCK_SIZE,
        vocab_size=shape.vocab_size,
        max_model_len=min(MAX_MODEL_LEN, shape.max_model_len),
        max_batched_tokens=MAX_BATCHED_TOKENS,
    )
    limits = replace(limits, num_blocks=num_trial_blocks(limits))

    def make(pool: KVPool, limits: StepLimits) -> DeviceRunner:
        return DeviceRunner(decoder, pool, limits, recording_operations(), graph_sizes(limits.num_seats))

    pool = KVPool(decoder.block_shape(BLOCK_SIZE), limits.num_blocks, torch.device("cpu"))
    return list(record_start(make, pool, limits, capability).values())


def compile_anew(launches: Sequence[RecordedLaunch], capability: int, num_cores: int) -> tuple[float, float]:
    """Seconds, and seconds of CPU, for compiling without a cache on so many cores. Raises RuntimeError on a fault."""
    with _bound_to(num_cores), _empty_cache():
        began_s, began_cpu_s = time.perf_counter(), _cpu_s()
        faults = compile_launches(launches, capability, num_cores)
        seconds, cpu_s = time.perf_counter() - began_s, _cpu_s() - began_cpu_s
    if faults:
        raise RuntimeError("\n".join(faults))
    return seconds, cpu_s


@contextmanager
def _bound_to(num_cores: int) -> Iterator[None]:
    """Binds this thread, and the threads and processes that it starts, to some of its cores."""
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, sorted(cores)[:num_cores])
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)


@contextmanager
def _empty_cache() -> Iterator[None]:
    before = os.environ.get("TRITON_CACHE_DIR")
    with tempfile.TemporaryDirectory(prefix="quire-compilation-") as folder:
        os.environ["TRITON_CACHE_DIR"] = folder
        try:
            yield
        finally:
            del os.environ["TRITON_CACHE_DIR"]
            if before is not None:
                os.environ["TRITON_CACHE_DIR"] = before


def _cpu_s() -> float:
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def main() -> None:
    """Reads the command line and measures."""
    options = parse_arguments()
    shape = SHAPES[options.shape]
    launches = launches_of(shape, options.seats, options.capability)
    compile_anew(launches[:1], options.capability, 1)  # what is loaded once
    rounds = [[compile_anew(launches, options.capability, num) for num in options.cores] for _ in range(options.rounds)]
    compiled = []
    for index, num_cores in enumerate(options.cores):
        times = [each[index] for each in rounds]
        compiled.append(
            Compiled(
                cores=num_cores,
                seconds=round(median(seconds for seconds, _ in times), 2),
                cpu_s=round(median(cpu_s for _, cpu_s in times), 2),
                of_one=round(median(each[index][0] / each[0][0] for each in rounds), 3),
            )
        )
    rows = [asdict(each) for each in compiled]
    print(table(("cores", "seconds", "CPU seconds", "of the first"), [list(row.values()) for row in rows]))
    figures = {
        "capability": options.capability,
        "shape": asdict(shape),
        "num_seats": options.seats,
        "num_launches": len(launches),
        "rounds": options.rounds,
        "most_of_one": MOST_OF_ONE,
        "figures": rows,
    }
    write_result(options.out / "start_compilation.json", "start_compilation", figures)


def parse_arguments() -> argparse.Namespace:
    """Defaults are those of the kept result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--capability", type=int, default=90, help="of the GPU that is compiled for")
    parser.add_argument("--shape", choices=SHAPES, default="8b")
    parser.add_argument(
        "--cores", type=int, nargs="+", default=[1, 2], help="the first is what others are compared with"
    )
    parser.add_argument("--seats", type=int, default=64, help="of the worker; each pass of its start is computed here")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the result")
    return parser.parse_args()


def section_of(document: Document) -> Section:
    """Section of the results page."""
    rows = document["figures"]
    two = next(row for row in rows if row["cores"] == 2)
    most = document["most_of_one"]
    return Section(
        done=(
            f"The {document['num_launches']} distinct launches of a start (LLaMA's 8 B shape, {document['num_seats']} "
            f"seats) are compiled for sm_{document['capability']} from nothing, by a thread a core. Medians of "
            f"{document['rounds']} rounds, and of their ratios."
        ),
        headlines=[
            Headline(
                f"two cores take {number(two['of_one'], 2, most)} of the time of one",
                [at_most(two["of_one"], most, "of the time of one")],
            )
        ],
        blocks=[
            grid(
                ("cores", "seconds", "CPU seconds", "of the time of one"),
                [(row["cores"], row["seconds"], row["cpu_s"], f"{row['of_one']:.2f}") for row in rows],
            )
        ],
        versions=("triton",),
    )


SECTION = PageSection(
    kinds=("start_compilation",),
    title="Compilation of a start's kernels",
    question="How long do the kernels of a start compile, on one core and on two?",
    command="python -m benchmarks.gpu.start_compilation",
    measures=("kernels", "worker_svc/gpu"),
    target="two cores in 0.6 of the time of one",
    render=section_of,
)


if __name__ == "__main__":
    main()
