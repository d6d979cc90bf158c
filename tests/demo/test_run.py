"""The demonstration of `make demo`: it goes well from first to last line, and an interruption leaves nothing."""

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest

import quire
from benchmarks.report import ROOT
from demo.run import wait_ready
from tests.patience import patient
from tests.services import free_address


@pytest.mark.long
@pytest.mark.timeout(300)
def test_it_goes_well(tmp_path: Path) -> None:
    (tmp_path / "demo").mkdir()
    (tmp_path / "demo" / "model").symlink_to(ROOT / "demo" / "model")
    command = [sys.executable, "-P", "-m", "demo.run"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    ran = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=patient(200), check=False
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "story 5" in ran.stdout and "stopped cleanly" in ran.stdout


async def test_it_waits_as_long_as_the_server_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: where kernels compiled for more than two minutes it ended them, so that each call began anew."""
    server = await asyncio.create_subprocess_exec("sleep", "1000")
    loop = asyncio.get_running_loop()
    waiting = asyncio.create_task(wait_ready(server, free_address()))
    for _ in range(100):
        await asyncio.sleep(0)  # by then it waits
    now_s = loop.time
    monkeypatch.setattr(loop, "time", lambda: now_s() + 100_000)
    assert await asyncio.wait({waiting}, timeout=1) == (set(), {waiting})
    server.kill()
    with pytest.raises(quire.QuireError, match="quire serve ended with exit code"):
        await waiting


async def test_an_interruption_while_the_server_starts_leaves_no_task() -> None:
    """Regression: the question whether it is ready went on without its client, and Ctrl-C showed a traceback."""
    server = await asyncio.create_subprocess_exec("sleep", "1000")
    try:
        waiting = asyncio.create_task(wait_ready(server, free_address()))
        await asyncio.sleep(0.1)  # however far it is by then
        waiting.cancel()
        await asyncio.wait({waiting})
        assert asyncio.all_tasks() == {asyncio.current_task()}
    finally:
        server.kill()
        await server.wait()
