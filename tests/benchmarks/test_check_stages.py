"""Stages of a check: after any outcome of one the others run, and every outcome is recorded."""

import json
import signal
import subprocess
import threading
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from benchmarks.gpu.check_stages import Stage, StageResult, StageRunner, pytest_counts
from tests.patience import patient

WAITS = "import time; print('begun', flush=True); time.sleep(60)"
WRITES = (
    "import json, sys; json.dump({'key_figures': {'gb_per_s': 7}, 'rows': [1]}, open(sys.argv[1] + '/a.json', 'w'))"
)


def stage(name: str, code: str, *arguments: str, limit_s: float = 30.0, least_s: float = 0.0) -> Stage:
    return Stage(name=name, command=("-c", code, *arguments), limit_s=limit_s, least_s=least_s, is_correctness=True)


def run(work: Path, *stages: Stage, budget_s: float = 60.0, jobs: int = 1) -> dict[str, StageResult]:
    results: dict[str, StageResult] = {}
    StageRunner(work, budget_s, lambda result: results.update({result.name: result})).run_all(stages, jobs)
    return results


def test_a_stage_that_fails_or_hangs_keeps_no_other_from_running(tmp_path: Path) -> None:
    results = run(
        tmp_path,
        stage("fails", "print('this is why'); raise SystemExit(3)"),
        stage("hangs", WAITS, limit_s=0.7),
        stage("works", WRITES, "{out}"),
    )
    assert [results[name].status for name in ("fails", "hangs", "works")] == ["failed", "timed out", "passed"]
    assert results["fails"].exit_code == 3 and "this is why" in results["fails"].tail
    assert results["hangs"].exit_code is None and results["hangs"].seconds < patient(10)
    assert results["works"].key_figures == {"gb_per_s": 7} and results["works"].results["a.json"]["rows"] == [1]
    assert [results[name].is_good for name in ("fails", "hangs", "works")] == [False, False, True]


def test_what_does_not_fit_into_the_budget_is_left_out_and_said(tmp_path: Path) -> None:
    results = run(tmp_path, stage("late", "pass", least_s=500.0), stage("quick", "pass"), budget_s=400.0)
    assert (results["late"].status, results["quick"].status) == ("skipped", "passed")
    assert "of the budget were left" in results["late"].tail
    assert not results["late"].is_good  # what was not shown does not hold


def test_a_stage_is_ended_with_the_processes_that_it_started(tmp_path: Path) -> None:
    child_file = tmp_path / "child"
    code = (
        "import pathlib, subprocess, sys, time\n"
        f"child = subprocess.Popen([sys.executable, '-c', {WAITS!r}])\n"
        "pathlib.Path(sys.argv[1]).write_text(str(child.pid))\n"
        "time.sleep(60)"
    )
    results = run(tmp_path / "work", stage("parent", code, str(child_file), limit_s=5.0))
    assert results["parent"].status == "timed out"
    child = Path("/proc") / child_file.read_text() / "cmdline"
    give_up_at_s = time.monotonic() + patient(10)
    while child.exists() and child.read_bytes():
        assert time.monotonic() < give_up_at_s, "the child of a stage goes on"
        time.sleep(0.01)


def test_closing_ends_what_runs_and_begins_nothing_more(tmp_path: Path) -> None:
    results: dict[str, StageResult] = {}
    runner = StageRunner(tmp_path, 60.0, lambda result: results.update({result.name: result}))
    stages = [stage("long", WAITS), stage("never", "pass", least_s=1.0)]
    thread = threading.Thread(target=runner.run_all, args=(stages,))
    thread.start()
    log = runner.folder("long") / "log"
    while not (log.is_file() and log.read_text()):
        time.sleep(0.01)
    runner.close()
    thread.join()
    assert (results["long"].status, results["never"].status) == ("failed", "skipped")


def test_closing_ends_a_stage_that_is_just_begun(tmp_path: Path) -> None:
    results: dict[str, StageResult] = {}
    runner = StageRunner(tmp_path, 60.0, lambda result: results.update({result.name: result}))
    begin = subprocess.Popen

    def begin_and_close(*arguments: Any, **options: Any) -> "subprocess.Popen[bytes]":
        process = begin(*arguments, **options)
        runner.close()
        return process

    with patch.object(subprocess, "Popen", begin_and_close):
        runner.run_all([stage("long", WAITS)])
    assert (results["long"].status, results["long"].exit_code) == ("failed", -signal.SIGKILL)


def test_results_that_were_cut_off_are_no_obstacle(tmp_path: Path) -> None:
    code = "import sys; open(sys.argv[1] + '/a.json', 'w').write(json_text)".replace("json_text", repr('{"rows": ['))
    (result,) = run(tmp_path, stage("cut", code, "{out}")).values()
    assert result.results == {"a.json": "not finished"}
    assert json.dumps(result.results)


@pytest.mark.parametrize(
    ("output", "counts"),
    [
        ("....\n12 passed in 3.21s\n", {"passed": 12}),
        ("=== 2 failed, 10 passed, 1 skipped, 3 warnings in 9.9s ===\n", {"failed": 2, "passed": 10, "skipped": 1}),
        ("1 error in 0.1s\n", {"error": 1}),
        ("killed\n", {}),
    ],
)
def test_tests_are_counted_by_the_last_line(output: str, counts: dict[str, int]) -> None:
    assert pytest_counts(output) == counts


def test_tests_that_were_all_skipped_have_shown_nothing(tmp_path: Path) -> None:
    file = tmp_path / "test_nothing.py"
    file.write_text("import pytest\n\n@pytest.mark.skip\ndef test_nothing():\n    pass\n")
    command = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", "/dev/null", str(file))
    checked = Stage(name="tests", command=command, limit_s=60, least_s=0, is_correctness=True)
    (result,) = run(tmp_path / "work", checked).values()
    assert (result.status, result.exit_code, result.key_figures) == ("failed", 0, {"skipped": 1})
