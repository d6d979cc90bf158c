"""The Triton kernels in Triton's interpreter, each file of tests in a process of its own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

FOLDER = Path(__file__).parent / "on_device"
FILES = [] if torch.cuda.is_available() else sorted(path.name for path in FOLDER.glob("test_*.py"))  # else collected


@pytest.mark.parametrize("name", FILES)
def test_kernels_are_right_in_the_interpreter(name: str) -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(FOLDER / name)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
