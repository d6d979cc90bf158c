"""Description that a worker gives of itself: model, tokenizer, pool, limits, durations of the phases of its start."""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal

from worker_svc.checkpoint.tokenizer_files import TokenizerFiles
from worker_svc.steps.step_limits import StepLimits


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelDescription:
    """The model that is served."""

    name: str
    fingerprint: str
    architecture: str
    dtype: str
    eos_token_ids: tuple[int, ...]
    sampling_defaults: Mapping[str, float] = field(default_factory=dict)  # numbers of SamplingParams, by name


@dataclass(frozen=True, slots=True)
class PhaseTime:
    """A phase of the start and how long it took."""

    phase: str
    duration_ms: float


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryUse:
    """Memory that a worker takes, in bytes; on a CPU the pool's memory is taken only as it is used."""

    weight_bytes: int
    kv_pool_bytes: int
    host_pool_bytes: int
    step_bytes: int  # of the largest step
    fetch_bytes: int = 0  # for blocks of other workers


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerDescription:
    """A loaded worker; constant until the process ends."""

    model: ModelDescription
    tokenizer: TokenizerFiles | None
    limits: StepLimits
    bytes_per_block: int
    kv_dtype: str  # of keys and values as stored
    weight_dtype: str  # of the matrices of layers as stored
    device: str
    startup: tuple[PhaseTime, ...]
    memory: MemoryUse | None = None  # None where there is no model
    dtype_reason: str = ""  # why the weights have this dtype
    num_threads: int | None = None  # that compute, on a CPU; of each rank
    role: Literal["mixed", "prefill", "decode"] = "mixed"
    num_ranks: int = 1  # of the tensor-parallel group
    kernels: str | None = None  # for everything but matrix products, on a CPU
    packing: str | None = None  # form of the weights, on a CPU


class PhaseClock:
    """Measures the phases of a start, and reports the begin of each to `on_phase`."""

    def __init__(self, on_phase: Callable[[str], None] | None = None) -> None:
        self._phases: list[PhaseTime] = []
        self._on_phase = on_phase

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        if self._on_phase is not None:
            self._on_phase(name)
        began_ns = time.perf_counter_ns()
        yield
        self._phases.append(PhaseTime(name, (time.perf_counter_ns() - began_ns) / 1e6))

    @property
    def phases(self) -> tuple[PhaseTime, ...]:
        """Phases that have ended, in order."""
        return tuple(self._phases)
