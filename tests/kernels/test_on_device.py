"""The Triton kernels in Triton's interpreter, each file of tests in a process of its own, two at a time."""

import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

FOLDER = Path(__file__).parent / "on_device"
FILES = [] if torch.cuda.is_available() else sorted(path.name for path in FOLDER.glob("test_*.py"))  # else collected
NUM_AT_ONCE = 2
TIMEOUT_S = 300

Run = subprocess.CompletedProcess[str]


def interpret(name: str) -> Run:
    """Without coverage: nothing that is reported runs there."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("COVERAGE_")}
    environment |= {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(FOLDER / name)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S)


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest) -> Iterator[dict[str, Future[Run]]]:
    """Of the files that were asked for, all started at once."""
    items = [item for item in request.session.items if item.path == Path(__file__)]
    names = [str(item.callspec.params["name"]) for item in items if isinstance(item, pytest.Function)]
    with ThreadPoolExecutor(NUM_AT_ONCE) as pool:
        yield {name: pool.submit(interpret, name) for name in names}
        pool.shutdown(cancel_futures=True)


@pytest.mark.timeout(TIMEOUT_S)
@pytest.mark.parametrize("name", FILES)
def test_kernels_are_right_in_the_interpreter(name: str, runs: dict[str, Future[Run]]) -> None:
    done = runs[name].result()
    assert done.returncode == 0, done.stdout + done.stderr
