"""The check of a model that ends otherwise than it should: `quire serve` refuses in one sentence all the same."""

import os
from pathlib import Path

import pytest

from quire.cli.supervisor.child import StartFailedError
from quire.cli.supervisor.model_check import check_model
from quire.worker_settings import WorkerSettings


@pytest.mark.parametrize(
    ("happens", "said"),
    [
        ("import os; os.kill(os.getpid(), 11)", r"the check of m failed \(killed by signal 11\): download"),
        ("import os; os._exit(3)", r"the check of m failed \(it printed nothing\): download"),
        ("import sys, os; sys.stderr.write('a\\nMemoryError\\n'); sys.stderr.flush(); os._exit(1)", r"\(MemoryError\)"),
        ("import time; time.sleep(3600)", "the check of m did not end within 1 s: check that its disk works"),
    ],
)
async def test_a_check_that_crashes_or_hangs_refuses_the_model(tmp_path: Path, happens: str, said: str) -> None:
    (tmp_path / "sitecustomize.py").write_text(happens)  # run by the interpreter as it starts
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    limit_s = 1.0 if "sleep" in happens else 60.0
    with pytest.raises(StartFailedError, match=said) as caught:
        await check_model(WorkerSettings(model="m"), environment, limit_s)
    assert caught.value.exit_code == 2
