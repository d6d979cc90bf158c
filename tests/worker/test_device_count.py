"""Number of CUDA devices as the driver tells it, before torch is loaded: a stand-in for the driver has some."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.worker.tiny_models import write_tiny_model

_DRIVER = """
int cuInit(unsigned flags) { return STATUS; }
int cuDeviceGetCount(int *count) { *count = 3; return 0; }
"""
_PRINT_COUNT = "from worker_svc.option_check import num_cuda_devices; print(num_cuda_devices())"
_PRINT_REASON = "from worker_svc.runner_choice import detect_machine; print(detect_machine().why_no_cuda)"


def run(folder: Path, status: int, *arguments: str) -> "subprocess.CompletedProcess[str]":
    """Run Python with a driver whose start ends with this status."""
    library = folder / "libcuda.so.1"
    command = ["cc", "-x", "c", "-shared", "-fPIC", f"-DSTATUS={status}", "-", "-o", str(library)]
    subprocess.run(command, check=True, input=_DRIVER, text=True)
    environment = {**os.environ, "LD_LIBRARY_PATH": str(folder)}
    return subprocess.run([sys.executable, *arguments], env=environment, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(("status", "said"), [(0, "3"), (100, "0"), (999, "None")])
def test_the_driver_counts_devices(status: int, said: str, tmp_path: Path) -> None:
    assert run(tmp_path, status, "-c", _PRINT_COUNT).stdout.strip() == said


@pytest.mark.skipif(torch.cuda.is_available(), reason="this torch sees the devices of a driver")
@pytest.mark.parametrize(("status", "said"), [(0, "the driver has 3 CUDA devices, and"), (100, "None")])
def test_devices_that_the_driver_has_and_torch_does_not_see_are_told_with_the_reason(
    status: int, said: str, tmp_path: Path
) -> None:
    told = run(tmp_path, status, "-c", _PRINT_REASON).stdout.strip()
    assert told.startswith(said)
    if status == 0 and torch.version.cuda is None:
        assert told.endswith(f"this torch is a build without CUDA ({torch.__version__}): install another")


def test_a_group_with_too_few_devices_is_refused_before_torch_is_loaded(tmp_path: Path) -> None:
    model = write_tiny_model("llama_gqa", tmp_path / "model")
    worker = (
        "-X",
        "importtime",
        "-m",
        "worker_svc",
        "--model",
        str(model),
        "--device",
        "cuda",
        "--tensor-parallel",
        "4",
    )
    refused = run(tmp_path, 0, *worker)
    assert refused.returncode == 2
    last = refused.stderr.splitlines()[-1]
    assert last.startswith("worker: --tensor-parallel 4 takes a CUDA device for each rank, cuda:0 to cuda:3")
    assert "the last one is cuda:2: give at most --tensor-parallel 3" in last
    loaded = {line.rpartition("|")[2].strip() for line in refused.stderr.splitlines() if line.startswith("import time")}
    assert "worker_svc.option_check" in loaded and "torch" not in loaded


def test_groups_without_devices_of_their_own_are_refused_before_anything_is_started(tmp_path: Path) -> None:
    model = write_tiny_model("llama_gqa", tmp_path / "model")
    serve = ("-m", "quire.cli", "serve", str(model), "--data-dir", str(tmp_path / "data"), "--listen", "127.0.0.1:0")
    devices = ("--device", "cuda", "--workers", "2", "--tensor-parallel", "2", "--gateways", "0")
    refused = run(tmp_path, 0, *serve, *devices)
    assert refused.returncode == 2
    last = refused.stderr.splitlines()[-1]
    assert "takes a CUDA device for each rank, cuda:2 to cuda:3, and the last one is cuda:2" in last
    assert "give --workers 1 or less, or less --tensor-parallel" in last
