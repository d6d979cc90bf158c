"""From a loaded decoder to a runner that has its KV pool and has run once: the plain one, or that of an accelerator.

It knows how much memory each may take, and what of the settings that depends on.
"""

from collections.abc import Callable
from functools import partial
from threading import Thread
from typing import NamedTuple

import torch

from kernels.native.cpu_kernels import CpuKernels
from kernels.native.host_memory import take_memory
from quire.worker_settings import WorkerSettings
from worker_svc.description import PhaseClock
from worker_svc.device import torch_operations
from worker_svc.device.graphs import graph_sizes
from worker_svc.device.operations import Operations
from worker_svc.device.runner import DeviceRunner
from worker_svc.device.start import GraphRunner, measure_memory, start_runner
from worker_svc.host.host_decoder import HostDecoder
from worker_svc.host.host_runner import HostRunner
from worker_svc.kv_pool import BlockShape, KVPool, free_memory_bytes
from worker_svc.model.decoder import Decoder
from worker_svc.pool_plan import FreeMemory, PoolPlan, PoolRequest, SequenceLimits, longest_sequence, plan_pool
from worker_svc.runner import ModelRunner
from worker_svc.runner_choice import RunnerChoice
from worker_svc.sampler import Sampler
from worker_svc.step_limits import StepLimits
from worker_svc.step_runner import StepRunner
from worker_svc.trial_steps import warm_up_steps

_CPU_FRACTION = 0.25  # the rest of the machine is not ours
_CPU_MAX_BYTES = 1 << 30
_CPU_BYTES_AT_HAND = 256 << 20  # of the pool's memory that is taken at the start; the rest as it is used
_UNMEASURED_FRACTION = 0.85  # of what the weights leave on a CUDA device; the rest is for activations
_MEASURED_FRACTION = 0.95  # of what is left beside all that was measured; steps differ in how they cut memory up


class StartedRunner(NamedTuple):
    """A runner, and what there is to say of it."""

    runner: StepRunner
    limits: StepLimits
    block_shape: BlockShape


def start_plain_runner(
    settings: WorkerSettings,
    decoder: Decoder,
    choice: RunnerChoice,
    clock: PhaseClock,
    kernels: CpuKernels | None,
) -> StartedRunner:
    """The runner that does one thing after the other: on a CPU with kernels, else with plain torch.

    Raises PoolSizeError.
    """
    shape = decoder.block_shape(settings.block_size, choice.kv_dtype)
    with clock.phase("kv_pool"):
        plan = _plan(settings, decoder, shape, free_memory_bytes(decoder.device), _UNMEASURED_FRACTION)
        pool = KVPool(shape, plan.num_blocks, decoder.device, settings.num_host_blocks)
    limits = _limits(settings, decoder, plan)
    with clock.phase("warm_up"):
        make: Callable[[], StepRunner]
        if kernels is None:
            make = partial(ModelRunner, decoder, pool, Sampler(), limits)
        else:
            host_decoder = HostDecoder(decoder, kernels)
            host_decoder.reserve(limits.max_batched_tokens)
            make = partial(HostRunner, host_decoder, pool, Sampler(), limits)
        runner = make()
        for step in warm_up_steps(limits):
            runner.launch(step)
        if kernels is not None:
            Thread(target=_take_memory, args=(host_decoder, pool), name="memory", daemon=True).start()
    return StartedRunner(make(), limits, shape)


def _take_memory(model: HostDecoder, pool: KVPool) -> None:
    """Of what the first prompts write: to be given it takes as long as to compute them on some machines."""
    model.take_memory()
    take_memory(pool.blocks, _CPU_BYTES_AT_HAND)


def start_device_runner(
    settings: WorkerSettings, decoder: Decoder, choice: RunnerChoice, clock: PhaseClock
) -> StartedRunner:
    """The accelerator's runner, on a CPU with torch's operators. Raises PoolSizeError."""
    shape = decoder.block_shape(settings.block_size, choice.kv_dtype)
    operations = _operations(choice)
    graphs = settings.graphs and choice.device.type == "cuda"

    def make(pool: KVPool, limits: StepLimits) -> GraphRunner:
        return DeviceRunner(decoder, pool, limits, operations, graph_sizes(limits.num_slots))

    free_bytes, fraction = free_memory_bytes(choice.device), _UNMEASURED_FRACTION
    if choice.device.type == "cuda":
        trial = PoolPlan(num_blocks=0, max_model_len=longest_sequence(_sequences(settings, decoder)))
        limits = _limits(settings, decoder, trial)
        profile = measure_memory(make, shape, limits, choice.device, graphs=graphs, clock=clock)
        free_bytes, fraction = profile.available, _MEASURED_FRACTION
    with clock.phase("kv_pool"):
        plan = _plan(settings, decoder, shape, free_bytes, fraction)
        pool = KVPool(shape, plan.num_blocks, choice.device, settings.num_host_blocks)
    limits = _limits(settings, decoder, plan)
    runner = start_runner(make, pool, limits, graphs=graphs, clock=clock)
    return StartedRunner(runner, limits, shape)


def _operations(choice: RunnerChoice) -> Operations:
    if not choice.has_kernels:
        return torch_operations.OPERATIONS
    from worker_svc.device import triton_operations  # noqa: PLC0415 - Triton may be missing where nobody needs it

    return triton_operations.OPERATIONS


def _plan(
    settings: WorkerSettings, decoder: Decoder, shape: BlockShape, free_bytes: int, cuda_fraction: float
) -> PoolPlan:
    on_cpu = decoder.device.type == "cpu"
    return plan_pool(
        PoolRequest(
            num_blocks=settings.num_blocks,
            memory_bytes=settings.kv_memory_bytes,
            fraction=settings.kv_memory_fraction,
            default_fraction=_CPU_FRACTION if on_cpu else cuda_fraction,
            default_max_bytes=_CPU_MAX_BYTES if on_cpu else None,
            num_host_blocks=settings.num_host_blocks,
        ),
        _sequences(settings, decoder),
        FreeMemory(device=free_bytes, host=None if on_cpu else free_memory_bytes(torch.device("cpu"))),
        shape.bytes_per_block,
    )


def _sequences(settings: WorkerSettings, decoder: Decoder) -> SequenceLimits:
    return SequenceLimits(
        num_slots=settings.max_num_seqs,
        block_size=settings.block_size,
        model_len=decoder.config.max_model_len,
        max_model_len=settings.max_model_len,
    )


def _limits(settings: WorkerSettings, decoder: Decoder, plan: PoolPlan) -> StepLimits:
    return StepLimits(
        num_slots=settings.max_num_seqs,
        num_blocks=plan.num_blocks,
        num_host_blocks=settings.num_host_blocks,
        block_size=settings.block_size,
        vocab_size=decoder.config.vocab_size,
        max_model_len=plan.max_model_len,
        max_batched_tokens=settings.max_batched_tokens,
    )
