"""Host time of a step on the accelerator's runner, without a GPU.

The runner of an 8 B model with all of its host code, Triton's launcher included; the driver and the replay of a graph
are stubs that do nothing, and products only make their output. CPU time of the thread that launches the step, and of
reading its result. Then what a step launches, by kind. Prints tables and writes JSON.

    python -m benchmarks.gpu.host [--steps N] [--out DIR]
"""

import argparse
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

from benchmarks.gpu.host.host_steps import HostLoad
from benchmarks.gpu.host.step_launches import launch_rows
from benchmarks.gpu.host.stub_decoder import stub_decoder
from benchmarks.gpu.host.stub_driver import stubbed_driver
from benchmarks.gpu.host.stub_graphs import StubGraphs
from benchmarks.random_models import SHAPES
from benchmarks.report import RESULTS, percentile, table, write_result
from worker_svc.gpu import triton_operations
from worker_svc.gpu.graphs import graph_sizes
from worker_svc.gpu.runner import DeviceRunner
from worker_svc.memory.kv_pool import KVPool
from worker_svc.model.decoder import Decoder
from worker_svc.steps.step_limits import StepLimits

# Where there is no graph, torch looks up embeddings and copies logits on the CPU: with few of them that takes little.
SHAPE = replace(SHAPES["8b"], vocab_size=4096)
WARM_UP_STEPS = 10  # of each load, which are not measured
POOL_BLOCKS = 64  # of the pool in memory, which nobody reads; block tables name more
MIXED = HostLoad(num_decode=64, chunk=512)
DECODE = HostLoad(num_decode=256, chunk=0)
LOADS = {
    "64 rows that decode, a chunk of 512": MIXED,
    "256 rows that decode": DECODE,
    "256 rows that decode behind 32 common blocks": HostLoad(num_decode=256, chunk=0, shared_blocks=32),
    "1 row that decodes": HostLoad(num_decode=1, chunk=0),
    "a chunk of 512": HostLoad(num_decode=0, chunk=512),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class HostCost:
    """CPU time of a step, in milliseconds."""

    load: str
    by_graph: bool
    num_steps: int
    launch_ms: float  # median
    launch_p90_ms: float
    result_ms: float  # median, of reading the result, on another thread of a worker
    total_ms: float  # launch and result


def host_costs(num_steps: int) -> Iterator[HostCost]:
    """Measure each load with graphs, and then kernel by kernel."""
    decoder = stub_decoder(SHAPE)
    limits = StepLimits(
        num_seats=max(load.num_seats for load in LOADS.values()),
        num_blocks=1 << 17,
        num_host_blocks=0,
        block_size=16,
        vocab_size=decoder.config.vocab_size,
        max_model_len=decoder.config.max_model_len,
        max_batched_tokens=1024,
    )
    with stubbed_driver():
        for by_graph in (True, False):
            runner = _runner(decoder, limits, by_graph=by_graph)
            for name, load in LOADS.items():
                yield _measure(name, load, runner, limits, num_steps, by_graph=by_graph)


def _runner(decoder: Decoder, limits: StepLimits, *, by_graph: bool) -> DeviceRunner:
    pool = KVPool(decoder.block_shape(limits.block_size), POOL_BLOCKS, decoder.device)
    operations, sizes = triton_operations.OPERATIONS, graph_sizes(limits.num_seats)
    runner = DeviceRunner(decoder, pool, limits, operations, sizes, graphs=StubGraphs())
    runner.warm_up()
    if by_graph:
        runner.capture_graphs()
    return runner


def _measure(
    name: str, load: HostLoad, runner: DeviceRunner, limits: StepLimits, num_steps: int, *, by_graph: bool
) -> HostCost:
    launch_ns, result_ns = [], []
    for step in load.steps(limits, WARM_UP_STEPS + num_steps):
        began = time.thread_time_ns()
        pending = runner.launch(step)
        launched = time.thread_time_ns()
        pending.wait()
        result_ns.append(time.thread_time_ns() - launched)
        launch_ns.append(launched - began)
    launch_ns, result_ns = launch_ns[-num_steps:], result_ns[-num_steps:]
    launch_ms, result_ms = percentile(launch_ns, 50) / 1e6, percentile(result_ns, 50) / 1e6
    return HostCost(
        load=name,
        by_graph=by_graph,
        num_steps=num_steps,
        launch_ms=round(launch_ms, 4),
        launch_p90_ms=round(percentile(launch_ns, 90) / 1e6, 4),
        result_ms=round(result_ms, 4),
        total_ms=round(launch_ms + result_ms, 4),
    )


def main() -> None:
    """Reads the command line and measures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=500, help="measured steps of each load")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the result")
    options = parser.parse_args()
    torch.set_num_threads(1)
    costs = list(host_costs(options.steps))
    print(table(list(asdict(costs[0])), [list(asdict(each).values()) for each in costs]))
    launches = launch_rows()
    print(table(list(launches[0]), [list(each.values()) for each in launches]))
    figures = {
        "unit": "milliseconds of CPU time",
        "key_figures": {
            "host_mixed_step_ms": _total(costs, MIXED),
            "host_decode_step_ms": _total(costs, DECODE),
        },
        "costs": [asdict(each) for each in costs],
        "launches": launches,
    }
    write_result(options.out / "host_cost.json", "host_cost", figures)


def _total(costs: list[HostCost], load: HostLoad) -> float:
    return next(each.total_ms for each in costs if each.by_graph and LOADS[each.load] == load)


if __name__ == "__main__":
    main()
