"""Lets Triton compile and launch for a GPU that is not there, with its launcher linked to a driver that does nothing.

So a launch costs the host what it costs it before the driver. Needs a C compiler, as Triton itself does. The kernels'
outputs have no content.
"""

import ctypes
import os
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia import driver as nvidia
from triton.runtime import driver

_SOURCE = Path(__file__).with_name("driver_stub.c")
_LIBRARY = "libcuda.so.1"
_TARGET = GPUTarget("cuda", 90, 32)


@contextmanager
def stubbed_driver() -> Iterator[None]:
    """Within it, kernels are compiled for sm_90, and their launches end in the stub. Once in a process."""
    assert not triton.knobs.runtime.interpret, "the interpreter launches nothing"
    with tempfile.TemporaryDirectory(prefix="quire-driver-") as folder:
        path = _build(Path(folder))
        ctypes.CDLL(str(path), mode=os.RTLD_GLOBAL | os.RTLD_NOW)  # found by its name from now on
        triton.knobs.nvidia.libcuda_path = folder
        utilities = nvidia.CudaUtils()
    driver.set_active(
        SimpleNamespace(
            utils=utilities,
            launcher_cls=nvidia.CudaLauncher,
            get_current_device=lambda: 0,
            get_current_stream=lambda _device: 0,
            get_current_target=lambda: _TARGET,
            allocate_default_profile_scratch=lambda *_: None,
        )
    )
    try:
        yield
    finally:
        driver.set_active(None)  # Triton then finds the machine's own


def _build(folder: Path) -> Path:
    path = folder / _LIBRARY
    includes = [f"-I{each}" for each in nvidia.include_dirs]
    subprocess.run(
        ["cc", "-O2", "-shared", "-fPIC", f"-Wl,-soname,{_LIBRARY}", *includes, str(_SOURCE), "-o", str(path)],
        check=True,
    )
    return path
