"""Runners with a real decoder and a small poisoned pool, for the worker's tests: the CPU's and the accelerator's.

The latter computes without graphs, or with recorded ones.
"""

from collections import deque
from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from common.step import Step, StepResult
from kernels.native.torch_kernels import TorchKernels
from tests.worker.device.recorded_graphs import RecordedGraphs
from tests.worker.paged_runner import PagedSequence, forward_batch, reference_logits
from tests.worker.tiny_models import MAX_POSITIONS
from worker_svc.cpu.host_decoder import HostDecoder
from worker_svc.cpu.runner import CpuRunner
from worker_svc.gpu.graphs import graph_sizes
from worker_svc.gpu.runner import DeviceRunner
from worker_svc.gpu.torch_operations import OPERATIONS
from worker_svc.memory.kv_pool import KVPool
from worker_svc.model.decoder import Decoder
from worker_svc.steps.step_limits import StepLimits
from worker_svc.steps.step_runner import PendingStep, StepRunner, result_of

NUM_BLOCKS, NUM_HOST_BLOCKS, NUM_FETCHED_BLOCKS, BLOCK_SIZE, NUM_SEATS = 96, 32, 16, 4, 12


class SteppedRunner:
    """Runner of any kind, one step at a time."""

    def __init__(self, runner: CpuRunner | DeviceRunner) -> None:
        self._runner = runner
        self.fetched = runner.fetched

    def run(self, step: Step) -> StepResult:
        return result_of(self._runner.launch(step))


class MakeRunner(Protocol):
    """A kind of runner."""

    def __call__(self, decoder: Decoder, *, max_prompt_logits: int = 1 << 20) -> tuple[SteppedRunner, KVPool]: ...


def make_cpu_runner(decoder: Decoder, *, max_prompt_logits: int = 1 << 20) -> tuple[SteppedRunner, KVPool]:
    """Make a runner with the kernels' torch references."""
    pool = poisoned_pool(decoder)
    runner = CpuRunner(
        HostDecoder(decoder, TorchKernels()), pool, limits_for(decoder), max_prompt_logits=max_prompt_logits
    )
    return SteppedRunner(runner), pool


def make_device_runner(decoder: Decoder, *, max_prompt_logits: int = 1 << 20) -> tuple[SteppedRunner, KVPool]:
    """Make a runner with the kernels' torch references, and batches padded as for graphs."""
    pool, limits = poisoned_pool(decoder), limits_for(decoder)
    sizes = graph_sizes(limits.num_seats)
    return SteppedRunner(
        DeviceRunner(decoder, pool, limits, OPERATIONS, sizes, max_prompt_logits=max_prompt_logits)
    ), pool


def make_graph_runner(decoder: Decoder, *, max_prompt_logits: int = 1 << 20) -> tuple[SteppedRunner, KVPool]:
    """Make a runner like the device's, whose passes are captured and replayed."""
    pool, limits, graphs = poisoned_pool(decoder), limits_for(decoder), RecordedGraphs()
    runner = DeviceRunner(
        decoder,
        pool,
        limits,
        graphs.operations(OPERATIONS),
        graph_sizes(limits.num_seats),
        max_prompt_logits=max_prompt_logits,
        graphs=graphs,
    )
    runner.capture_graphs()
    return SteppedRunner(runner), pool


MAKE_RUNNERS = {"cpu": make_cpu_runner, "device": make_device_runner, "graphs": make_graph_runner}


def poisoned_pool(decoder: Decoder) -> KVPool:
    """NaN wherever nothing was written."""
    shape = decoder.block_shape(BLOCK_SIZE)
    pool = KVPool(shape, NUM_BLOCKS, decoder.device, NUM_HOST_BLOCKS, NUM_FETCHED_BLOCKS)
    pool.blocks.fill_(float("nan"))
    pool.host_blocks.fill_(float("nan"))
    pool.fetched_blocks.fill_(float("nan"))
    return pool


def limits_for(decoder: Decoder) -> StepLimits:
    return StepLimits(
        num_seats=NUM_SEATS,
        num_blocks=NUM_BLOCKS,
        num_host_blocks=NUM_HOST_BLOCKS,
        block_size=BLOCK_SIZE,
        vocab_size=decoder.config.vocab_size,
        max_model_len=MAX_POSITIONS,
        max_batched_tokens=256,
    )


def full_logits(decoder: Decoder, token_ids: list[int]) -> Tensor:
    """The logits at every position, computed in one pass."""
    num_blocks = -(-len(token_ids) // BLOCK_SIZE)
    sequence = PagedSequence(token_ids, len(token_ids), list(range(num_blocks)))
    batch = forward_batch([sequence], [len(token_ids)], BLOCK_SIZE, all_logits=True)
    return reference_logits(decoder, batch, KVPool(decoder.block_shape(BLOCK_SIZE), num_blocks, decoder.device))


def run_ahead(runner: StepRunner, steps: Sequence[Step], depth: int = 1) -> list[StepResult]:
    """Run steps, of which `depth` are launched before the first of them is answered."""
    launched: deque[StepResult | PendingStep] = deque()
    results: list[StepResult] = []
    for step in steps:
        launched.append(runner.launch(step))
        if len(launched) == depth:
            results.append(result_of(launched.popleft()))
    return results + [result_of(pending) for pending in launched]
