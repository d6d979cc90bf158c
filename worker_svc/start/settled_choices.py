"""Choices that a worker and the other ranks of its group make from the same settings, so that all make the same."""

from functools import partial

import torch

from common.faithful_tokenizer import faithful_tokenizer
from kernels.native.compiling import NativeUnavailableError
from kernels.native.native_kernels import NativeKernels, choose_kernels
from quire.worker_settings import WorkerSettings
from worker_svc.checkpoint.tokenizer_files import TokenizerFiles
from worker_svc.gpu.quantised_products import quantising_maker
from worker_svc.model.config import ModelConfig
from worker_svc.model.layers import Linear, MakeProduct
from worker_svc.runner_choice import RequestedRunner
from worker_svc.sampling.grammar_matcher import GrammarVocabulary
from worker_svc.sampling.seat_grammars import SeatGrammars
from worker_svc.start.end_tokens import end_token_ids


def requested_runner(settings: WorkerSettings) -> RequestedRunner:
    """Settings that the choice of the runner depends on; of a group on one machine it needs a device for each rank."""
    return RequestedRunner(
        device=settings.device,
        runner=settings.runner,
        kv_dtype=settings.kv_dtype,
        weight_dtype=settings.weight_dtype,
        attention=settings.attention,
        num_ranks=settings.tensor_parallel if settings.group_address is None else 1,
        worker_number=settings.worker_number,
    )


def device_products(settings: WorkerSettings) -> MakeProduct:
    """Maker of the products of an accelerator's runner."""
    form = settings.weight_dtype
    assert form != "int8", "refused with the runner"
    return Linear if form == "auto" else quantising_maker(form)


def seat_grammars(
    tokenizer: TokenizerFiles | None, config: ModelConfig, *, limits_time: bool = True
) -> SeatGrammars | None:
    """Grammars of a worker's seats; None without a tokenizer. `limits_time`: as `GrammarVocabulary` has it."""
    if tokenizer is None:
        return None
    ends = sorted(end_token_ids(config, tokenizer.end_token))
    return SeatGrammars(partial(_grammar_vocabulary, tokenizer.tokenizer_json, config.vocab_size, ends, limits_time))


def _grammar_vocabulary(
    tokenizer_json: bytes, vocab_size: int, ends: list[int], limits_time: bool
) -> GrammarVocabulary:
    return GrammarVocabulary(faithful_tokenizer(tokenizer_json, vocab_size), vocab_size, ends, limits_time=limits_time)


def shares_memory(settings: WorkerSettings, device: torch.device, dtype: torch.dtype) -> bool:
    """True if ranks of the device runner can reduce through shared memory: on one CPU, by native code."""
    if device.type != "cpu" or settings.group_address is not None:
        return False
    try:
        kernels, _ = choose_kernels(settings.kernels, dtype)
    except NativeUnavailableError:
        return False
    return isinstance(kernels, NativeKernels)
