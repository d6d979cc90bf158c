"""Kernel launches of whole steps, seen without a GPU: only in forms that a start has compiled, and with types of
arguments that the compile gate knows.
"""

from collections.abc import Mapping
from pathlib import Path
from random import Random
from typing import NamedTuple

import pytest
import torch
import triton

from benchmarks.gpu.gate.launch_config import LaunchConfig
from benchmarks.gpu.gate.launch_table import LAUNCHES
from benchmarks.gpu.host.stub_graphs import StubGraphs
from kernels.launches.launch_recorder import LaunchKey, RecordedLaunch, recorded_launches
from tests.worker.device.launched_steps import CASES, LIMITS, NUM_SEATS, LaunchCase
from tests.worker.device.random_steps import RandomSteps
from worker_svc.gpu.graphs import graph_sizes, token_sizes
from worker_svc.gpu.runner import PendingDeviceStep
from worker_svc.model.decoder import Decoder

NUM_STEPS = 12
pytestmark = pytest.mark.skipif(triton.knobs.runtime.interpret, reason="the interpreter compiles nothing")


class Started(NamedTuple):
    """A model, and what its start had compiled."""

    case: LaunchCase
    decoder: Decoder
    compiled: Mapping[LaunchKey, RecordedLaunch]


@pytest.fixture(scope="module", params=CASES)
def started(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Started:
    torch.set_num_threads(1)
    case = CASES[request.param]
    folder: Path = tmp_path_factory.mktemp("model")
    decoder = case.decoder(folder)
    return Started(case, decoder, case.launches_of_start(decoder))


@pytest.mark.long
@pytest.mark.parametrize(
    "started", ["bf16", "cache of e4m3", "weights of e4m3", "weights of 4 bits", "rank of two"], indirect=True
)
def test_no_step_launches_a_kernel_that_was_not_compiled_at_the_start(started: Started) -> None:
    """A compilation would hold up all requests for seconds. Two steps are on the way at once."""
    runner = started.case.runner(started.decoder, LIMITS)
    steps = RandomSteps(Random(1), LIMITS)
    before: PendingDeviceStep | None = None
    with recorded_launches() as recorder:
        for step_id in range(NUM_STEPS):
            pending = runner.launch(steps.step(step_id))
            if before is not None:
                before.wait()
            before = pending
    late = [str(launch) for key, launch in recorder.launches.items() if key not in started.compiled]
    assert not late
    kernels = {launch.name for launch in recorder.launches.values()}
    assert kernels == {launch.name for launch in started.compiled.values()}, "the steps do not launch all kernels"


@pytest.mark.parametrize("started", ["bf16", "cache of e4m3", "weights of 4 bits", "rank of two"], indirect=True)
def test_no_graph_captures_a_kernel_that_was_not_compiled_ahead(started: Started) -> None:
    """Graphs are captured at padded sizes, whose numbers of rows and tiles may be of other kinds to the compiler."""
    graphs = StubGraphs()
    runner = started.case.runner(started.decoder, LIMITS, graphs)
    with recorded_launches() as recorder:
        runner.capture_graphs()
    num_sizes = len(graph_sizes(NUM_SEATS)) + len(token_sizes(LIMITS.max_batched_tokens))
    assert graphs.num_captured == 2 * num_sizes  # with common prefixes and without
    late = [str(launch) for key, launch in recorder.launches.items() if key not in started.compiled]
    assert recorder.launches and not late


def test_the_compile_gate_knows_the_types_of_all_launches(started: Started) -> None:
    """Constants may differ, since the gate's are those of real shapes."""
    strange = [str(launch) for launch in started.compiled.values() if not any(_same_types(launch, c) for c in LAUNCHES)]
    assert not strange


def _same_types(launch: RecordedLaunch, config: LaunchConfig) -> bool:
    """Arguments that are 1 are constants when launched."""
    if config.kernel is not launch.kernel or not launch.types.keys() <= config.arguments.keys():
        return False
    return all(config.arguments[name] == kind for name, kind in launch.types.items())
