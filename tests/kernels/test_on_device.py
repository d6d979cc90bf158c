"""The Triton kernels in Triton's interpreter, in a few processes of their own."""

import os
import subprocess
import sys
from collections.abc import Set
from pathlib import Path

import pytest
import torch

FOLDER = Path(__file__).parent / "on_device"
FILES = {path.name for path in FOLDER.glob("test_*.py")}
# What takes longest apart, about as long each, and all others together: a process imports for seconds before it tests.
LONG = {
    "decode": {"test_decode_attention.py"},
    "cascade and prefill": {"test_cascade_attention.py", "test_prefill_attention.py"},
    "models": {"test_forward.py", "test_device_runner.py"},
}
PARTS = {**LONG, "others": FILES.difference(*LONG.values())}
TIMEOUT_S = 900


def interpret(names: Set[str]) -> subprocess.CompletedProcess[str]:
    """Without coverage: nothing that is reported runs there."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("COVERAGE_")}
    environment |= {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    paths = [str(FOLDER / name) for name in sorted(names)]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *paths]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the files are collected where there is a GPU")
@pytest.mark.timeout(TIMEOUT_S)
@pytest.mark.parametrize("part", PARTS)
def test_kernels_are_right_in_the_interpreter(part: str) -> None:
    done = interpret(PARTS[part])
    assert done.returncode == 0, done.stdout + done.stderr
