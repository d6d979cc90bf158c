"""Stages of a long check: each a process with its own time limit, all within one budget, and every end recorded.

A stage that fails, hangs or is left out never keeps the others from running. It knows nothing of what stages check.
"""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock
from typing import Any, Literal

from benchmarks.report import ROOT

Status = Literal["passed", "failed", "timed out", "skipped"]

_END_S = 5.0  # between SIGTERM and SIGKILL
_TAIL_CHARACTERS = 6000
_COUNTS = re.compile(r"(\d+) (passed|failed|skipped|errors?)\b")
_OFFLINE = {"HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}  # no stage may wait for a network


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """One process: `python *command`. `{out}` stands for its own folder, whose JSON and SVG files are results."""

    name: str
    command: tuple[str, ...]
    limit_s: float
    is_correctness: bool = False
    least_s: float = 10.0  # with less time left it is not begun
    environment: Mapping[str, str] = field(default_factory=dict)  # beside this process's
    needs: str | None = None  # stage whose output it reads, which therefore runs before it in every call


@dataclass(frozen=True, slots=True, kw_only=True)
class StageResult:
    """Outcome of a stage."""

    name: str
    is_correctness: bool
    status: Status
    exit_code: int | None = None  # None: not begun, or killed at its limit
    seconds: float = 0.0
    key_figures: dict[str, Any] = field(default_factory=dict)  # numbers of tests, and what its JSON files call so
    results: dict[str, Any] = field(default_factory=dict)  # its JSON files, by name
    tail: str = ""  # of its output, unless it passed

    @property
    def is_good(self) -> bool:
        return self.status == "passed" or not self.is_correctness

    @property
    def has_ended(self) -> bool:
        """True if the stage ran to its end, good or bad."""
        return self.status in ("passed", "failed")


class StageRunner:
    """Runs stages in `work`, each result handed to `on_result` as soon as it is known; `close` kills what runs."""

    def __init__(self, work: Path, budget_s: float, on_result: Callable[[StageResult], None]) -> None:
        self._work = work
        self._end_s = time.monotonic() + budget_s
        self._on_result = on_result
        self._lock = Lock()
        self._running: set[subprocess.Popen[bytes]] = set()

    @property
    def left_s(self) -> float:
        return self._end_s - time.monotonic()

    def run_all(self, stages: Iterable[Stage], jobs: int = 1) -> None:
        """Run the stages in order, up to `jobs` side by side."""
        with ThreadPoolExecutor(jobs) as pool:
            try:
                for ended in [pool.submit(self._run_and_tell, stage) for stage in stages]:
                    ended.result()
            except BaseException:  # this process is to end, too: the pool would wait for what runs
                self.close()
                raise

    def folder(self, stage_name: str) -> Path:
        """Folder of a stage's log and results."""
        return self._work / re.sub(r"[^\w.-]", "-", stage_name)

    def close(self) -> None:
        """Kill the running stages and start no more."""
        self._end_s = 0.0
        with self._lock:
            for process in self._running:
                _signal_group(process, signal.SIGKILL)

    def _run_and_tell(self, stage: Stage) -> None:
        result = self._run(stage)
        with self._lock:
            self._on_result(result)

    def _run(self, stage: Stage) -> StageResult:
        common: dict[str, Any] = {"name": stage.name, "is_correctness": stage.is_correctness}
        left_s = self.left_s
        if left_s < stage.least_s:
            return StageResult(
                **common, status="skipped", tail=f"only {max(0.0, left_s):.0f} s of the budget were left"
            )
        folder = self.folder(stage.name)
        (folder / "out").mkdir(parents=True)
        log = folder / "log"
        began_s = time.monotonic()
        exit_code = self._execute(stage, folder, min(stage.limit_s, left_s))
        seconds = round(time.monotonic() - began_s, 1)
        output = log.read_text(errors="replace")
        results = _json_files(folder / "out")
        counts = pytest_counts(output) if stage.command[:2] == ("-m", "pytest") else None
        status: Status = "timed out" if exit_code is None else "failed" if exit_code else "passed"
        if status == "passed" and counts is not None and not counts.get("passed"):
            status = "failed"  # nothing was shown
        return StageResult(
            **common,
            status=status,
            exit_code=exit_code,
            seconds=seconds,
            key_figures={**(counts or {}), **_key_figures(results)},
            results=results,
            tail="" if status == "passed" else output[-_TAIL_CHARACTERS:],
        )

    def _execute(self, stage: Stage, folder: Path, limit_s: float) -> int | None:
        """Run the process; return its exit code, or None if it was killed at its limit."""
        arguments = [part.replace("{out}", str(folder / "out")) for part in stage.command]
        with (folder / "log").open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, *arguments],
                cwd=ROOT,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=_environment(stage.environment),
                start_new_session=True,  # so that its own children can be ended with it
            )
            with self._lock:
                self._running.add(process)
                if not self._end_s:  # `close` came meanwhile
                    _signal_group(process, signal.SIGKILL)
            try:
                return process.wait(limit_s)
            except subprocess.TimeoutExpired:
                _signal_group(process, signal.SIGTERM)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(_END_S)
                return None
            finally:
                _signal_group(process, signal.SIGKILL)
                process.wait()
                with self._lock:
                    self._running.discard(process)


def pytest_counts(output: str) -> dict[str, int]:
    """Parse the counts from the last line of pytest's output."""
    last = next((line for line in reversed(output.splitlines()) if _COUNTS.search(line)), "")
    return {word.rstrip("s") if word.startswith("error") else word: int(n) for n, word in _COUNTS.findall(last)}


def _environment(own: Mapping[str, str]) -> dict[str, str]:
    """Environment with this repository on PYTHONPATH: child processes need our packages, installed or not."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return {**os.environ, **_OFFLINE, **own, "PYTHONPATH": path}


def _json_files(folder: Path) -> dict[str, Any]:
    contents = {}
    for path in sorted(folder.rglob("*.json")):
        try:
            contents[path.name] = json.loads(path.read_text())
        except ValueError:
            contents[path.name] = "not finished"  # the stage was killed while it wrote
    return contents


def _key_figures(results: dict[str, Any]) -> dict[str, Any]:
    """Collect the `key_figures` of the JSON files."""
    figures: dict[str, Any] = {}
    for content in results.values():
        if isinstance(content, dict):
            figures.update(content.get("key_figures", {}))
    return figures


def _signal_group(process: "subprocess.Popen[bytes]", number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, number)
