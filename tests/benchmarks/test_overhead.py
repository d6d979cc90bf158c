"""The benchmark of overhead, with all its processes, in a setting so small that its figures mean nothing."""

import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest

from benchmarks.overhead.overhead_table import Overhead, Spread, print_rows, print_verdicts, row_of, summary_of
from benchmarks.report import ROOT

STEP_MS = 5.0


@pytest.mark.long
def test_the_benchmark_takes_an_iteration_apart_and_measures_delivery(tmp_path: Path) -> None:
    output = tmp_path / "result.json"
    flags = ["--parts", "stages", "delivery", "--batches", "3", "--depths", "2", "--steps", "20"]
    flags += ["--step-ms", str(STEP_MS), "--readers", "4", "--seconds", "0.5", "--output", str(output)]
    command = [sys.executable, "-m", "benchmarks.overhead", *flags]
    completed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=110, check=False)
    assert completed.returncode == 0, completed.stderr
    result = json.loads(output.read_text())
    assert result["command"].startswith("python") and "benchmarks.overhead --parts stages" in result["command"]
    assert result["versions"]["grpcio"] and result["machine"]["cpus"] >= 1
    (table,) = result["parts"]["stages"]["tables"]
    assert (table["depth"], table["batch"]) == (2, 3)
    idle = table["worker_idle"]
    assert 0 < idle["p50"] <= idle["p90"] <= idle["p99"]
    stages = {stage["name"]: stage for stage in table["stages"]}
    assert stages["execute"]["each"]["p50"] >= STEP_MS and stages["execute"]["not_hidden"] == 0
    assert all(stage["each"]["p99"] > 0 for stage in stages.values()), "a stage was never seen"
    delivery = result["parts"]["delivery"]
    assert delivery["tokens_per_s"] > 0 < delivery["lag"]["p50"]
    assert set(delivery["cpu_us_per_token"]) == {"scheduler", "worker", "store", "client"}
    assert summary_of(result)["delivery"]["lag"] == delivery["lag"]


def overhead(idle_ms: float, iteration_ms: float) -> Overhead:
    def spread(ms: float) -> Spread:
        return Spread(p50=ms, p90=2 * ms, p99=3 * ms)

    return Overhead(
        worker_idle=spread(idle_ms),
        iteration=spread(iteration_ms),
        answer=spread(0.1),
        turn=spread(-5.0),
        delivery=spread(5.0),
        scheduler_cpu_ms=1.5,
    )


def test_a_row_is_the_median_of_its_repeats_and_held_against_its_budget(capsys: pytest.CaptureFixture[str]) -> None:
    repeats = [overhead(0.1, 0.2), overhead(0.3, 0.1), overhead(0.2, 0.25)]
    row = row_of(2, 256, 8.0, repeats)
    assert (row.medians.worker_idle.p50, row.medians.iteration.p99) == (0.2, 3 * 0.2)
    print_rows([row])
    print_verdicts([row, row_of(2, 64, 8.0, repeats)])
    printed = capsys.readouterr().out
    assert "depth 2, batch 256: 0.200 ms is within the budget of 0.3 ms (goal 0.15 ms)" in printed
    assert "batch 64:" not in printed, "the budget is for 256"


@pytest.mark.parametrize("has_parts", [True, False])
def test_the_history_keeps_the_middle_of_each_row_also_of_results_that_had_rows_alone(has_parts: bool) -> None:
    rows = [asdict(row_of(2, 256, 8.0, [overhead(0.1, 0.2)]))]
    result = {"parts": {"steps": {"rows": rows}}} if has_parts else {"rows": rows}
    (kept,) = summary_of(result)["rows"]
    assert kept == {
        "depth": 2,
        "batch": 256,
        "step_ms": 8.0,
        "worker_idle_p50": 0.1,
        "iteration_p50": 0.2,
        "scheduler_cpu_ms": 1.5,
    }
