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
# In parts that take about as long each: a process imports for seconds before it tests.
LONG = {
    "decode and cascade": {"test_decode_attention.py", "test_cascade_attention.py"},
    "prefill and models": {"test_prefill_attention.py", "test_forward.py", "test_device_runner.py"},
    "quantised weights": {"test_quantised_models.py", "test_quantised_products.py"},
}
PARTS = {**LONG, "others": FILES.difference(*LONG.values())}
TIMEOUT_S = 900


def interpret(names: Set[str]) -> subprocess.CompletedProcess[str]:
    """Run the interpreter without coverage: no reported code runs there."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("COVERAGE_")}
    environment |= {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    paths = [str(FOLDER / name) for name in sorted(names)]
    plugins = ("-p", "no:cacheprovider", "-p", "tests.kernels.on_device.quick_interpreter")
    command = [sys.executable, "-m", "pytest", "-q", *plugins, *paths]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S)


@pytest.mark.long
@pytest.mark.skipif(torch.cuda.is_available(), reason="the files are collected where there is a GPU")
@pytest.mark.timeout(TIMEOUT_S)
@pytest.mark.parametrize("part", PARTS)
def test_kernels_are_right_in_the_interpreter(part: str) -> None:
    done = interpret(PARTS[part])
    assert done.returncode == 0, done.stdout + done.stderr
