"""Loads an engine from settings: checkpoint, weights, tokenizer, and the start of the runner.

Runs once, on the execution thread, and takes seconds to minutes.
"""

import os
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import structlog
import torch

from common.status import Status
from kernels.native.build import needs_build
from kernels.native.cpu_kernels import PLAIN_LAYOUT
from kernels.native.native_kernels import NativeKernels
from kernels.native.processor import multiplies_bfloat16, processor_features
from quire.worker_settings import WorkerSettings
from worker_svc.checkpoint.dtype_choice import DtypeChoice, choose_dtype, saved_dtype
from worker_svc.checkpoint.generation_defaults import read_sampling_defaults
from worker_svc.checkpoint.model_folder import fingerprint, is_local, resolve_checkpoint
from worker_svc.checkpoint.tokenizer_files import TokenizerFiles, read_tokenizer_files
from worker_svc.checkpoint.weight_files import read_headers
from worker_svc.cpu.start import choose_host
from worker_svc.description import ModelDescription, PhaseClock, WorkerDescription
from worker_svc.gpu.start import refuse_large_weights
from worker_svc.loaded_model import LoadedModel
from worker_svc.memory.huge_pages import collapse_memory
from worker_svc.model.config import ModelConfig
from worker_svc.model.decoder import Decoder, load_decoder, named_dtype
from worker_svc.model.families import read_model_config
from worker_svc.model.model_part import ModelPart
from worker_svc.option_check import (
    FP8_WEIGHTS_NEED_16_BITS,
    CheckedOptions,
    DeviceError,
    has_cuda_driver,
    is_on_cuda,
)
from worker_svc.ranks.rank_starting import StartRank, spawn_rank
from worker_svc.runner_choice import RunnerChoice, choose_runner, detect_machine
from worker_svc.start.block_travel import block_format, travelling_blocks
from worker_svc.start.end_tokens import end_token_ids, left_out_warning
from worker_svc.start.group_start import ReductionChoice, StartingGroup, settings_of_rank
from worker_svc.start.launcher_check import check_launcher
from worker_svc.start.preflight import check_folder
from worker_svc.start.runner_start import lead_device_runner, start_cpu_runner, start_device_runner
from worker_svc.start.settled_choices import device_products, requested_runner, seat_grammars, shares_memory
from worker_svc.start.start_notices import notices
from worker_svc.start.weight_form import check_weight_form

log = structlog.get_logger()


class _Checkpoint(NamedTuple):
    """A model's folder, and what was read of it beside the weights."""

    folder: Path
    fingerprint: str
    tokenizer: TokenizerFiles | None
    config: ModelConfig
    dtype_choice: DtypeChoice


def load_model(
    settings: WorkerSettings, status: Status | None = None, start_rank: StartRank = spawn_rank
) -> LoadedModel:
    """Loads model and runner, and reports the progress. Raises CheckpointError or OptionError, which say what to do.

    `start_rank`: starts the other ranks of a tensor-parallel group, of which this process is rank 0.
    """
    status = status or Status()
    clock = PhaseClock(status.phase)
    choice = choose_runner(requested_runner(settings), detect_machine())
    if choice.why_not_cuda is not None:
        log.warning(f"steps are computed on the CPU: {choice.why_not_cuda}; --device cpu silences this")
    check_launcher(choice)
    options, starting = CheckedOptions.of(settings), None
    if settings.tensor_parallel > 1:
        settings = settings_of_rank(settings, settings.threads or torch.get_num_threads())
        starting = StartingGroup(settings, choice, start_rank)
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    try:
        return _load(settings, options, status, clock, choice, starting)
    except BaseException:
        if starting is not None:
            starting.group.abandon()
        raise


