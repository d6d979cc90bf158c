"""The CPU's kernels in C++, compiled at first use. Not here yet."""

from kernels.native.cpu_kernels import CpuKernels, NativeUnavailableError
from kernels.native.torch_kernels import TorchKernels


def native_kernels() -> CpuKernels:
    """Compiled kernels, from the cache or anew. Raises NativeUnavailableError, which says why there are none."""
    raise NativeUnavailableError("there are no native kernels yet")


def choose_kernels(choice: str) -> tuple[CpuKernels, str | None]:
    """The kernels for `choice` (auto, native, torch), and with auto why they are not native."""
    if choice == "torch":
        return TorchKernels(), None
    try:
        return native_kernels(), None
    except NativeUnavailableError as error:
        if choice == "native":
            raise
        return TorchKernels(), str(error)
