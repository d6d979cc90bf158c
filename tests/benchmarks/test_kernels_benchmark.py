"""Every path of the kernels' benchmark runs without a device; figures show targets and errors."""

import json
import math
import os
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
import torch

from benchmarks.bar_chart import Bar, bar_chart
from benchmarks.gpu.kernel_bench.clock import HostClock
from benchmarks.gpu.kernel_bench.figures import (
    Check,
    Figure,
    Figures,
    Target,
    markdown,
    not_measured,
    only_tried,
    times_faster,
)
from benchmarks.gpu.kernel_bench.lab import Lab, Size
from benchmarks.gpu.kernel_bench.peers import all_peers
from benchmarks.gpu.kernels import Run

ROOT = Path(__file__).resolve().parents[2]
SECTIONS = {"ceilings", "decode", "comparisons", "prefill", "cascade", "sampling", "layers"}
DECODE = Figure(section="decode", case="a | b", unit="GB/s", value=2550.0, us=400.0, ceiling=3000.0)
SVG = "{http://www.w3.org/2000/svg}"


def run(folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "benchmarks.gpu.kernels", "--device", "cpu", "--out", str(folder)]
    return subprocess.run(command, cwd=ROOT, env={**os.environ, **environment}, capture_output=True, text=True)


@pytest.mark.long
def test_every_path_runs_in_the_interpreter_and_nothing_is_shown_as_measured(tmp_path: Path) -> None:
    done = run(tmp_path, TRITON_INTERPRET="1", OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads((tmp_path / "kernels.json").read_text())
    assert result["failures"] == result["key_figures"] == {} and result["is_smoke_test"]
    assert {row["section"] for row in result["rows"]} == SECTIONS
    assert all(row["value"] is row["us"] is row["is_met"] is None and row["note"] for row in result["rows"])
    checks = [row["check"] for row in result["rows"] if row["check"] is not None]
    assert len(checks) >= 20 and all(check["max_error"] <= check["allowed"] for check in checks)
    assert "only tried" in (tmp_path / "kernels.md").read_text()
    ET.parse(tmp_path / "kernels.svg")


def test_a_section_that_fails_or_comes_too_late_takes_no_figure_of_others_away(tmp_path: Path) -> None:
    (tmp_path / "no.so").write_text("")
    half = Run(Lab(torch.device("meta"), torch.float16, HostClock(), Size.FULL), all_peers(tmp_path / "no.so"))
    half.figures.add(DECODE)
    half.measure("layers", budget_s=60.0)  # nothing runs on a device of that name
    half.measure("sampling", budget_s=0.0)
    half.write(tmp_path)
    result = json.loads((tmp_path / "kernels.json").read_text())
    assert [row["value"] for row in result["rows"]] == [2550.0] and not half.is_good
    assert "Traceback" in result["failures"]["layers"] and "not begun" in result["failures"]["sampling"]


@pytest.mark.long
def test_without_the_interpreter_a_run_on_the_cpu_is_refused(tmp_path: Path) -> None:
    done = run(tmp_path / "none", TRITON_INTERPRET="0")
    assert done.returncode == 2 and "TRITON_INTERPRET=1" in done.stdout
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize(
    ("target", "is_met"),
    [
        (Target("share", 0.85), True),
        (Target("share", 0.86), False),
        (Target("value", 2550), True),
        (Target("value", 2000, at_most=True), False),
        (None, None),
    ],
)
def test_a_target_is_of_the_figure_or_of_its_share(target: Target | None, is_met: bool | None) -> None:
    figure = Figure(section="decode", case="", unit="GB/s", value=2550.0, ceiling=3000.0, target=target)
    assert figure.is_met is is_met


def test_what_was_not_measured_meets_nothing() -> None:
    figure = Figure(section="decode", case="", unit="us", value=9.0, us=9.0, target=Target("value", 12, at_most=True))
    assert figure.is_met
    missing = not_measured(figure, "not available here: no library")
    assert missing.is_met is None and missing.us is None and "no library" in markdown([missing])
    assert only_tried(figure).value is None and only_tried(missing) == missing


def test_a_result_that_is_off_or_not_a_number_is_wrong() -> None:
    assert Check(0.1, 0.1).is_right
    assert not Check(0.2, 0.1).is_right and not Check(math.nan, 0.1).is_right


def test_only_what_was_measured_is_compared() -> None:
    figures = Figures()
    slower = Figure(section="decode", case="a | b", by="other", unit="GB/s", value=1275.0, us=800.0)
    figures.add(DECODE, slower, not_measured(DECODE, ""))
    own, other = figures.find("decode", "a | b"), figures.find("decode", "a | b", "other")
    assert times_faster("a", own, other, Target("value", 2.0)).is_met
    assert times_faster("a", own, figures.find("decode", "c")).value is None


def test_a_table_of_markdown_keeps_its_columns() -> None:
    lines = markdown([DECODE]).splitlines()
    assert len({line.replace("\\|", "").count("|") for line in lines}) == 1
    assert "85.0%" in lines[2]


def test_bars_are_as_long_as_their_shares() -> None:
    chart = ET.fromstring(bar_chart("title", [Bar("a < b", "quire", 0.9, 0.85), Bar("c", "other", 0.45)]))
    widths = [float(bar.attrib["width"]) for bar in chart.iter(f"{SVG}rect")][1:]  # the first is the background
    assert widths[0] == pytest.approx(2 * widths[1], abs=0.1)
    assert "a < b · quire" in [text.text for text in chart.iter(f"{SVG}text")]


def test_a_ceiling_is_found_whatever_program_reached_it() -> None:
    figures = Figures([Figure(section="ceilings", case="read", by="Triton sum", unit="GB/s", value=3000.0), DECODE])
    assert figures.ceiling("read") == 3000.0
    assert figures.ceiling("copy") is None