def _load(
    settings: WorkerSettings,
    options: CheckedOptions,
    status: Status,
    clock: PhaseClock,
    choice: RunnerChoice,
    starting: StartingGroup | None,
) -> LoadedModel:
    """Load on the chosen device, and have the other ranks of a group load.

    `settings`: of this rank; `options`: of the whole worker.
    """
    if choice.device.type == "cuda":
        torch.cuda.set_device(choice.device)  # for this thread, which launches all kernels
    with clock.phase("checkpoint"):
        checkpoint = _read_checkpoint(settings, options, status, choice)
    folder, config, tokenizer = checkpoint.folder, checkpoint.config, checkpoint.tokenizer
    dtype = named_dtype(checkpoint.dtype_choice.dtype)
    host = None
    if choice.kind == "cpu":
        with clock.phase("kernels"):
            if settings.kernels != "torch" and needs_build(os.environ):
                status.phase("compiling")
            host = choose_host(
                settings.kernels,
                dtype,
                int8_weights=settings.weight_dtype == "int8",
                int8_kv=choice.kv_dtype == torch.int8,
                head_dim=config.head_dim,
            )
    elif settings.weight_dtype == "fp8" and choice.device.type == "cuda" and dtype == torch.float32:
        raise DeviceError(FP8_WEIGHTS_NEED_16_BITS)
    if starting is not None:
        if host is None:
            has_native = shares_memory(settings, choice.device, dtype)
        else:
            has_native = isinstance(host.kernels, NativeKernels)
        starting.set_up(checkpoint.fingerprint, ReductionChoice(config, dtype, has_native), model=str(folder))
    with clock.phase("weights"):
        make_product = device_products(settings) if host is None else host.packing.make_product
        model_part = ModelPart(0, settings.tensor_parallel)
        on_part = partial(status.phase, "weights")
        with refuse_large_weights(choice.device):
            decoder = load_decoder(folder, dtype, choice.device, make_product, on_part, model_part)
        if settings.weight_dtype in ("fp8", "int4"):
            check_weight_form(decoder, settings.weight_dtype)
        lead = None if starting is None else starting.lead()
    # Ranks on accelerators follow grammars each for itself, and would disagree where the time of one runs out.
    grammars = seat_grammars(tokenizer, decoder.config, limits_time=lead is None or host is not None)
    if host is None:
        place, on_compiled = None if lead is None else lead.place, partial(status.phase, "compiling")
        started = start_device_runner(settings, decoder, choice, clock, grammars, on_compiled, place)
        started = started if lead is None else lead_device_runner(started, lead)
    else:
        started = start_cpu_runner(settings, decoder, choice, clock, host.kernels, grammars, lead)
    if choice.device.type == "cpu":
        with clock.phase("huge_pages"):
            collapse_memory()
    description = WorkerDescription(
        model=_describe_model(settings, checkpoint, decoder),
        tokenizer=tokenizer,
        limits=started.limits,
        bytes_per_block=started.pool.shape.bytes_per_block * settings.tensor_parallel,
        kv_dtype=_dtype_name(started.pool.shape.dtype),
        weight_dtype=_dtype_name(decoder.dtype) if settings.weight_dtype == "auto" else settings.weight_dtype,
        device=str(decoder.device),
        startup=clock.phases,
        memory=started.memory,
        dtype_reason=checkpoint.dtype_choice.reason,
        num_threads=torch.get_num_threads() if choice.device.type == "cpu" else None,
        role=settings.role,
        num_ranks=settings.tensor_parallel,
        kernels=None if host is None else host.kernels.name,
        packing=None if host is None else host.packing.name,
    )
    for about, notice in notices(description).items():
        status.notice(about, notice)
    if lead is not None:
        return LoadedModel(started.runner, description, lead.group.close)
    weights = description.model.dtype + ("" if settings.weight_dtype == "auto" else f" {settings.weight_dtype}")
    layout = PLAIN_LAYOUT if host is None else host.kernels.block_layout
    format = block_format(checkpoint.fingerprint, weights, started.pool.shape, layout)
    travel = travelling_blocks(started.pool, started.fetched, format)
    return LoadedModel(started.runner, description, travel=travel)


def _read_checkpoint(
    settings: WorkerSettings, options: CheckedOptions, status: Status, choice: RunnerChoice
) -> _Checkpoint:
    """Find the model's folder, or download it; check it, read all but the weights, and choose the dtype."""
    if not is_local(settings.model):
        status.phase("downloading")
    folder = resolve_checkpoint(settings.model)
    # Checked before torch was loaded: a local folder, for the device if that was known.
    if not is_local(settings.model) or is_on_cuda(options, has_driver=has_cuda_driver()) is None:
        options = replace(options, device=choice.device.type)
        check_folder(folder, options, sampling_defaults=settings.generation_config == "model")
    tokenizer = read_tokenizer_files(folder)
    config = read_model_config(folder)
    if (warning := left_out_warning(config, None if tokenizer is None else tokenizer.end_token)) is not None:
        log.warning(warning)
    dtype = choose_dtype(
        settings.dtype,
        saved_dtype(config.dtype, read_headers(folder)),
        on_cpu=choice.device.type == "cpu",
        bfloat16_by=multiplies_bfloat16(processor_features()),
    )
    return _Checkpoint(folder, fingerprint(folder), tokenizer, config, dtype)


def _describe_model(settings: WorkerSettings, checkpoint: _Checkpoint, decoder: Decoder) -> ModelDescription:
    end_token = None if checkpoint.tokenizer is None else checkpoint.tokenizer.end_token
    return ModelDescription(
        name=settings.model_name or settings.model,
        fingerprint=checkpoint.fingerprint,
        architecture=decoder.config.architecture,
        dtype=_dtype_name(decoder.dtype),
        eos_token_ids=end_token_ids(decoder.config, end_token),
        sampling_defaults=read_sampling_defaults(checkpoint.folder) if settings.generation_config == "model" else {},
    )


def _dtype_name(dtype: torch.dtype) -> str:
    """Name of a dtype in torch, "bfloat16"."""
    return str(dtype).removeprefix("torch.")
