"""Both ways to compute on a CPU, compiled at most once for all tests, where workers look for them as well."""

import os
from collections.abc import Callable, Iterator

import pytest
import torch

from kernels.native.cpu_kernels import CpuKernels
from kernels.native.native_kernels import NativeKernels, native_kernels
from kernels.native.torch_kernels import TorchKernels


@pytest.fixture(scope="session")
def native() -> NativeKernels:
    return native_kernels(os.environ)


@pytest.fixture
def native_on_two_threads() -> Iterator[NativeKernels]:
    """Kernels on two threads, for any thread settings of the environment."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(2)
    yield native_kernels(os.environ)
    torch.set_num_threads(num_threads)


@pytest.fixture(scope="session", params=["torch", "native"])
def kernels(request: pytest.FixtureRequest) -> CpuKernels:
    make: Callable[[], CpuKernels] = {
        "torch": TorchKernels,
        "native": lambda: request.getfixturevalue("native"),
    }[request.param]
    return make()
