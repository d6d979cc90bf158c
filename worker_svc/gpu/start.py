"""Starts the accelerator's runner for a loaded decoder: compiles kernels, measures memory, captures graphs.

The pool gets the memory that is left after all other uses were measured beside a small trial pool. On a CPU, where the
same runner computes with torch's operators, nothing is measured and nothing captured.
"""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import NamedTuple, Protocol, TypeVar

import structlog
import torch

from common.step import Step
from worker_svc.description import PhaseClock
from worker_svc.gpu.device_loss import is_short_of_memory
from worker_svc.gpu.memory_profile import MemoryProfile, graph_tokens
from worker_svc.memory.kv_pool import BlockShape, KVPool, free_memory_bytes
from worker_svc.memory.pool_plan import PoolSizeError, gib
from worker_svc.steps.step_limits import StepLimits
from worker_svc.steps.step_runner import StepRunner, result_of
from worker_svc.steps.trial_steps import largest_step, num_trial_blocks, warm_up_steps

log = structlog.get_logger()

_STEPS = "what steps and their graphs take"
_FEWER_STEPS = (
    "give fewer --max-batched-tokens or --max-num-seqs, --no-graphs, or a smaller --kv-memory-fraction or --num-blocks"
)


class GraphRunner(StepRunner, Protocol):
    """A runner that can launch a whole decode step as one graph."""

    def warm_up(self) -> None:
        """Compiles the kernels that only some steps without prompts need."""

    def capture_graphs(self, max_mixed_tokens: int | None = None) -> None:
        """Captures the graphs, those with prompts of at most so many tokens; until then kernels are launched apart."""

    def release_graphs(self) -> None:
        """Frees the graphs' memory."""


R = TypeVar("R", bound=GraphRunner)
MakeRunner = Callable[[KVPool, StepLimits], GraphRunner]
CompileAhead = Callable[[KVPool, StepLimits], None]  # for the steps that fit these limits and this pool
AgreeOnLeast = Callable[[int], int]  # the least number of all ranks of a group; of a process by itself its own


class Preparation(NamedTuple):
    """Needs of a trial: compiled kernels, and the consent of a group's ranks."""

    compile_ahead: CompileAhead
    agree_on_least: AgreeOnLeast


def start_runner(
    make: Callable[[KVPool, StepLimits], R],
    pool: KVPool,
    limits: StepLimits,
    *,
    graphs: bool,
    clock: PhaseClock,
    max_mixed_tokens: int | None = None,
) -> R:
    """A runner for this pool, warmed up. Raises PoolSizeError if the pool leaves too little memory for it.

    max_mixed_tokens: of the largest graph with prompts; None: of the largest step.
    """
    with refuse_short_memory(f"beside a pool of {pool.num_blocks} blocks, {gib(pool.blocks.nbytes)},"):
        runner = make(pool, limits)
        if graphs:
            with clock.phase("graphs"):
                runner.capture_graphs(max_mixed_tokens)
        with clock.phase("warm_up"):
            _run(runner, warm_up_steps(limits))
    return runner


def measure_memory(
    make: MakeRunner,
    shape: BlockShape,
    limits: StepLimits,
    device: torch.device,
    *,
    graphs: bool,
    clock: PhaseClock,
    prepare: Preparation,
) -> MemoryProfile:
    """Memory of a CUDA device that steps take beside the pool; compiles the kernels that they need.

    Ranks of a group do so at the same time, and capture the same graphs. Memory that is in use already counts as
    weights. The trial leaves nothing behind but the compiled kernels. Raises PoolSizeError if the device does not hold
    even the trial.
    """
    with refuse_short_memory("with the model loaded"):
        profile = _try(make, shape, limits, device, graphs=graphs, clock=clock, prepare=prepare)
    _settled_free_bytes(device)  # the trial's memory goes back
    log.info("memory measured", bytes=profile.parts, max_mixed_tokens=profile.max_mixed_tokens)
    return profile


def _try(
    make: MakeRunner,
    shape: BlockShape,
    limits: StepLimits,
    device: torch.device,
    *,
    graphs: bool,
    clock: PhaseClock,
    prepare: Preparation,
) -> MemoryProfile:
    weights = _allocated_bytes(device)
    limits = replace(limits, num_blocks=num_trial_blocks(limits), num_host_blocks=0)
    pool = KVPool(shape, limits.num_blocks, device)
    with clock.phase("compiling"):
        prepare.compile_ahead(pool, limits)
        _settled_free_bytes(device)  # what the references took goes back
        prepare.agree_on_least(0)  # which waits for the ranks that compile
    with clock.phase("kernels"):
        runner = make(pool, limits)
        compile_kernels(runner, limits)
    with clock.phase("profile"):
        profile = MemoryProfile(
            total=torch.cuda.mem_get_info(device)[1],
            free=_settled_free_bytes(device),
            weights=weights,
            trial_pool=pool.blocks.nbytes,
            buffers=_allocated_bytes(device) - weights - pool.blocks.nbytes,
            activations=_activation_bytes(runner, limits, device),
            graphs=0,
            max_mixed_tokens=limits.max_batched_tokens,
        )
        if not graphs:
            return profile
        most = prepare.agree_on_least(graph_tokens(profile, limits.max_batched_tokens))
        return replace(profile, graphs=_graph_bytes(runner, device, most), max_mixed_tokens=most)


def compile_kernels(runner: GraphRunner, limits: StepLimits) -> None:
    """Launches every kernel that steps can, in every specialisation that the compiler distinguishes."""
    runner.warm_up()
    _run(runner, warm_up_steps(limits))


def _activation_bytes(runner: GraphRunner, limits: StepLimits, device: torch.device) -> int:
    """Peak memory of the largest step, including the allocator's fragmentation."""
    before = torch.cuda.memory_reserved(device)
    torch.cuda.reset_peak_memory_stats(device)
    _run(runner, [largest_step(limits)])
    return torch.cuda.max_memory_reserved(device) - before


def _graph_bytes(runner: GraphRunner, device: torch.device, max_mixed_tokens: int) -> int:
    """Memory of all graphs: their tensors and the driver's."""
    before = _settled_free_bytes(device)
    runner.capture_graphs(max_mixed_tokens)
    after = _settled_free_bytes(device)
    runner.release_graphs()
    return max(0, before - after)


def _settled_free_bytes(device: torch.device) -> int:
    """Free memory of the idle device, with the allocator's cache emptied."""
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
def refuse_short_memory(where: str, holds: str = _STEPS, remedy: str = _FEWER_STEPS) -> Iterator[None]:
    """Raises PoolSizeError if a device's memory, or main memory that it pins, does not hold what is made here."""
    try:
        yield
    except RuntimeError as error:
        if not is_short_of_memory(error):
            raise
        raise PoolSizeError(f"{where} the device's memory does not hold {holds}: {remedy}") from error


@contextmanager
def refuse_large_weights(device: torch.device) -> Iterator[None]:
    """Raises PoolSizeError if a CUDA device's memory ends while weights are loaded. On a CPU the system decides."""
    if device.type != "cuda":
        yield
        return
    with refuse_short_memory(
        f"with {gib(free_memory_bytes(device))} free on {device}",
        "the model's weights",
        "give --weight-dtype int4 or fp8, --tensor-parallel over more GPUs, or a smaller model",
    ):
        yield
