"""Chooses who attends on a CUDA device, by kind of pass: the runner's own kernels, or a library that is installed.

`auto` measures all that compute the model's attention, at the first start on a device, and keeps the times in a file.
"""

import hashlib
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import structlog
import torch

import kernels.attention
from kernels.attention.shape import AttentionShape, ScoreRule
from worker_svc.gpu.libraries.library import NO_LIBRARIES, AttentionLibrary, PassLibraries
from worker_svc.memory.kv_pool import BlockShape, free_memory_bytes
from worker_svc.model.config import ModelConfig
from worker_svc.model.decoder import Decoder
from worker_svc.operations import Operations
from worker_svc.option_check import DeviceError, installed_attention
from worker_svc.start.attention_cache import AttentionCache, AttentionTimes
from worker_svc.start.attention_libraries import LibraryError, load_library
from worker_svc.start.attention_trial import AttentionTrial, GraphClock, LaunchClock, Trial, TrialSize, results_agree
from worker_svc.steps.step_limits import StepLimits
from worker_svc.steps.step_runner import DeviceLostError

OWN = "triton"  # the runner's own operations
_MOST_ROWS, _MOST_CONTEXT, _MOST_CHUNK = 64, 2048, 1024
_FREE_PART = 4  # the trial's pool takes at most 1 / 4 of the free memory

Measure = Callable[[AttentionLibrary | None, LaunchClock], Trial]

log = structlog.get_logger()


def start_attention(
    requested: str, decoder: Decoder, shape: BlockShape, operations: Operations, limits: StepLimits
) -> PassLibraries:
    """Libraries for a runner on a CUDA device. Raises DeviceError if a requested one cannot run here."""
    names = installed_attention() if requested == "auto" else (requested,)
    libraries = [] if requested == OWN else _loaded(names, must_load=requested != "auto")
    capability = torch.cuda.get_device_capability(decoder.device)
    usable = usable_libraries(libraries, decoder.config, decoder.dtype, shape.dtype, capability)
    if not usable.decode:
        return NO_LIBRARIES
    size = trial_size(limits, shape, free_memory_bytes(decoder.device))

    def make_trial() -> AttentionTrial:
        return AttentionTrial(decoder, shape, operations, size)

    clock = GraphClock(decoder.device)
    if requested != "auto":
        return requested_library(usable, make_trial(), clock)
    cache = AttentionCache.of_user(os.environ)
    return fastest_libraries(usable, make_trial, clock, cache, trial_key(decoder, shape, size, libraries))


class UsableLibraries(NamedTuple):
    """Libraries that compute a model on its device, by kind of pass; those of `mixed` are among those of `decode`."""

    decode: list[AttentionLibrary]
    mixed: list[AttentionLibrary]


def usable_libraries(
    libraries: Sequence[AttentionLibrary],
    config: ModelConfig,
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
    capability: tuple[int, int],
) -> UsableLibraries:
    """Libraries that compute this model on a device of that compute capability; the log says why others do not."""
    attention = AttentionShape(
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        dtype=dtype,
        kv_dtype=kv_dtype,
    )
    usable = UsableLibraries([], [])
    for library in libraries:
        why_not = library.why_not(attention, ScoreRule(config.attention_scale), capability)
        if None not in config.sliding_windows:
            why_not = "all layers have a sliding window"
        if why_not is not None:
            log.warning("attention library not used", library=library.name, passes="all", reason=why_not)
            continue
        usable.decode.append(library)
        why_not = library.why_not_mixed(capability)
        if why_not is None:
            usable.mixed.append(library)
        else:
            log.warning("attention library not used", library=library.name, passes="with prompts", reason=why_not)
    return usable


def requested_library(usable: UsableLibraries, trial: AttentionTrial, clock: LaunchClock) -> PassLibraries:
    """The one library, for all passes that it can compute, once it has shown that it does. Raises DeviceError."""
    chosen = PassLibraries(*(next(iter(libraries), None) for libraries in usable))
    for library, measure in zip(chosen, (trial.decode, trial.mixed), strict=True):
        if library is not None:
            try:
                _checked(library, measure, measure(None, clock), clock)
            except LibraryError as error:
                raise DeviceError(
                    f"--attention {library.name} was asked for, and {error}: correct that, or leave --attention out"
                ) from error
    log.info("attention chosen", decode=_name(chosen.decode), prompts=_name(chosen.mixed), by="--attention")
    return chosen


