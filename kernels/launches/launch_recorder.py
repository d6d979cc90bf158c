"""Records launches of kernels as Triton would compile them for a GPU, without one.

Wrappers run unchanged, with tensors of any device; Triton types and specialises their arguments, and the launch is
recorded and dropped before Triton compiles. So kernels write no results. Knows no kernel.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from types import SimpleNamespace
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

WARP_SIZE = 32
_DEVICES = count(1)
_OPTIONS = ("num_warps", "num_ctas", "num_stages", "enable_fp_fusion")
_CONSTANT = "constexpr"

Path = tuple[int, ...]
LaunchKey = tuple[str, str]  # kernel, and its key in Triton's cache of compiled kernels


@dataclass(frozen=True, slots=True)
class RecordedLaunch:
    """Input of one compilation; equal ones share their machine code."""

    kernel: Any
    signature: Mapping[str, str]  # type of each argument
    constants: Mapping[Path, object]  # by place among the arguments
    attributes: Mapping[Path, list[list[object]]]
    options: Mapping[str, object]

    @property
    def name(self) -> str:
        return str(self.kernel.__name__)

    @property
    def types(self) -> Mapping[str, str]:
        """Types of the arguments that are not constants."""
        return {name: kind for name, kind in self.signature.items() if kind != _CONSTANT}

    def __str__(self) -> str:
        """One line, for people."""
        names = list(self.signature)
        aligned = {names[path[0]] for path, attributes in self.attributes.items() if attributes}
        arguments = [f"{name}: {kind}{' %16' * (name in aligned)}" for name, kind in self.types.items()]
        constants = [f"{names[path[0]]}={value!r}" for path, value in self.constants.items()]
        return f"{self.name}({', '.join(arguments + constants)}) {dict(self.options)}"


class LaunchRecorder:
    """The launches so far: the distinct ones, and how many there were."""

    def __init__(self) -> None:
        self._launches: dict[LaunchKey, RecordedLaunch] = {}
        self.num_launches = 0

    @property
    def launches(self) -> dict[LaunchKey, RecordedLaunch]:
        """Distinct launches, in order."""
        return dict(self._launches)

    def record_launch(self, *, key: str, fn: Any, compile: Mapping[str, Any], **_: object) -> bool:
        """Triton's hook before it compiles; returns True, which stops the compilation."""
        self.num_launches += 1
        self._launches[fn.name, key] = RecordedLaunch(
            kernel=fn.jit_function,
            signature=compile["signature"],
            constants=compile["constants"],
            attributes=compile["configs"][0],
            options={name: compile[name] for name in _OPTIONS},
        )
        return True


@contextmanager
def recorded_launches(capability: int = 90) -> Iterator[LaunchRecorder]:
    """Records all launches of kernels, in this thread and others, as for a GPU of that compute capability."""
    recorder = LaunchRecorder()
    hook = triton.knobs.runtime.jit_cache_hook
    triton.knobs.runtime.jit_cache_hook = recorder.record_launch
    try:
        with absent_gpu(capability):
            yield recorder
    finally:
        triton.knobs.runtime.jit_cache_hook = hook


@contextmanager
def absent_gpu(capability: int) -> Iterator[None]:
    """Has Triton compile for a GPU of that compute capability, without one: only `warmup` of a kernel works."""
    driver.set_active(_driver_of_no_gpu(capability))
    try:
        yield
    finally:
        driver.set_active(None)  # Triton then finds the machine's own


def _driver_of_no_gpu(capability: int) -> Any:
    """The part of a driver that Triton needs before it compiles. No other one has the number of its device, by which
    Triton keeps what it has compiled.
    """
    device = -next(_DEVICES)
    return SimpleNamespace(
        get_current_device=lambda: device,
        get_current_stream=lambda _device: 0,
        get_current_target=lambda: GPUTarget("cuda", capability, WARP_SIZE),
    )
