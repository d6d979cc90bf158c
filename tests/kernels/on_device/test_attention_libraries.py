"""Libraries of attention on a device, as a runner launches them; without a GPU doubles of them, beside our kernels.

Those that are not installed are left out, and say so: they are no dependency.
"""

from contextlib import nullcontext
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from common.step import Step, StepResult
from tests.kernels.on_device.devices import DEVICE, HAS_GPU
from tests.worker.device.flash_attention_double import FlashAttentionDouble
from tests.worker.device.flashinfer_double import FlashInferDouble
from tests.worker.device.recorded_graphs import RecordedGraphs
from tests.worker.device.sample_steps import comparable, decode_steps
from tests.worker.runners import NUM_SEATS, limits_for, poisoned_pool, run_ahead
from tests.worker.tiny_models import write_tiny_model
from worker_svc.gpu import torch_operations, triton_operations
from worker_svc.gpu.graphs import graph_sizes
from worker_svc.gpu.libraries.flash_attention import FlashAttention
from worker_svc.gpu.libraries.flashinfer import FlashInfer
from worker_svc.gpu.libraries.library import NO_LIBRARIES, AttentionLibrary, PassLibraries
from worker_svc.gpu.runner import DeviceRunner
from worker_svc.model.decoder import Decoder, load_decoder
from worker_svc.option_check import installed_attention
from worker_svc.start.attention_choice import usable_libraries
from worker_svc.start.attention_libraries import load_library
from worker_svc.start.attention_trial import AttentionTrial, Launch, TrialSize, results_agree

NAMES = ("flashinfer", "flash-attn")
DTYPES = [torch.float16, *([torch.bfloat16] if HAS_GPU else [])]


class OneLaunch:
    """Clock of nothing: launches once."""

    def launch_us(self, launch: Launch) -> float:
        """See LaunchClock.launch_us."""
        launch()
        return 1.0


def library(name: str, graphs: RecordedGraphs) -> AttentionLibrary:
    if HAS_GPU:
        if name not in installed_attention():
            pytest.skip(f"{name} is not installed")
        return load_library(name)
    if name == FlashAttention.name:
        return FlashAttention(FlashAttentionDouble(graphs.recorded), "double")
    return FlashInfer(FlashInferDouble(graphs.recorded, lambda: graphs.is_capturing), "double")


def libraries_for(name: str, decoder: Decoder, graphs: RecordedGraphs) -> PassLibraries:
    """The library for all kinds of pass that it can compute on this device."""
    found = library(name, graphs)
    if not HAS_GPU:  # doubles take small heads, too
        return PassLibraries(found, found)
    capability = torch.cuda.get_device_capability()
    usable = usable_libraries([found], decoder.config, decoder.dtype, decoder.dtype, capability)
    if not usable.decode:
        pytest.skip(f"{name} does not compute this on a device of compute capability {capability}")
    return PassLibraries(usable.decode[0], usable.mixed[0] if usable.mixed else None)


def decoder_of(folder: Path, dtype: torch.dtype) -> Decoder:
    """Small in the interpreter, which is slow."""
    family = "llama_heads_of_64" if HAS_GPU else "llama_gqa"
    return load_decoder(write_tiny_model(family, folder), dtype, DEVICE)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_a_library_gives_the_references_attention(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """Compare a pass of one token a row and one with a prompt's chunk, through views of all layers of a pool."""
    decoder = decoder_of(tmp_path, dtype)
    chosen = libraries_for(name, decoder, RecordedGraphs())
    size = TrialSize(num_rows=40, context=250, chunk=170) if HAS_GPU else TrialSize(num_rows=2, context=20, chunk=9)
    trial = AttentionTrial(decoder, decoder.block_shape(16), torch_operations.OPERATIONS, size)
    expected = trial.decode(None, OneLaunch()).out
    assert results_agree(expected, trial.decode(chosen.decode, OneLaunch()).out)
    if chosen.mixed is not None:
        expected = trial.mixed(None, OneLaunch()).out
        assert results_agree(expected, trial.mixed(chosen.mixed, OneLaunch()).out)


class OurSteps(NamedTuple):
    """Steps, and their results by our own kernels."""

    decoder: Decoder
    steps: list[Step]
    results: list[StepResult]


@pytest.fixture(scope="module")
def our_steps(tmp_path_factory: pytest.TempPathFactory) -> OurSteps:
    decoder = decoder_of(tmp_path_factory.mktemp("model"), torch.float16)
    steps = decode_steps(12 if HAS_GPU else 2)
    return OurSteps(decoder, steps, run(decoder, steps, NO_LIBRARIES, RecordedGraphs()))


@pytest.mark.parametrize("name", NAMES)
def test_steps_by_graphs_have_the_tokens_of_our_own_kernels(name: str, our_steps: OurSteps) -> None:
    decoder, steps, ours = our_steps
    graphs = RecordedGraphs()
    theirs = run(decoder, steps, libraries_for(name, decoder, graphs), graphs)
    assert [comparable(result) for result in theirs] == [comparable(result) for result in ours]
    for result, expected in zip(theirs, ours, strict=True):
        for index, row in expected.logprobs.items():
            assert list(result.logprobs[index].logprobs) == pytest.approx(list(row.logprobs), abs=2e-2)


def run(
    decoder: Decoder, steps: list[Step], libraries: PassLibraries, graphs: RecordedGraphs, depth: int = 2
) -> list[StepResult]:
    """Launch `depth` steps before the first of them is answered."""
    operations, sizes, recorded = triton_operations.OPERATIONS, graph_sizes(NUM_SEATS), None
    if not HAS_GPU:  # in the interpreter, which is slow
        operations, sizes, recorded = graphs.operations(operations), (NUM_SEATS,), graphs
    runner = DeviceRunner(
        decoder, poisoned_pool(decoder), limits_for(decoder), operations, sizes, graphs=recorded, libraries=libraries
    )
    with nullcontext() if recorded is None else recorded.standing_in(torch_operations.OPERATIONS):
        runner.capture_graphs(None if HAS_GPU else 64)
    results = run_ahead(runner, steps, depth)
    assert not any(runner.kernel_passes.values())
    return results
