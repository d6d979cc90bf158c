"""The Triton kernels in Triton's interpreter, each file of tests in a process of its own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

FOLDER = Path(__file__).parent / "on_device"
FILES = [] if torch.cuda.is_available() else sorted(path.name for path in FOLDER.glob("test_*.py"))  # else collected
TIMEOUT_S = 300


def interpret(name: str) -> subprocess.CompletedProcess[str]:
    """Without coverage: nothing that is reported runs there."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("COVERAGE_")}
    environment |= {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(FOLDER / name)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S)


@pytest.mark.timeout(TIMEOUT_S)
@pytest.mark.parametrize("name", FILES)
def test_kernels_are_right_in_the_interpreter(name: str) -> None:
    done = interpret(name)
    assert done.returncode == 0, done.stdout + done.stderr
