"""From a loaded decoder to a runner on its accelerator: kernels, the memory that steps take, KV pool, graphs.

The pool gets what is left once everything else has been measured beside a small pool for trial. On a CPU, where the
same runner computes with torch's operators, nothing is measured and nothing captured.
"""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Protocol

import structlog
import torch

from common.step import Step
from worker_svc.description import PhaseClock
from worker_svc.gpu.memory_profile import MemoryProfile
from worker_svc.memory.kv_pool import BlockShape, KVPool
from worker_svc.memory.pool_plan import PoolSizeError, gib
from worker_svc.steps.step_limits import StepLimits
from worker_svc.steps.step_runner import StepRunner, result_of
from worker_svc.steps.trial_steps import largest_step, num_trial_blocks, warm_up_steps

log = structlog.get_logger()


class GraphRunner(StepRunner, Protocol):
    """A runner that can launch a whole decode step at once."""

    def warm_up(self) -> None:
        """Has the kernels compiled that only some steps without prompts need."""

    def capture_graphs(self) -> None:
        """Until then each kernel is launched by itself."""

    def release_graphs(self) -> None:
        """Gives their memory back."""


MakeRunner = Callable[[KVPool, StepLimits], GraphRunner]


def start_runner(make: MakeRunner, pool: KVPool, limits: StepLimits, *, graphs: bool, clock: PhaseClock) -> GraphRunner:
    """A runner for this pool, warmed up. Raises PoolSizeError if the pool leaves it too little memory."""
    with _short_memory_said(f"beside a pool of {pool.num_blocks} blocks, {gib(pool.blocks.nbytes)},"):
        runner = make(pool, limits)
        if graphs:
            with clock.phase("graphs"):
                runner.capture_graphs()
        with clock.phase("warm_up"):
            _run(runner, warm_up_steps(limits))
    return runner


def measure_memory(
    make: MakeRunner, shape: BlockShape, limits: StepLimits, device: torch.device, *, graphs: bool, clock: PhaseClock
) -> MemoryProfile:
    """What steps take of a CUDA device beside the pool; compiles the kernels that they need.

    All that is on the device already counts as weights. Nothing of the trial is left behind, but for the kernels.
    Raises PoolSizeError if the device does not hold even that.
    """
    with _short_memory_said("with the model loaded"):
        profile = _try(make, shape, limits, device, graphs=graphs, clock=clock)
    _settled_free_bytes(device)  # the trial's memory goes back
    log.info("memory measured", bytes=profile.parts)
    return profile


def _try(
    make: MakeRunner, shape: BlockShape, limits: StepLimits, device: torch.device, *, graphs: bool, clock: PhaseClock
) -> MemoryProfile:
    with clock.phase("kernels"):
        weights = _allocated_bytes(device)
        limits = replace(limits, num_blocks=num_trial_blocks(limits), num_host_blocks=0)
        pool = KVPool(shape, limits.num_blocks, device)
        runner = make(pool, limits)
        compile_kernels(runner, limits)
    with clock.phase("profile"):
        free = _settled_free_bytes(device)
        return MemoryProfile(
            total=torch.cuda.mem_get_info(device)[1],
            free=free,
            weights=weights,
            trial_pool=pool.blocks.nbytes,
            buffers=_allocated_bytes(device) - weights - pool.blocks.nbytes,
            activations=_activation_bytes(runner, limits, device),
            graphs=_graph_bytes(runner, device) if graphs else 0,
        )


def compile_kernels(runner: GraphRunner, limits: StepLimits) -> None:
    """Launches all that steps can, in all the forms that a compiler would tell apart, with graphs or without."""
    runner.warm_up()
    _run(runner, warm_up_steps(limits))


def _activation_bytes(runner: GraphRunner, limits: StepLimits, device: torch.device) -> int:
    """The most that the largest step adds, with what the allocator loses by taking it in pieces."""
    before = torch.cuda.memory_reserved(device)
    torch.cuda.reset_peak_memory_stats(device)
    _run(runner, [largest_step(limits)])
    return torch.cuda.max_memory_reserved(device) - before


def _graph_bytes(runner: GraphRunner, device: torch.device) -> int:
    """Of all graphs: their tensors, and what the driver keeps of them."""
    before = _settled_free_bytes(device)
    runner.capture_graphs()
    after = _settled_free_bytes(device)
    runner.release_graphs()
    return max(0, before - after)


def _settled_free_bytes(device: torch.device) -> int:
    """The device's free memory with nothing under way, and nothing kept that no tensor has."""
    torch.cuda.synchronize(device)
    gc.collect()
    torch.cuda.empty_cache()
    return int(torch.cuda.mem_get_info(device)[0])


def _allocated_bytes(device: torch.device) -> int:
    return int(torch.cuda.memory_allocated(device))


def _run(runner: StepRunner, steps: list[Step]) -> None:
    for step in steps:
        result_of(runner.launch(step))


@contextmanager
def _short_memory_said(where: str) -> Iterator[None]:
    try:
        yield
    except torch.cuda.OutOfMemoryError as error:
        raise PoolSizeError(
            f"{where} the device's memory does not hold what steps and their graphs take: give fewer "
            "--max-batched-tokens or --max-num-seqs, --no-graphs, or a smaller --kv-memory-fraction or --num-blocks"
        ) from error
