"""Launches, graphs and waits of a step, by kind of step: seen while a runner launches it, without a GPU.

A model of 8 B parameters without weights, with the kernels of a GPU: launches are recorded and dropped. Tensors have
no content, so a step that waits for a value fails. Each kind is launched twice: with graphs and kernel by kernel.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from benchmarks.gpu.host.step_counter import StepCounter
from benchmarks.gpu.host.step_kinds import STEP_KINDS, kind_limits
from benchmarks.gpu.host.stub_decoder import meta_decoder
from benchmarks.gpu.host.stub_graphs import StubGraphs
from benchmarks.random_models import SHAPES
from common.step import Step
from kernels.attention.cascade_groups import SharingCost
from kernels.launches.launch_recorder import LaunchKey, LaunchRecorder, recorded_launches
from worker_svc.gpu import triton_operations
from worker_svc.gpu.graphs import graph_sizes
from worker_svc.gpu.runner import DeviceRunner
from worker_svc.memory.kv_pool import KVPool
from worker_svc.steps.trial_steps import warm_up_steps

_SHAPE = SHAPES["8b"]
_FREE = SharingCost(per_step=0, per_group=0, per_row=0)  # so that a shared prefix is used whatever it saves


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLaunches:
    """Launches of one step, and its waits."""

    kind: str
    by_graph: bool  # it may be; `graphs` says if it was
    graphs: int
    kernels: int  # Triton's
    operations: int  # torch's: products, copies to and from the device, and others
    reads: int  # by the host, each of which waits for the device
    compiled: int  # launches in a form that the start had not compiled


def count_launches() -> list[StepLaunches]:
    """Count for each kind of step, with graphs and without."""
    return [each for by_graph in (True, False) for each in _count(by_graph)]


def _count(by_graph: bool) -> list[StepLaunches]:
    limits, graphs = kind_limits(_SHAPE), StubGraphs()
    decoder = meta_decoder(_SHAPE)
    pool = KVPool(decoder.block_shape(limits.block_size), limits.num_blocks, decoder.device, limits.num_host_blocks)
    pool.host_blocks = pool.host_blocks.to("meta")  # so that a copy from the device to the host is one, too
    operations = triton_operations.OPERATIONS
    runner = DeviceRunner(decoder, pool, limits, operations, graph_sizes(limits.num_seats), cost=_FREE, graphs=graphs)
    with recorded_launches() as recorder:
        runner.warm_up()
        for step in warm_up_steps(limits):
            runner.launch(step)
        if by_graph:
            runner.capture_graphs()
        watch = _Watch(runner, recorder, graphs, by_graph, set(recorder.launches), StepCounter())
        return [watch.count(kind, steps) for kind, steps in STEP_KINDS]


@dataclass(frozen=True, slots=True)
class _Watch:
    """A runner, and all that counts what it launches."""

    runner: DeviceRunner
    recorder: LaunchRecorder
    graphs: StubGraphs
    by_graph: bool
    compiled: set[LaunchKey]  # at the start
    counter: StepCounter

    def count(self, kind: str, steps: Sequence[Step]) -> StepLaunches:
        """Count the last of the steps; those before it bring the seats to where it begins."""
        *before, counted = steps
        for step in before:
            self.runner.launch(step)
        kernels, replays = self.recorder.num_launches, self.graphs.num_replays
        with self.counter.counting():
            self.runner.launch(counted)
        return StepLaunches(
            kind=kind,
            by_graph=self.by_graph,
            graphs=self.graphs.num_replays - replays,
            kernels=self.recorder.num_launches - kernels,
            operations=self.counter.num_operations,
            reads=self.counter.num_reads,
            compiled=len(set(self.recorder.launches) - self.compiled),
        )


def launch_rows() -> list[dict[str, object]]:
    """Count for a result file."""
    return [asdict(each) for each in count_launches()]
