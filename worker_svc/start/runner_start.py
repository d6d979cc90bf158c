"""Starts a runner for a loaded decoder, the plain one or the accelerator's: plans its KV pool and warms it up.

Knows how much memory each may take, and the settings that decide it.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from threading import Thread
from typing import NamedTuple

import structlog
import torch

from kernels.native.cpu_kernels import CpuKernels
from kernels.native.host_memory import take_memory
from kernels.native.shared_ranks import RankReduction
from quire import machine
from quire.worker_settings import WorkerSettings
from worker_svc.cpu.host_decoder import HostDecoder
from worker_svc.cpu.runner import CpuRunner, PassModel
from worker_svc.cpu.step_memory import step_buffer_bytes
from worker_svc.description import MemoryUse, PhaseClock
from worker_svc.gpu.graphs import graph_sizes
from worker_svc.gpu.runner import DeviceRunner
from worker_svc.gpu.start import measure_memory, start_runner
from worker_svc.memory.kv_pool import BlockShape, KVPool, free_memory_bytes
from worker_svc.memory.main_memory import MainMemory
from worker_svc.memory.pool_plan import (
    FreeMemory,
    PoolPlan,
    PoolRequest,
    PoolSizeError,
    SequenceLimits,
    gib,
    longest_sequence,
    plan_pool,
)
from worker_svc.model.decoder import Decoder
from worker_svc.operations import Operations
from worker_svc.ranks.lead_decoder import LeadDecoder, LeadPool
from worker_svc.ranks.rank_group import RankGroup
from worker_svc.runner_choice import RunnerChoice
from worker_svc.sampling.seat_grammars import SeatGrammars
from worker_svc.start.block_travel import num_fetched_blocks
from worker_svc.start.device_kernels import compilation_for, operations_for
from worker_svc.steps.fetched_blocks import FetchedBlocks
from worker_svc.steps.step_limits import StepLimits
from worker_svc.steps.step_runner import StepRunner
from worker_svc.steps.trial_steps import warm_up_steps

_CPU_BYTES_AT_HAND = 256 << 20  # most of the pool's memory that is taken at the start; the rest is taken when used
_CPU_PART_AT_HAND = 0.25
# Of a step. On a CPU the cost per row of a product is constant from 256 rows on: larger steps only delay others.
_CPU_BATCHED_TOKENS, _CUDA_BATCHED_TOKENS = 512, 8192
_CPU_LEAST_TOKENS = 1024  # of a pool if little memory is free
_UNMEASURED_FRACTION = 0.85  # of the memory beside the weights on a CUDA device; the rest is for activations
_MEASURED_FRACTION = 0.95  # of the memory beside all measured uses; the rest is for fragmentation

log = structlog.get_logger()


class Lead(NamedTuple):
    """Rank 0's part in a tensor-parallel group whose ranks have loaded their weights."""

    group: RankGroup
    reduction: RankReduction
    weight_bytes: Sequence[int]  # of the other ranks
    num_on_machine: int  # ranks on rank 0's machine


class StartedRunner(NamedTuple):
    """A runner with its limits and its use of memory."""

    runner: StepRunner
    limits: StepLimits
    pool: KVPool
    fetched: FetchedBlocks  # memory of the pool
    memory: MemoryUse


def start_cpu_runner(
    settings: WorkerSettings,
    decoder: Decoder,
    choice: RunnerChoice,
    clock: PhaseClock,
    kernels: CpuKernels,
    grammars: SeatGrammars | None,
    lead: Lead | None = None,
) -> StartedRunner:
    """Start the CPU's runner, which finishes each step in `launch`. Raises PoolSizeError.

    `lead`: of a tensor-parallel group, of which this process is rank 0 and `decoder` its part; the limits and the use
    of memory are then those of the group.
    """
    shape = decoder.block_shape(settings.block_size, choice.kv_dtype)
    num_on_machine = 1 if lead is None else lead.num_on_machine
    with clock.phase("kv_pool"):
        step_bytes = _step_bytes(settings, decoder)
        plan = plan_cpu_pool(settings, decoder, shape, num_on_machine)
        if lead is not None:
            plan = replace(plan, num_blocks=lead.group.agree_on_blocks(plan.num_blocks))
        with _refuse_short_memory():
            pool = _make_pool(settings, shape, plan.num_blocks, decoder.device, lead)
    limits = _limits(settings, decoder, plan)
    with clock.phase("warm_up"), _refuse_short_memory():
        host = HostDecoder(decoder, kernels, None if lead is None else lead.reduction)
        host.reserve(limits.max_batched_tokens)
        model: PassModel = host if lead is None else LeadDecoder(host, lead.group, lead.reduction)
        runner = CpuRunner(model, pool, limits)
        for step in warm_up_steps(limits):
            runner.launch(step)
        take_memory_in_background(host, pool, whole=settings.role == "decode")
    runner = CpuRunner(model, pool, limits, grammars)
    memory = _memory_use(decoder, pool, step_bytes)
    if lead is not None:
        lead.group.watch(lead.reduction)
        memory = _memory_of_group(memory, lead)
    return StartedRunner(runner, limits, pool, runner.fetched, memory)


