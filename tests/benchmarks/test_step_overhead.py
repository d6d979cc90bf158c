"""The benchmark of step overhead, with all its processes, in a setting so small that its figures mean nothing."""

import json
import subprocess
import sys
from pathlib import Path

from benchmarks.report import ROOT

STEP_MS = 5.0


def test_the_benchmark_measures_what_it_says(tmp_path: Path) -> None:
    output = tmp_path / "result.json"
    flags = ["--batches", "1", "3", "--depths", "2", "--steps", "20", "--repeats", "1", "--step-ms", str(STEP_MS)]
    command = [sys.executable, "-m", "benchmarks.step_overhead", *flags, "--output", str(output)]
    completed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=90, check=False)
    assert completed.returncode == 0, completed.stderr
    assert "idle p50" in completed.stdout
    result = json.loads(output.read_text())
    assert result["command"].startswith("python") and "benchmarks.step_overhead --batches 1 3" in result["command"]
    assert result["versions"]["grpcio"] and result["machine"]["cpus"] >= 1
    assert [(row["depth"], row["batch"], row["step_ms"]) for row in result["rows"]] == [
        (2, 1, STEP_MS),
        (2, 3, STEP_MS),
    ]
    for row in result["rows"]:
        (repeat,) = row["repeats"]
        assert repeat == row["medians"]
        idle = repeat["worker_idle"]
        assert 0 < idle["p50"] <= idle["p90"] <= idle["p99"]
        # At depth 2 a step is sent while the one before it is executed, so it waits for about the rest of that one.
        assert repeat["turn"]["p50"] < 0 < repeat["answer"]["p50"]
        assert repeat["scheduler_cpu_ms"] > 0
