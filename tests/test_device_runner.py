"""The plugin that puts every worker on the runner of accelerators: it takes effect, and leaves out what there is."""

import ast
from pathlib import Path

import pytest

from tests.device_runner import LEFT_OUT, VARIABLE
from tests.services import DEMO_MODEL, ROOT, Service


def test_what_is_left_out_is_there() -> None:
    for name in LEFT_OUT:
        path, _, function = name.partition("[")[0].partition("::")
        tree = ast.parse(Path(ROOT / path).read_text())
        functions = {each.name for each in tree.body if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)}
        assert not function or function in functions


@pytest.mark.long
@pytest.mark.parametrize("runner", ["device", "cpu"])
def test_a_worker_takes_its_runner_from_the_variable(runner: str) -> None:
    options = ("--model", str(DEMO_MODEL), "--device", "cpu", "--num-blocks", "8", "--max-model-len", "64")
    with Service("worker_svc", *options, "--threads", "1", env={VARIABLE: runner}) as worker:
        ready = worker.wait_for("ready")
    assert ("kernels" in ready) == (runner == "cpu")  # the CPU's own; the other runner's are torch's operators
