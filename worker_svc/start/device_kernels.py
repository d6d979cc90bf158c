"""Chooses the accelerator's operations, and how its kernels are compiled before they are first launched.

Imports Triton only if it is needed.
"""

from collections.abc import Callable
from functools import partial

import torch

from worker_svc.gpu import torch_operations
from worker_svc.gpu.start import CompileAhead, GraphRunner
from worker_svc.memory.kv_pool import KVPool
from worker_svc.operations import Operations
from worker_svc.runner_choice import RunnerChoice
from worker_svc.steps.step_limits import StepLimits

MakeWith = Callable[[Operations, KVPool, StepLimits], GraphRunner]


def operations_for(choice: RunnerChoice) -> Operations:
    """Triton's kernels where they were chosen, else torch's operators."""
    if not choice.has_kernels:
        return torch_operations.OPERATIONS
    from worker_svc.gpu import triton_operations  # noqa: PLC0415 - Triton may be missing where nobody needs it

    return triton_operations.OPERATIONS


def compilation_for(choice: RunnerChoice, make_with: MakeWith, on_part: Callable[[float], None]) -> CompileAhead:
    """Compilation of a start's kernels on all cores, for the CUDA device that was chosen; nothing without kernels.

    make_with: makes a runner with some operations
    on_part:   gets the part that is compiled, from 0 to 1
    """
    if not choice.has_kernels:
        return lambda _pool, _limits: None
    from worker_svc.gpu import launch_compilation  # noqa: PLC0415 - Triton may be missing where nobody needs it

    major, minor = torch.cuda.get_device_capability(choice.device)
    make = partial(make_with, launch_compilation.recording_operations())
    return partial(launch_compilation.compile_ahead, make, capability=10 * major + minor, on_part=on_part)
