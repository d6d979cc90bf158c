"""From settings to a model that can execute steps: checkpoint, weights, KV pool, tokenizer, first run.

Everything here takes long and is done once, on the execution thread.
"""

from pathlib import Path

import torch

from common.slot_sampling import SlotSampling
from common.step import SlotState, Step
from worker_svc.checkpoint import CheckpointError, fingerprint, resolve_checkpoint
from worker_svc.description import ModelDescription, PhaseClock, WorkerDescription
from worker_svc.engine import Engine
from worker_svc.kv_pool import KVPool, free_memory_bytes
from worker_svc.model.decoder import Decoder, load_decoder
from worker_svc.pool_plan import FreeMemory, PoolPlan, PoolRequest, SequenceLimits, plan_pool
from worker_svc.runner import ModelRunner
from worker_svc.sampler import Sampler
from worker_svc.settings import WorkerSettings
from worker_svc.step_limits import StepLimits
from worker_svc.step_runner import StepRunner, result_of
from worker_svc.tokenizer_files import read_tokenizer_files

_CPU_FRACTION = 0.25  # the rest of the machine is not ours
_CPU_MAX_BYTES = 1 << 30  # making the pool writes all of it, at about 1 GB/s
_CUDA_FRACTION = 0.85  # of what the weights leave; the rest is for activations


def load_engine(settings: WorkerSettings) -> Engine:
    """Loads it all. Raises CheckpointError or PoolSizeError, which say what to do."""
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    clock = PhaseClock()
    device = _device(settings.device)
    with clock.phase("checkpoint"):
        folder = resolve_checkpoint(settings.model)
        model_fingerprint = fingerprint(folder)
        tokenizer = read_tokenizer_files(folder)
    with clock.phase("weights"):
        decoder = load_decoder(folder, _dtype(settings.dtype, device), device)
    with clock.phase("kv_pool"):
        plan, pool = _make_pool(settings, decoder)
    limits = _limits(settings, decoder, plan)
    with clock.phase("warm_up"):
        warm_up(ModelRunner(decoder, pool, Sampler(), limits), limits)
    return Engine(
        ModelRunner(decoder, pool, Sampler(), limits),
        WorkerDescription(
            model=_describe_model(settings, folder, decoder, model_fingerprint),
            tokenizer=tokenizer,
            limits=limits,
            bytes_per_block=pool.bytes_per_block,
            device=str(decoder.device),
            startup=clock.phases,
        ),
    )


def warm_up(runner: StepRunner, limits: StepLimits) -> None:
    """Runs a prompt and a decode token, so that the first request does not pay for what is done once."""
    num_tokens = min(limits.block_size, limits.max_model_len, limits.max_batched_tokens)
    state = SlotState(
        slot=0,
        position=0,
        block_table=[0],
        token_ids=[0] * num_tokens,
        num_prompt_tokens=num_tokens,
        sampling=SlotSampling(seed=0),
    )
    step = Step(epoch=0, step_id=0, snapshot=True, whole=[state], rows=[0], num_tokens=[num_tokens])
    result_of(runner.launch(step))


def _device(name: str) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name.startswith("cuda"):
        if not torch.cuda.is_available():
            raise CheckpointError(f"--device {name} was asked for, and torch sees no CUDA device: use --device cpu")
        if ":" not in name:
            name = f"cuda:{torch.cuda.current_device()}"
    return torch.device(name)


def _dtype(name: str, device: torch.device) -> torch.dtype | None:
    """None is the checkpoint's own."""
    if name == "auto":
        return torch.float32 if device.type == "cpu" else None
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype), "the settings allow names of dtypes only"
    return dtype


def _make_pool(settings: WorkerSettings, decoder: Decoder) -> tuple[PoolPlan, KVPool]:
    shape = decoder.block_shape(settings.block_size)
    on_cpu = decoder.device.type == "cpu"
    plan = plan_pool(
        PoolRequest(
            num_blocks=settings.num_blocks,
            memory_bytes=settings.kv_memory_bytes,
            fraction=settings.kv_memory_fraction,
            default_fraction=_CPU_FRACTION if on_cpu else _CUDA_FRACTION,
            default_max_bytes=_CPU_MAX_BYTES if on_cpu else None,
            num_host_blocks=settings.num_host_blocks,
        ),
        SequenceLimits(
            num_slots=settings.max_num_seqs,
            block_size=settings.block_size,
            model_len=decoder.config.max_model_len,
            max_model_len=settings.max_model_len,
        ),
        FreeMemory(
            device=free_memory_bytes(decoder.device),
            host=None if on_cpu else free_memory_bytes(torch.device("cpu")),
        ),
        shape.bytes_per_block,
    )
    return plan, KVPool(shape, plan.num_blocks, decoder.device, settings.num_host_blocks)


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


def _describe_model(
    settings: WorkerSettings, folder: Path, decoder: Decoder, model_fingerprint: str
) -> ModelDescription:
    return ModelDescription(
        name=settings.model_name or settings.model,
        fingerprint=model_fingerprint,
        architecture=decoder.config.architecture,
        dtype=str(decoder.dtype).removeprefix("torch."),
        eos_token_ids=decoder.config.eos_token_ids,
    )