def fastest_libraries(
    usable: UsableLibraries,
    make_trial: Callable[[], AttentionTrial],
    clock: LaunchClock,
    cache: AttentionCache,
    key: str,
) -> PassLibraries:
    """Libraries that are faster than the runner's own operations, by kind of pass, as measured now or before."""
    decode_names, mixed_names = ([OWN, *map(_name, libraries)] for libraries in usable)
    times, by = cache.find(key, decode_names, mixed_names), "measured before"
    if times is None:
        trial, by = make_trial(), "measured now"
        times = AttentionTimes(_times(usable.decode, trial.decode, clock), _times(usable.mixed, trial.mixed, clock))
        if times.are_of(decode_names, mixed_names):  # else what has failed is tried again at the next start
            cache.keep(key, times)
    decode, mixed = (_fastest(each) for each in (times.decode_us, times.mixed_us))
    log.info(
        "attention chosen",
        decode=decode,
        prompts=mixed,
        by=by,
        decode_us=_rounded(times.decode_us),
        prompts_us=_rounded(times.mixed_us),
    )
    by_name = {library.name: library for library in usable.decode}
    return PassLibraries(by_name.get(decode), by_name.get(mixed))


def trial_size(limits: StepLimits, shape: BlockShape, free_bytes: int) -> TrialSize:
    """Extent of a trial whose pool takes at most a part of the free memory."""
    most_blocks = max(2, free_bytes // _FREE_PART // shape.bytes_per_block)
    context = min(_MOST_CONTEXT, limits.max_model_len, most_blocks // 2 * shape.block_size)
    num_rows = min(_MOST_ROWS, limits.num_seats, most_blocks // -(-context // shape.block_size) - 1)
    return TrialSize(num_rows, context, max(1, min(_MOST_CHUNK, limits.max_batched_tokens - num_rows, context)))


def trial_key(decoder: Decoder, shape: BlockShape, size: TrialSize, libraries: Sequence[AttentionLibrary]) -> str:
    """Key of a trial: device, versions of all that is measured, and shapes. Equal keys give about equal times."""
    properties = torch.cuda.get_device_properties(decoder.device)
    config = decoder.config
    parts = [
        f"{properties.name}, {properties.multi_processor_count} multiprocessors",
        f"torch {torch.__version__}",
        f"kernels {_kernels_digest()}",
        *(f"{library.name} {library.version}" for library in libraries),
        f"heads {config.num_heads}/{config.num_kv_heads}/{config.head_dim}, layers {shape.num_layers}",
        f"{decoder.dtype}, keys {shape.dtype}, blocks of {shape.block_size}",
        f"rows {size.num_rows}, context {size.context}, chunk {size.chunk}",
    ]
    return "; ".join(parts)


def _loaded(names: Sequence[str], *, must_load: bool) -> list[AttentionLibrary]:
    libraries = []
    for name in names:
        try:
            libraries.append(load_library(name))
        except LibraryError as error:
            if must_load:
                raise DeviceError(f"--attention {name} was asked for, and {error}: leave --attention out") from error
            log.warning("attention library not used", library=name, reason=str(error))
    return libraries


def _times(usable: Sequence[AttentionLibrary], measure: Measure, clock: LaunchClock) -> dict[str, float]:
    """Times by name. What fails or gives other results has none, and the log says why."""
    own = measure(None, clock)
    times = {OWN: own.us}
    for library in usable:
        try:
            times[library.name] = _checked(library, measure, own, clock)
        except LibraryError as error:
            log.warning("attention library not used", library=library.name, reason=str(error))
    return times


def _checked(library: AttentionLibrary, measure: Measure, own: Trial, clock: LaunchClock) -> float:
    """Time of a library whose results are those of the runner's own operations.

    Raises LibraryError, and DeviceError if the library has left this process without its device.
    """
    try:
        trial = measure(library, clock)
    except DeviceLostError as error:
        raise DeviceError(f"attention by {library.name} broke the device ({error}): give --attention {OWN}") from error
    except Exception as error:  # another project's code, which may also compile at its first launch
        raise LibraryError(f"{library.name} failed: {type(error).__name__}: {error}"[:500]) from error
    if not results_agree(own.out, trial.out):
        raise LibraryError(f"{library.name} gave other results than Triton's kernels")
    return trial.us


def _name(library: AttentionLibrary | None) -> str:
    return OWN if library is None else library.name


def _fastest(times: Mapping[str, float]) -> str:
    """The name with the least time; the runner's own operations if none is less."""
    return min(times, key=lambda name: (times[name], name != OWN))


def _rounded(times: Mapping[str, float]) -> dict[str, float]:
    return {name: round(us, 1) for name, us in times.items()}


def _kernels_digest() -> str:
    """Digest of the sources of our own attention."""
    folder = Path(kernels.attention.__file__).parent
    digest = hashlib.sha256()
    for path in sorted(folder.glob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:12]
