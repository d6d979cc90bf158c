"""Sizes of a worker's pools and steps, from its settings, its loaded decoder and the free memory.

Knows no runner. `pool_plan` does the arithmetic.
"""

from typing import NamedTuple

import structlog
import torch

from kernels.attention.device_family import family_of
from quire import machine
from quire.worker_settings import WorkerSettings
from worker_svc.cpu.step_memory import step_buffer_bytes
from worker_svc.description import MemoryUse
from worker_svc.memory.kv_pool import BlockShape, KVPool, free_memory_bytes
from worker_svc.memory.main_memory import MainMemory
from worker_svc.memory.pool_plan import FreeMemory, PoolPlan, PoolRequest, SequenceLimits, gib, plan_pool
from worker_svc.model.decoder import Decoder
from worker_svc.option_check import may_take_int8
from worker_svc.steps.step_limits import StepLimits

# Of a step. On a CPU the cost per row of a product is constant from 256 rows on: larger steps only delay others.
_CPU_BATCHED_TOKENS, _CUDA_BATCHED_TOKENS = 512, 8192
_CPU_LEAST_TOKENS = 1024  # of a pool if little memory is free
_UNMEASURED_FRACTION = 0.85  # of the memory beside the weights on a CUDA device; the rest is for activations

log = structlog.get_logger()


class PoolRoom(NamedTuple):
    """Bytes that a pool may take, and the part of them that a pool without a configured size takes."""

    free: int
    fraction: float


def pool_room(settings: WorkerSettings, device: torch.device, step_bytes: int, num_on_machine: int = 1) -> PoolRoom:
    """Room beside the loaded weights and a step's buffers, an equal part of it for each process of a group.

    A pool sized in blocks or bytes may take all free memory, or all that is left of this worker's share.
    """
    if device.type == "cuda":
        return PoolRoom(free_memory_bytes(device), _UNMEASURED_FRACTION)
    memory = MainMemory(
        free=free_memory_bytes(device) // num_on_machine,
        taken=machine.own_memory_bytes(),
        share=settings.memory_bytes,
        is_limited=machine.has_memory_limit(),
    )
    if settings.num_blocks is not None or settings.kv_memory_bytes is not None:
        return PoolRoom(memory.available, memory.fraction)
    return PoolRoom(memory.for_pool(step_bytes), memory.fraction)


def plan_in_room(
    settings: WorkerSettings, decoder: Decoder, shape: BlockShape, room: PoolRoom, num_on_machine: int = 1
) -> PoolPlan:
    """Plan a pool, and a host pool beside those of `num_on_machine` processes in all. Raises PoolSizeError."""
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
        sequences_of(settings, decoder),
        FreeMemory(device=room.free, host=None if on_cpu else free_memory_bytes(torch.device("cpu")) // num_on_machine),
        shape.bytes_per_block,
    )
    pool_tokens = plan.num_blocks * settings.block_size
    if settings.num_blocks is None and settings.kv_memory_bytes is None and pool_tokens < plan.max_model_len:
        log.warning(
            f"little memory: the KV pool holds {pool_tokens} tokens, less than one sequence of {plan.max_model_len}; "
            f"free memory, or give --kv-memory-bytes, {fewer_bytes(settings, decoder.device)}a smaller --max-model-len",
            free=gib(room.free),
        )
    return plan


def fewer_bytes(settings: WorkerSettings, device: torch.device) -> str:
    """Words for the option by which this runner keeps keys and values in fewer bytes; none if it has no other."""
    if settings.kv_dtype != "auto":
        return "or "
    if device.type == "cpu" and settings.runner != "device":
        return "--kv-dtype int8 or " if may_take_int8(settings.runner, settings.kernels, settings.dtype) else "or "
    return "--kv-dtype fp8 or " if family_of(device).has_e4m3 else "or "


def step_bytes_of(settings: WorkerSettings, decoder: Decoder) -> int:
    """Bytes of the buffers of the largest step, on a CPU."""
    return step_buffer_bytes(
        decoder.config,
        decoder.dtype,
        num_tokens=batched_tokens(settings, decoder.device),
        num_rows=settings.max_num_seqs,
    )


def batched_tokens(settings: WorkerSettings, device: torch.device) -> int:
    """Most tokens that one step computes."""
    return settings.max_batched_tokens or (_CUDA_BATCHED_TOKENS if device.type == "cuda" else _CPU_BATCHED_TOKENS)


def memory_use(decoder: Decoder, pool: KVPool, step_bytes: int) -> MemoryUse:
    """Memory of a process with this pool."""
    return MemoryUse(
        weight_bytes=decoder.weight_bytes,
        kv_pool_bytes=pool.blocks.nbytes,
        host_pool_bytes=pool.host_blocks.nbytes,
        step_bytes=step_bytes,
        fetch_bytes=pool.fetched_blocks.nbytes,
    )


def sequences_of(settings: WorkerSettings, decoder: Decoder) -> SequenceLimits:
    """Number and length of the sequences that the pool is for."""
    return SequenceLimits(
        num_seats=settings.max_num_seqs,
        block_size=settings.block_size,
        model_len=decoder.config.max_model_len,
        max_model_len=settings.max_model_len,
    )


def step_limits(settings: WorkerSettings, decoder: Decoder, plan: PoolPlan) -> StepLimits:
    """Limits of the steps of a worker with this pool."""
    return StepLimits(
        num_seats=settings.max_num_seqs,
        num_blocks=plan.num_blocks,
        num_host_blocks=settings.num_host_blocks,
        block_size=settings.block_size,
        vocab_size=decoder.config.vocab_size,
        max_model_len=plan.max_model_len,
        max_batched_tokens=batched_tokens(settings, decoder.device),
    )
