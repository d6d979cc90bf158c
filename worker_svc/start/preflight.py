"""Checks options and a model folder without torch and without reading weights, in well under a second."""

from pathlib import Path

from quire import machine
from worker_svc.checkpoint.dtype_choice import saved_dtype
from worker_svc.checkpoint.generation_defaults import read_sampling_defaults
from worker_svc.checkpoint.model_folder import find_checkpoint
from worker_svc.checkpoint.tokenizer_files import check_tokenizer
from worker_svc.checkpoint.weight_files import check_tensor, read_headers
from worker_svc.model.families import read_model_config
from worker_svc.model.model_part import check_divisible
from worker_svc.model.tensor_names import needed_tensors
from worker_svc.option_check import (
    CheckedOptions,
    check_length,
    check_options,
    has_cuda_driver,
    has_triton,
    installed_attention,
    num_cuda_devices,
)
from worker_svc.start.end_tokens import left_out_warning
from worker_svc.start.pool_check import check_pool, check_weights


def check_start(model: str, options: CheckedOptions, *, generation_config: str) -> tuple[str, ...]:
    """Checks the model and the options of a worker. Raises OptionError or CheckpointError, which say what to do.

    Returns warnings, which the start of the worker repeats.
    """
    check_options(
        options,
        has_driver=has_cuda_driver(),
        has_kernels=has_triton(),
        libraries=installed_attention(),
        count_devices=num_cuda_devices,
    )
    return check_model(model, options, sampling_defaults=generation_config == "model")


def check_model(
    name_or_path: str, options: CheckedOptions | None = None, *, sampling_defaults: bool = True
) -> tuple[str, ...]:
    """Checks the model that `--model` names; a hub id outside the local cache is checked after its download.

    Raises the errors of `check_folder`, and returns its warnings.
    """
    folder = find_checkpoint(name_or_path)
    return () if folder is None else check_folder(folder, options, sampling_defaults=sampling_defaults)


def check_folder(
    folder: Path, options: CheckedOptions | None = None, *, sampling_defaults: bool = True
) -> tuple[str, ...]:
    """Checks config, tokenizer, names, shapes and dtypes of all tensors, and, with `sampling_defaults`, those values.

    Returns warnings of a tokenizer.json; older files are read at the start alone. Raises CheckpointError, and
    OptionError if the model does not allow the options.
    """
    config = read_model_config(folder)
    if options is not None:
        check_length(options.max_model_len, config.max_model_len)
        check_divisible(config, options.tensor_parallel)
    headers = read_headers(folder)
    tensors = list(needed_tensors(config, headers, folder))
    for name, shape in tensors:
        check_tensor(folder, name, headers.get(name), shape)
    if options is not None:
        saved, has_driver = saved_dtype(config.dtype, headers), has_cuda_driver()
        check_weights(options, tensors, saved, has_driver=has_driver, memory_bytes=machine.total_memory_bytes())
        check_pool(options, config, saved, has_driver=has_driver)
    warning = left_out_warning(config, check_tokenizer(folder))
    if sampling_defaults:
        read_sampling_defaults(folder)
    return () if warning is None else (warning,)
