"""The benchmarks of a CPU's kernels run in small, and account for what they measure."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.cpu import tensor_parallel
from benchmarks.cpu.request_kinds import section_of
from tests.services import ROOT


def _run(module: str, out: Path, *arguments: str) -> Any:
    command = [sys.executable, "-m", f"benchmarks.cpu.{module}", "--small", "--rows", "1", "3", "--steps", "2"]
    subprocess.run([*command, *arguments, "--out", str(out)], cwd=ROOT, check=True, capture_output=True)
    (written,) = out.glob("*.json")
    return json.loads(written.read_text())


@pytest.mark.long
@pytest.mark.parametrize("kernels", ["native", "torch"])
def test_a_step_is_the_sum_of_its_parts(tmp_path: Path, kernels: str) -> None:
    result = _run("cpu_step", tmp_path, "--dtype", "float32", "--kernels", kernels)
    assert result["milliseconds"].keys() == {"1", "3"}
    for parts in result["milliseconds"].values():
        named = ("products", "head", "attention", "rotate and write", "norms", "activations", "greedy")
        assert all(parts[part] > 0 for part in named)
        assert parts["kernel by kernel"] > max(parts[part] for part in named)


@pytest.mark.long
def test_int8_weights_are_compared_with_plain_ones(tmp_path: Path) -> None:
    result = _run("int8_speed", tmp_path, "--rounds", "1")
    assert [each["rows"] for each in result["figures"]] == [1, 3]
    for each in result["figures"]:
        assert each["speedup"] == pytest.approx(each["plain_ms"] / each["int8_ms"], rel=0.02)


@pytest.mark.long
def test_the_reductions_of_a_group_are_part_of_its_steps(tmp_path: Path) -> None:
    result = _run("tensor_parallel", tmp_path, "--rounds", "1", "--dtype", "float32")
    assert [each["rows"] for each in result["figures"]] == [1, 3]
    for each in result["figures"]:
        assert 0 <= each["wait_share"] <= each["reduce_share"] < 100
        assert each["sent_bytes"] > 0
    assert tensor_parallel.section_of(result).headlines


@pytest.mark.long
@pytest.mark.timeout(240)
def test_kinds_of_requests_are_compared_with_greedy_ones(tmp_path: Path) -> None:
    load = ("--model", "tiny", "--sequences", "8", "--requests", "8", "--rounds", "1", "--kinds", "top-p", "beams")
    command = [sys.executable, "-m", "benchmarks.cpu.request_kinds", *load, "--out", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    document = json.loads((tmp_path / "request_kinds_top-p_beams_8.json").read_text())
    assert [row["kind"] for row in document["rows"]] == ["greedy", "top-p", "beams"]
    for row in document["rows"]:
        assert row["ratio"] == pytest.approx(row["tokens_per_s"] / document["rows"][0]["tokens_per_s"], rel=0.01)
    section = section_of(document)
    assert len(section.headlines) == 2 and section.verdict
