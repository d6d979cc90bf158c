"""Growth of costs: a very small run of real processes, and its summary."""

import json
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from benchmarks.report import ROOT
from benchmarks.scale.__main__ import PLOTS, report, summary_of
from benchmarks.scale.growth import exponent_of


def test_an_exponent_is_the_slope_of_logarithms() -> None:
    assert exponent_of([(2.0**n, 3 * 2.0 ** (1.5 * n)) for n in range(5)]) == pytest.approx(1.5)


@pytest.mark.long
def test_a_small_run_measures_memory_by_queued_requests(tmp_path: Path) -> None:
    output = tmp_path / "scale.json"
    command = [sys.executable, "-m", "benchmarks.scale", "--parts", "memory", "--queued", "20", "200"]
    completed = subprocess.run(
        [*command, "--output", str(output)], cwd=ROOT, capture_output=True, text=True, timeout=90, check=False
    )
    assert completed.returncode == 0, completed.stderr
    part = json.loads(output.read_text())["parts"]["memory"]
    assert [row["queued"] for row in part["rows"]] == [20, 200]
    assert all(row["slowest_admission_ms"] > 0 for row in part["rows"])
    assert part["rows"][1]["resident_mb"] >= part["rows"][0]["resident_mb"] > 10
    ET.parse(tmp_path / "scale_memory.svg")


def test_every_plot_has_its_columns(capsys: pytest.CaptureFixture[str]) -> None:
    for part, plot in PLOTS.items():
        rows = [{plot.by: 10**n, **dict.fromkeys(plot.costs, 2.0 * 10**n)} for n in range(1, 4)]
        kept = report(part, rows)
        assert set(kept["exponents"].values()) == {1.0}
        assert summary_of({"parts": {part: kept}})[part]["last"] == rows[-1]
        drawn = plot.drawn(rows)
        assert all(name in drawn for name in (*plot.costs.values(), "linear"))
    assert "grows as queued ** 1.00" in capsys.readouterr().out


def test_a_cost_of_nothing_is_left_out_of_the_plot() -> None:
    plot = PLOTS["memory"]
    rows = [{"queued": 1, "beyond_empty_mb": 0.0}, {"queued": 10, "beyond_empty_mb": 5.0}]
    assert plot.points(rows, "beyond_empty_mb") == [(10, 5.0)]
