"""Compiles all kernels of a start ahead, on all cores: records the launches of its trial steps, then compiles them.

A launch is recorded instead of run, and the torch reference computes its result, so that whatever depends on it is as
in a real step. Needs Triton; callers check for it before they import this.
"""

from collections.abc import Callable
from dataclasses import fields
from typing import Any

import structlog

from kernels.launches.launch_compiler import OnPart, compile_launches
from kernels.launches.launch_recorder import LaunchKey, RecordedLaunch, recorded_launches
from kernels.sampling.sampling_operations import SamplingOperations
from quire import machine
from worker_svc.gpu import torch_operations, triton_operations
from worker_svc.gpu.start import MakeRunner, compile_kernels
from worker_svc.memory.kv_pool import KVPool
from worker_svc.operations import Operations
from worker_svc.steps.step_limits import StepLimits

log = structlog.get_logger()


def recording_operations() -> Operations:
    """Operations that launch the kernels, for a recorder to see, and compute their outputs by the references."""
    launches, computes = triton_operations.OPERATIONS, torch_operations.OPERATIONS
    sampling = _joined(SamplingOperations, launches.sampling, computes.sampling)
    operations: Operations = _joined(Operations, launches, computes, sampling=sampling)
    return operations


def record_start(
    make: MakeRunner, pool: KVPool, limits: StepLimits, capability: int
) -> dict[LaunchKey, RecordedLaunch]:
    """Distinct launches of a start's trial steps, as for a device of that compute capability, by Triton's keys.

    make: makes a runner with `recording_operations`
    """
    with recorded_launches(capability) as recorder:
        compile_kernels(make(pool, limits), limits)
    return recorder.launches


def compile_ahead(make: MakeRunner, pool: KVPool, limits: StepLimits, capability: int, on_part: OnPart) -> None:
    """Compile what a start launches, on all processors that this process may use, into Triton's cache.

    Nothing depends on it: what is not compiled here is compiled when it is first launched.
    """
    try:
        launches = list(record_start(make, pool, limits, capability).values())
        num_threads = machine.num_processors()
        faults = compile_launches(launches, capability, num_threads, on_part)
    except Exception:
        log.warning("kernels are compiled one by one, when they are first launched", exc_info=True)
        return
    log.info("kernels compiled", launches=len(launches), threads=num_threads, faults=faults)


def _joined(kind: type[Any], launches: object, computes: object, **given: object) -> Any:
    """A bundle whose operations call those of both bundles."""
    names = [field.name for field in fields(kind) if field.name not in given]
    return kind(**{name: _both(getattr(launches, name), getattr(computes, name)) for name in names}, **given)


def _both(launch: Callable[..., object], compute: Callable[..., object]) -> Callable[..., object]:
    def launch_and_compute(*arguments: object) -> object:
        launch(*arguments)
        return compute(*arguments)

    return launch_and_compute
