"""Has Triton make its launcher before a model is loaded: it compiles C against Python's headers, which may be missing.

Otherwise the first launch of a kernel would fail, minutes later; so it would if Triton's cache cannot be written.
Knows no kernel.
"""

import errno
import sysconfig
from collections.abc import Callable
from pathlib import Path

from worker_svc.option_check import DeviceError
from worker_svc.runner_choice import RunnerChoice

_MOST_CHARACTERS = 300  # of a fault
_CACHE_FAULTS = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT)


def check_launcher(choice: RunnerChoice) -> None:
    """Check it where the kernels compute; a second at the first start of a user. Raises DeviceError."""
    if not choice.has_kernels:
        return
    from triton.runtime import driver  # noqa: PLC0415 - Triton may be missing where nobody needs it

    make_launcher(lambda: driver.active.get_current_target(), str(choice.device))


def make_launcher(make: Callable[[], object], device: str) -> None:
    """Call `make`. Raises DeviceError, which says what to install, or to set."""
    try:
        make()
    except Exception as error:  # whatever a compiler, a cache or a driver that is not as Triton expects gives
        fault = f"{type(error).__name__}: {error}"[:_MOST_CHARACTERS]
        raise DeviceError(
            f"on {device} Triton compiles its launcher in C, which failed ({fault}){_remedy(error)}, or give "
            "--device cpu"
        ) from error


def _remedy(error: Exception) -> str:
    if isinstance(error, ImportError) or (isinstance(error, OSError) and error.errno in _CACHE_FAULTS):
        return ": set TRITON_CACHE_DIR to a folder that this user can write, with room and without noexec"
    headers = Path(sysconfig.get_paths()["include"]) / "Python.h"
    what = "" if headers.is_file() else f", and {headers} is missing"
    return f"{what}: install gcc and Python's headers (on Debian and Ubuntu gcc and python3-dev)"
