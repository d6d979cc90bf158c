"""Starts a runner for a loaded decoder, the plain one or the accelerator's: plans its KV pool and warms it up.

Knows how much memory each may take, and the settings that decide it.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from threading import Thread
from typing import NamedTuple

import torch

from kernels.native.cpu_kernels import CpuKernels
from kernels.native.host_memory import take_memory
from kernels.native.shared_ranks import RankReduction
from quire.worker_settings import WorkerSettings
from worker_svc.cpu.host_decoder import HostDecoder, rotary_bytes
from worker_svc.cpu.runner import CpuRunner, PassModel
from worker_svc.description import MemoryUse, PhaseClock
from worker_svc.gpu.graphs import graph_sizes
from worker_svc.gpu.libraries.library import NO_LIBRARIES
from worker_svc.gpu.lone_rank import LoneRank
from worker_svc.gpu.runner import DeviceRunner
from worker_svc.gpu.start import Preparation, measure_memory, refuse_short_memory, start_runner
from worker_svc.memory.kv_pool import BlockShape, KVPool, free_memory_bytes
from worker_svc.memory.pool_plan import PoolPlan, PoolSizeError, gib, longest_sequence
from worker_svc.model.decoder import Decoder
from worker_svc.operations import Operations
from worker_svc.ranks.lead_decoder import LeadDecoder, LeadPool
from worker_svc.ranks.lead_runner import LeadRunner
from worker_svc.ranks.rank_group import RankGroup
from worker_svc.ranks.rank_place import RankPlace
from worker_svc.runner_choice import RunnerChoice
from worker_svc.sampling.seat_grammars import SeatGrammars
from worker_svc.start.attention_choice import start_attention
from worker_svc.start.block_travel import num_fetched_blocks
from worker_svc.start.device_kernels import compilation_for, operations_for
from worker_svc.start.pool_sizes import (
    PoolRoom,
    memory_use,
    plan_in_room,
    pool_room,
    sequences_of,
    step_bytes_of,
    step_limits,
)
from worker_svc.steps.fetched_blocks import FetchedBlocks
from worker_svc.steps.step_limits import StepLimits
from worker_svc.steps.step_runner import StepRunner
from worker_svc.steps.trial_steps import warm_up_steps

_CPU_BYTES_AT_HAND = 256 << 20  # most of the pool's memory that is taken at the start; the rest is taken when used
_CPU_PART_AT_HAND = 0.25
_MEASURED_FRACTION = 0.95  # of the memory beside all measured uses; the rest is for fragmentation


class Lead(NamedTuple):
    """Rank 0's part in a tensor-parallel group whose ranks have loaded their weights."""

    group: RankGroup
    reduction: RankReduction
    weight_bytes: Sequence[int]  # of the other ranks
    num_on_machine: int  # ranks on rank 0's machine

    @property
    def place(self) -> RankPlace:
        """Rank 0's place."""
        return RankPlace(self.reduction, self.group.agree_on_least, self.num_on_machine, compiles=True)


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
        step_bytes = step_bytes_of(settings, decoder)
        with _refuse_short_memory():
            host = host_decoder(settings, decoder, kernels, None if lead is None else lead.reduction)
        plan = plan_cpu_pool(settings, decoder, shape, num_on_machine)
        if lead is not None:
            plan = replace(plan, num_blocks=lead.group.agree_on_least(plan.num_blocks))
        with _refuse_short_memory():
            pool = _make_pool(settings, shape, plan.num_blocks, decoder.device, lead)
    limits = step_limits(settings, decoder, plan)
    with clock.phase("warm_up"), _refuse_short_memory():
        host.reserve(limits.max_batched_tokens)
        model: PassModel = host if lead is None else LeadDecoder(host, lead.group, lead.reduction)
        runner = CpuRunner(model, pool, limits)
        for step in warm_up_steps(limits):
            runner.launch(step)
        take_memory_in_background(host, pool, whole=settings.role == "decode")
    runner = CpuRunner(model, pool, limits, grammars)
    memory = memory_use(decoder, pool, step_bytes)
    if lead is not None:
        lead.group.watch(lead.reduction)
        memory = _memory_of_group(memory, lead)
    return StartedRunner(runner, limits, pool, runner.fetched, memory)


def host_decoder(
    settings: WorkerSettings, decoder: Decoder, kernels: CpuKernels, ranks: RankReduction | None
) -> HostDecoder:
    """The decoder with the table that it keeps, made before its pool is planned, which then counts that memory.

    Raises PoolSizeError if the table takes more than is free.
    """
    num_positions = longest_sequence(sequences_of(settings, decoder))
    free, needed = free_memory_bytes(decoder.device), rotary_bytes(decoder.config, num_positions)
    if needed > free:
        raise PoolSizeError(
            f"the rotary angles of {num_positions} positions need {gib(needed)}, and {gib(free)} of the main memory "
            "are free: give a smaller --max-model-len"
        )
    return HostDecoder(decoder, kernels, ranks, num_positions=num_positions)