def plan_cpu_pool(settings: WorkerSettings, decoder: Decoder, shape: BlockShape, num_on_machine: int = 1) -> PoolPlan:
    """Plan the pool of a process on a CPU, one of `num_on_machine` that load at the same time and share its memory.

    Raises PoolSizeError.
    """
    step_bytes = _step_bytes(settings, decoder)
    return _plan(settings, decoder, shape, _pool_room(settings, decoder.device, step_bytes, num_on_machine))


def take_memory_in_background(model: HostDecoder, pool: KVPool, *, whole: bool = False) -> Thread:
    """Take the memory that the first prompts write: on some machines that takes as long as computing them.

    `whole`: all of the pool, for a worker into whose pool prompts come at once, between the tokens of other requests.
    """
    thread = Thread(target=_take_memory, args=(model, pool, whole), name="memory", daemon=True)
    thread.start()
    return thread


@contextmanager
def _refuse_short_memory() -> Iterator[None]:
    """Raises PoolSizeError if the system refuses memory. If it grants more than it has, it kills the process later."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and "can't allocate memory" not in str(error):
            raise
        raise PoolSizeError(
            "the main memory does not hold what steps and the KV pool take: give fewer --max-batched-tokens or "
            "--max-num-seqs, or a smaller --num-blocks, --kv-memory-bytes or --num-host-blocks"
        ) from error


def _take_memory(model: HostDecoder, pool: KVPool, whole: bool) -> None:
    model.take_memory()
    if whole:
        take_memory(pool.fetched_blocks, pool.fetched_blocks.nbytes)
    most = pool.blocks.nbytes if whole else min(_CPU_BYTES_AT_HAND, int(pool.blocks.nbytes * _CPU_PART_AT_HAND))
    take_memory(pool.blocks, most)


def start_device_runner(
    settings: WorkerSettings,
    decoder: Decoder,
    choice: RunnerChoice,
    clock: PhaseClock,
    grammars: SeatGrammars | None,
    on_compiled: Callable[[float], None],
) -> StartedRunner:
    """Start the accelerator's runner, telling `on_compiled` which part of the kernels is compiled, from 0 to 1.

    On a CPU it uses torch's operators. Raises PoolSizeError.
    """
    shape = decoder.block_shape(settings.block_size, choice.kv_dtype)
    graphs = settings.graphs and choice.device.type == "cuda"

    def make_with(operations: Operations, pool: KVPool, limits: StepLimits) -> DeviceRunner:
        return DeviceRunner(decoder, pool, limits, operations, graph_sizes(limits.num_seats), grammars=grammars)

    make = partial(make_with, operations_for(choice))

    step_bytes = _step_bytes(settings, decoder)
    room = _pool_room(settings, choice.device, step_bytes)
    max_mixed_tokens = None
    if choice.device.type == "cuda":
        trial = PoolPlan(num_blocks=0, max_model_len=longest_sequence(_sequences(settings, decoder)))
        limits = _limits(settings, decoder, trial)
        ahead = compilation_for(choice, make_with, on_compiled)
        profile = measure_memory(make, shape, limits, choice.device, graphs=graphs, clock=clock, compile_ahead=ahead)
        max_mixed_tokens = profile.max_mixed_tokens
        step_bytes = profile.buffers + profile.activations + profile.graphs
        room = _PoolRoom(profile.available, _MEASURED_FRACTION)
    with clock.phase("kv_pool"):
        plan = _plan(settings, decoder, shape, room)
        pool = _make_pool(settings, shape, plan.num_blocks, choice.device)
    limits = _limits(settings, decoder, plan)
    runner = start_runner(make, pool, limits, graphs=graphs, clock=clock, max_mixed_tokens=max_mixed_tokens)
    return StartedRunner(runner, limits, pool, runner.fetched, _memory_use(decoder, pool, step_bytes))


def _make_pool(
    settings: WorkerSettings, shape: BlockShape, num_blocks: int, device: torch.device, lead: Lead | None = None
) -> KVPool:
    """The pool, of rank 0 if this process leads a group. Blocks of a group do not travel: each rank has a part."""
    if lead is not None:
        return LeadPool(shape, num_blocks, device, settings.num_host_blocks, lead.group)
    num_fetched = num_fetched_blocks(settings.fetch_memory_bytes, num_blocks, shape.bytes_per_block)
    return KVPool(shape, num_blocks, device, settings.num_host_blocks, num_fetched)


class _PoolRoom(NamedTuple):
    """Bytes that a pool may take, and the part of them that a pool without a configured size takes."""

    free: int
    fraction: float


def _pool_room(settings: WorkerSettings, device: torch.device, step_bytes: int, num_on_machine: int = 1) -> _PoolRoom:
    """Room beside the loaded weights and a step's buffers, an equal part of it for each process of a group.

    A pool sized in blocks or bytes may take all free memory, or all that is left of this worker's share.
    """
    free = free_memory_bytes(device) // num_on_machine
    if device.type == "cuda":
        return _PoolRoom(free, _UNMEASURED_FRACTION)
    memory = MainMemory(
        free=free,
        taken=machine.own_memory_bytes(),
        share=settings.memory_bytes,
        is_limited=machine.has_memory_limit(),
    )
    if settings.num_blocks is not None or settings.kv_memory_bytes is not None:
        return _PoolRoom(memory.available, memory.fraction)
    return _PoolRoom(memory.for_pool(step_bytes), memory.fraction)


def _plan(settings: WorkerSettings, decoder: Decoder, shape: BlockShape, room: _PoolRoom) -> PoolPlan:
    on_cpu = decoder.device.type == "cpu"
    plan = plan_pool(
        PoolRequest(
            num_blocks=settings.num_blocks,
            memory_bytes=settings.kv_memory_bytes,
            fraction=settings.kv_memory_fraction,
            default_fraction=room.fraction,
            share=settings.memory_bytes if on_cpu else None,
            default_least_tokens=_CPU_LEAST_TOKENS if on_cpu else 0,
            num_host_blocks=settings.num_host_blocks,
        ),
        _sequences(settings, decoder),
        FreeMemory(device=room.free, host=None if on_cpu else free_memory_bytes(torch.device("cpu"))),
        shape.bytes_per_block,
    )
    pool_tokens = plan.num_blocks * settings.block_size
    if settings.num_blocks is None and settings.kv_memory_bytes is None and pool_tokens < plan.max_model_len:
        log.warning(
            f"little memory: the KV pool holds {pool_tokens} tokens, less than one sequence of {plan.max_model_len}; "
            "free memory, or give --kv-memory-bytes, --kv-dtype int8 or a smaller --max-model-len",
            free=gib(room.free),
        )
    return plan


def _step_bytes(settings: WorkerSettings, decoder: Decoder) -> int:
    return step_buffer_bytes(
        decoder.config,
        decoder.dtype,
        num_tokens=batched_tokens(settings, decoder.device),
        num_rows=settings.max_num_seqs,
    )


def batched_tokens(settings: WorkerSettings, device: torch.device) -> int:
    """Most tokens that one step computes."""
    return settings.max_batched_tokens or (_CUDA_BATCHED_TOKENS if device.type == "cuda" else _CPU_BATCHED_TOKENS)


def _memory_of_group(own: MemoryUse, lead: Lead) -> MemoryUse:
    """Memory of all ranks, given rank 0's."""
    return MemoryUse(
        weight_bytes=own.weight_bytes + sum(lead.weight_bytes),
        kv_pool_bytes=own.kv_pool_bytes * lead.group.size,
        host_pool_bytes=own.host_pool_bytes * lead.group.size,
        step_bytes=own.step_bytes * lead.group.size,
    )


def _memory_use(decoder: Decoder, pool: KVPool, step_bytes: int) -> MemoryUse:
    return MemoryUse(
        weight_bytes=decoder.weight_bytes,
        kv_pool_bytes=pool.blocks.nbytes,
        host_pool_bytes=pool.host_blocks.nbytes,
        step_bytes=step_bytes,
        fetch_bytes=pool.fetched_blocks.nbytes,
    )


def _sequences(settings: WorkerSettings, decoder: Decoder) -> SequenceLimits:
    return SequenceLimits(
        num_seats=settings.max_num_seqs,
        block_size=settings.block_size,
        model_len=decoder.config.max_model_len,
        max_model_len=settings.max_model_len,
    )


def _limits(settings: WorkerSettings, decoder: Decoder, plan: PoolPlan) -> StepLimits:
    return StepLimits(
        num_seats=settings.max_num_seqs,
        num_blocks=plan.num_blocks,
        num_host_blocks=settings.num_host_blocks,
        block_size=settings.block_size,
        vocab_size=decoder.config.vocab_size,
        max_model_len=plan.max_model_len,
        max_batched_tokens=batched_tokens(settings, decoder.device),
    )
