"""The accelerator's runner with attention libraries, of which doubles compute: the tokens of its own operations.

Any mix of steps, launched ahead, by graphs and without; layers with a sliding window and shared prefixes stay with the
runner's operations.
"""

from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import pytest
import torch

from kernels.attention.cascade_groups import SharingCost
from tests.worker.device.flash_attention_double import FlashAttentionDouble
from tests.worker.device.flashinfer_double import FlashInferDouble
from tests.worker.device.random_steps import RandomSteps
from tests.worker.device.recorded_graphs import RecordedGraphs
from tests.worker.device.test_mixed_graphs import FREE, check_equal, plain_runner, random_pool
from tests.worker.runners import limits_for, run_ahead
from tests.worker.tiny_models import write_tiny_model
from worker_svc.gpu.graphs import graph_sizes
from worker_svc.gpu.libraries.flash_attention import FlashAttention
from worker_svc.gpu.libraries.flashinfer import FlashInfer
from worker_svc.gpu.libraries.library import AttentionLibrary, PassLibraries
from worker_svc.gpu.runner import DeviceRunner
from worker_svc.gpu.torch_operations import OPERATIONS
from worker_svc.model.decoder import Decoder, load_decoder

DEAR = SharingCost(per_step=1 << 40, per_group=0, per_row=0)  # so that nothing shared is worth it


class Doubled(NamedTuple):
    """A library, and the number of launches of its double so far."""

    library: AttentionLibrary
    num_calls: Callable[[], int]


def flash_attention(graphs: RecordedGraphs) -> Doubled:
    double = FlashAttentionDouble(graphs.recorded)
    return Doubled(FlashAttention(double, "3"), lambda: double.num_calls)


def flashinfer(graphs: RecordedGraphs) -> Doubled:
    double = FlashInferDouble(graphs.recorded, lambda: graphs.is_capturing)
    return Doubled(FlashInfer(double, "0"), lambda: sum(double.num_calls.values()))


LIBRARIES = {"flash-attn": flash_attention, "flashinfer": flashinfer}


def load(name: str, folder: Path) -> Decoder:
    torch.set_num_threads(1)
    return load_decoder(write_tiny_model(name, folder), torch.float32, torch.device("cpu"))


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    return load("llama_gqa", tmp_path_factory.mktemp("model"))


def library_runner(
    decoder: Decoder, graphs: RecordedGraphs, libraries: PassLibraries, cost: SharingCost, *, captured: bool
) -> DeviceRunner:
    limits, operations = limits_for(decoder), graphs.operations(OPERATIONS)
    sizes, pool = graph_sizes(limits.num_seats), random_pool(decoder)
    runner = DeviceRunner(decoder, pool, limits, operations, sizes, graphs=graphs, cost=cost, libraries=libraries)
    if captured:
        runner.warm_up()
        runner.capture_graphs(None)
    return runner


@pytest.mark.long
@pytest.mark.parametrize("cost", [DEAR, FREE], ids=["apart", "sharing prefixes"])
@pytest.mark.parametrize(("captured", "depth"), [(False, 1), (True, 1), (True, 2), (True, 3)])
@pytest.mark.parametrize("name", LIBRARIES)
def test_any_steps_give_the_tokens_of_the_runners_own_operations(
    decoder: Decoder, name: str, captured: bool, depth: int, cost: SharingCost
) -> None:
    """Compare mixes of rows, with copies, swaps, beams and log-probabilities."""
    graphs = RecordedGraphs()
    doubled = LIBRARIES[name](graphs)
    libraries = PassLibraries(doubled.library, doubled.library)
    runner = library_runner(decoder, graphs, libraries, cost, captured=captured)
    random_steps = RandomSteps(Random(depth), limits_for(decoder))
    steps = [random_steps.step(number) for number in range(20)]
    before = doubled.num_calls()
    check_equal(run_ahead(runner, steps, depth), run_ahead(plain_runner(decoder), steps))
    num_layers = decoder.config.num_layers
    if cost is DEAR:
        assert doubled.num_calls() - before == len(steps) * num_layers
    else:
        assert 0 < doubled.num_calls() - before < len(steps) * num_layers
    assert sum(runner.graph_passes.values()) == (len(steps) if captured else 0)


@pytest.mark.parametrize("captured", [False, True], ids=["launches", "graphs"])
@pytest.mark.parametrize("which", ["decode", "mixed"])
def test_each_kind_of_pass_may_have_another_library(decoder: Decoder, which: str, captured: bool) -> None:
    graphs = RecordedGraphs()
    doubled = flashinfer(graphs)
    libraries = PassLibraries(**{which: doubled.library})
    runner = library_runner(decoder, graphs, libraries, DEAR, captured=captured)
    random_steps = RandomSteps(Random(5), limits_for(decoder))
    steps = [random_steps.step(number) for number in range(16)]
    before = doubled.num_calls()
    check_equal(run_ahead(runner, steps), run_ahead(plain_runner(decoder), steps))
    is_mixed = [max(step.num_tokens) > 1 for step in steps]
    count = sum(is_mixed) if which == "mixed" else len(steps) - sum(is_mixed)
    assert doubled.num_calls() - before == count * decoder.config.num_layers


@pytest.mark.parametrize(("model", "num_plain"), [("mistral", 0), ("qwen2_window", 1)])
@pytest.mark.parametrize("name", LIBRARIES)
def test_layers_with_a_sliding_window_stay_with_the_runners_own_operations(
    name: str, model: str, num_plain: int, tmp_path: Path
) -> None:
    decoder, graphs = load(model, tmp_path), RecordedGraphs()
    assert decoder.config.sliding_windows.count(None) == num_plain
    doubled = LIBRARIES[name](graphs)
    libraries = PassLibraries(doubled.library, doubled.library)
    runner = library_runner(decoder, graphs, libraries, DEAR, captured=True)
    random_steps = RandomSteps(Random(1), limits_for(decoder))
    steps = [random_steps.step(number) for number in range(10)]
    before = doubled.num_calls()
    check_equal(run_ahead(runner, steps), run_ahead(plain_runner(decoder), steps))
    assert doubled.num_calls() - before == num_plain * len(steps)


def test_a_graph_that_is_too_small_is_replaced_by_launches(decoder: Decoder) -> None:
    """Passes at sizes of their own have a plan of their own, between passes by graphs."""
    graphs = RecordedGraphs()
    doubled: Any = flashinfer(graphs)
    limits, operations = limits_for(decoder), graphs.operations(OPERATIONS)
    runner = DeviceRunner(
        decoder,
        random_pool(decoder),
        limits,
        operations,
        graph_sizes(limits.num_seats),
        graphs=graphs,
        cost=DEAR,
        libraries=PassLibraries(doubled.library, doubled.library),
    )
    runner.capture_graphs(64)
    random_steps = RandomSteps(Random(8), limits)
    steps = [random_steps.step(number) for number in range(24)]
    check_equal(run_ahead(runner, steps, 2), run_ahead(plain_runner(decoder), steps))
    assert runner.kernel_passes["too_many_tokens"] and runner.graph_passes["mixed"]
    runner.release_graphs()
    steps = [random_steps.step(number) for number in range(24, 30)]
    assert len(run_ahead(runner, steps)) == len(steps) and runner.kernel_passes["no_graphs"] == len(steps)
