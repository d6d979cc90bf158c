"""Triton's launcher is made before a model is loaded, and what it lacks is said."""

import errno
import subprocess
import sys

import pytest
import torch

from worker_svc.option_check import DeviceError
from worker_svc.runner_choice import RunnerChoice
from worker_svc.start.launcher_check import check_launcher, make_launcher

CUDA = RunnerChoice(kind="device", device=torch.device("cuda:0"), kv_dtype=None)


def no_compiler() -> None:
    raise RuntimeError("Failed to find C compiler. Please specify via CC environment variable")


def no_headers() -> None:
    subprocess.run([sys.executable, "-c", "raise SystemExit(1)"], check=True)


@pytest.mark.parametrize(("make", "fault"), [(no_compiler, "Failed to find C compiler"), (no_headers, "exit status 1")])
def test_a_launcher_that_cannot_be_compiled_is_refused_with_what_to_install(make: object, fault: str) -> None:
    assert callable(make)
    with pytest.raises(DeviceError, match=rf"on cuda:0 Triton .*{fault}.*: install gcc and .*python3-dev"):
        make_launcher(make, "cuda:0")


@pytest.mark.parametrize(
    "error",
    [
        PermissionError(errno.EACCES, "Permission denied", "/home/other/.triton"),
        OSError(errno.EROFS, "Read-only file system", "/var/cache/quire"),
        ImportError("cuda_utils.so: failed to map segment from shared object"),
    ],
    ids=str,
)
def test_a_cache_that_does_not_hold_the_launcher_is_refused_with_how_to_give_another(error: Exception) -> None:
    """Regression: a compiler and headers were asked for, which were there."""

    def fail() -> None:
        raise error

    with pytest.raises(DeviceError, match=r"on cuda:0 Triton .* failed .*: set TRITON_CACHE_DIR to") as refused:
        make_launcher(fail, "cuda:0")
    assert "gcc" not in str(refused.value)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the launcher can be made")
def test_it_is_made_where_kernels_compute_and_nowhere_else() -> None:
    with pytest.raises(DeviceError, match="Triton compiles its launcher in C, which failed"):
        check_launcher(CUDA)
    check_launcher(RunnerChoice(kind="device", device=torch.device("cpu"), kv_dtype=None))
    check_launcher(RunnerChoice(kind="cpu", device=torch.device("cpu"), kv_dtype=None))