def plan_cpu_pool(settings: WorkerSettings, decoder: Decoder, shape: BlockShape, num_on_machine: int = 1) -> PoolPlan:
    """Plan the pool of a process on a CPU, one of `num_on_machine` that load at the same time and share its memory.

    Raises PoolSizeError.
    """
    step_bytes = step_bytes_of(settings, decoder)
    return plan_in_room(settings, decoder, shape, pool_room(settings, decoder.device, step_bytes, num_on_machine))


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
            "--max-num-seqs, or a smaller --max-model-len, --num-blocks, --kv-memory-bytes or --num-host-blocks"
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
    place: RankPlace | None = None,
) -> StartedRunner:
    """Start the accelerator's runner, telling `on_compiled` which part of the kernels is compiled, from 0 to 1.

    `place`: of a rank of a tensor-parallel group; all ranks start at the same time, with pools of the same size. On a
    CPU torch's operators compute. Raises PoolSizeError.
    """
    shape = decoder.block_shape(settings.block_size, choice.kv_dtype)
    graphs = settings.graphs and choice.device.type == "cuda"
    operations, libraries = operations_for(choice), NO_LIBRARIES

    def make_with(
        ranks: RankReduction | None, operations: Operations, pool: KVPool, limits: StepLimits
    ) -> DeviceRunner:
        sizes = graph_sizes(limits.num_seats)
        return DeviceRunner(
            decoder, pool, limits, operations, sizes, grammars=grammars, ranks=ranks, libraries=libraries
        )

    make = partial(make_with, None if place is None else place.reduction, operations)
    agree_on_least = _own_number if place is None else place.agree_on_least

    step_bytes = step_bytes_of(settings, decoder)
    num_on_machine = 1 if place is None else place.num_on_machine
    room = pool_room(settings, choice.device, step_bytes, num_on_machine)
    max_mixed_tokens = None
    if choice.device.type == "cuda":
        trial = PoolPlan(num_blocks=0, max_model_len=longest_sequence(sequences_of(settings, decoder)))
        limits = step_limits(settings, decoder, trial)
        with clock.phase("attention"):
            libraries = start_attention(settings.attention, decoder, shape, operations, limits)
        alone = None if place is None else LoneRank(place.reduction.rank, place.reduction.size)
        ahead = compilation_for(choice, partial(make_with, alone), on_compiled)
        if place is not None and not place.compiles:
            ahead = _compile_nothing
        prepare = Preparation(ahead, agree_on_least)
        profile = measure_memory(make, shape, limits, choice.device, graphs=graphs, clock=clock, prepare=prepare)
        max_mixed_tokens = profile.max_mixed_tokens
        step_bytes = profile.buffers + profile.activations + profile.graphs
        room = PoolRoom(profile.available, _MEASURED_FRACTION)
    with clock.phase("kv_pool"):
        plan = plan_in_room(settings, decoder, shape, room, num_on_machine)
        plan = replace(plan, num_blocks=agree_on_least(plan.num_blocks))
        with refuse_short_memory(
            "with the model loaded",
            f"a KV pool of {plan.num_blocks} blocks, {gib(plan.num_blocks * shape.bytes_per_block)}, any more",
            "other processes have taken some; give --kv-memory-bytes to workers that share a device, or a smaller "
            "--num-host-blocks if main memory is short",
        ):
            if place is None:
                pool = _make_pool(settings, shape, plan.num_blocks, choice.device)
            else:
                pool = KVPool(shape, plan.num_blocks, choice.device, settings.num_host_blocks)
    limits = step_limits(settings, decoder, plan)
    runner = start_runner(make, pool, limits, graphs=graphs, clock=clock, max_mixed_tokens=max_mixed_tokens)
    return StartedRunner(runner, limits, pool, runner.fetched, memory_use(decoder, pool, step_bytes))


def lead_device_runner(started: StartedRunner, lead: Lead) -> StartedRunner:
    """The runner of rank 0 as that of its group, whose other ranks have started theirs, and follow from now on."""
    assert isinstance(started.runner, DeviceRunner), "the CPU's runner leads by its model and its pool"
    runner = LeadRunner(started.runner, lead.group, lead.reduction)
    lead.group.watch(lead.reduction, runner.unended.waited_s)
    return started._replace(runner=runner, memory=_memory_of_group(started.memory, lead))


def _own_number(number: int) -> int:
    """The agreement of a process by itself."""
    return number


def _compile_nothing(pool: KVPool, limits: StepLimits) -> None:
    """Leave the compilation to rank 0 of the same machine, which has the same launches."""


def _make_pool(
    settings: WorkerSettings, shape: BlockShape, num_blocks: int, device: torch.device, lead: Lead | None = None
) -> KVPool:
    """The pool, of rank 0 if this process leads a group. Blocks of a group do not travel: each rank has a part."""
    if lead is not None:
        return LeadPool(shape, num_blocks, device, settings.num_host_blocks, lead.group)
    num_fetched = num_fetched_blocks(settings.fetch_memory_bytes, num_blocks, shape.bytes_per_block)
    return KVPool(shape, num_blocks, device, settings.num_host_blocks, num_fetched)


def _memory_of_group(own: MemoryUse, lead: Lead) -> MemoryUse:
    """Memory of all ranks, given rank 0's."""
    return MemoryUse(
        weight_bytes=own.weight_bytes + sum(lead.weight_bytes),
        kv_pool_bytes=own.kv_pool_bytes * lead.group.size,
        host_pool_bytes=own.host_pool_bytes * lead.group.size,
        step_bytes=own.step_bytes * lead.group.size,
    )
