"""The benchmark of overhead, with all its processes, in a setting so small that its figures mean nothing."""

import json
import subprocess
import sys
from pathlib import Path

from benchmarks.overhead_table import summary_of
from benchmarks.report import ROOT

STEP_MS = 5.0


def test_the_benchmark_measures_what_it_says(tmp_path: Path) -> None:
    output = tmp_path / "result.json"
    flags = ["--batches", "3", "--depths", "2", "--steps", "20", "--repeats", "1", "--step-ms", str(STEP_MS)]
    flags += ["--readers", "4", "--seconds", "1"]
    command = [sys.executable, "-m", "benchmarks.overhead", *flags, "--output", str(output)]
    completed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=90, check=False)
    assert completed.returncode == 0, completed.stderr
    result = json.loads(output.read_text())
    assert result["command"].startswith("python") and "benchmarks.overhead --batches 3" in result["command"]
    assert result["versions"]["grpcio"] and result["machine"]["cpus"] >= 1
    (row,) = result["parts"]["steps"]["rows"]
    assert (row["depth"], row["batch"], row["step_ms"]) == (2, 3, STEP_MS)
    (repeat,) = row["repeats"]
    assert repeat == row["medians"]
    idle = repeat["worker_idle"]
    assert 0 < idle["p50"] <= idle["p90"] <= idle["p99"]
    # At depth 2 a step is sent while the one before it is executed, so it waits for about the rest of that one.
    assert repeat["turn"]["p50"] < 0 < repeat["answer"]["p50"]
    assert repeat["scheduler_cpu_ms"] > 0
    (table,) = result["parts"]["stages"]["tables"]
    stages = {stage["name"]: stage for stage in table["stages"]}
    assert stages["execute"]["each"]["p50"] >= STEP_MS and stages["execute"]["not_hidden"] == 0
    assert all(stage["each"]["p99"] > 0 for stage in stages.values()), "a stage was never seen"
    delivery = result["parts"]["delivery"]
    assert delivery["tokens_per_s"] > 0 < delivery["lag"]["p50"]
    assert set(delivery["cpu_us_per_token"]) == {"scheduler", "worker", "store", "client"}
    kept = summary_of(result)
    assert kept["rows"][0]["worker_idle_p50"] == idle["p50"] and kept["delivery"]["lag"] == delivery["lag"]
