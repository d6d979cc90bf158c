"""The GPU check's orchestration, without a GPU: what it needs, what it runs, what it leaves in its folder."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.gpu.check_environment import LEAST, NEEDED, version_numbers
from benchmarks.gpu.check_stages import Stage
from benchmarks.gpu.gpu_check import MAX_PLOTS, NOT_READY, Report, StagePlan, check, gpu_plan, smoke_plan
from benchmarks.report import ROOT

MAX_FILES = 8
DRAWS = "import sys; [open(f'{sys.argv[1]}/plot{n}.svg', 'w').write('<svg/>') for n in range(9)]"


def stage(name: str, code: str, *, is_correctness: bool) -> Stage:
    return Stage(name=name, command=("-c", code, "{out}"), limit_s=30, least_s=0, is_correctness=is_correctness)


def checked(folder: Path, plan: StagePlan) -> tuple[bool, dict[str, Any]]:
    report = Report(folder, {"gpu": None}, {"commit": "abc"})
    is_correct = check(plan, report, budget_s=60, jobs=2)
    return is_correct, json.loads((folder / "gpu_check.json").read_text())


def test_a_failed_benchmark_is_recorded_and_does_not_make_the_check_fail(tmp_path: Path) -> None:
    plan = StagePlan(
        together=(stage("kernels/a", "print('fine')", is_correctness=True),),
        alone=(stage("fast", "raise SystemExit('slow')", is_correctness=False),),
    )
    is_correct, report = checked(tmp_path, plan)
    assert is_correct and report["is_correct"] and report["is_complete"]
    assert [(each["name"], each["status"]) for each in report["stages"]] == [
        ("kernels/a", "passed"),
        ("fast", "failed"),
    ]
    assert "slow" in report["stages"][1]["tail"]
    log = (tmp_path / "gpu_check.log").read_text()
    assert "===== kernels/a: passed" in log and "fine" in log and "slow" in log


def test_a_wrong_kernel_makes_the_check_fail_and_the_rest_is_still_measured(tmp_path: Path) -> None:
    plan = StagePlan(
        together=(stage("kernels/a", "assert 1 == 2", is_correctness=True),),
        alone=(stage("plots", DRAWS, is_correctness=False),),
    )
    is_correct, report = checked(tmp_path, plan)
    assert not is_correct and not report["is_correct"]
    assert [each["status"] for each in report["stages"]] == ["failed", "passed"]
    assert len(list(tmp_path.glob("*.svg"))) == MAX_PLOTS
    assert len(list(tmp_path.iterdir())) <= MAX_FILES


def test_the_stages_of_a_gpu_begin_with_correctness_and_run_files_that_exist() -> None:
    plan = gpu_plan(Path("/model"))
    assert all(each.is_correctness for each in plan.together)
    assert not any(each.is_correctness for each in plan.alone)
    names = [each.name for each in (*plan.together, *plan.alone)]
    assert len(set(names)) == len(names)
    assert {"kernels/test_decode_attention", "models/test_families", "services/equal_outputs"} <= set(names)
    for each in plan.together:
        assert (ROOT / each.command[-1]).exists(), each
    for each in (*plan.alone, *smoke_plan().alone):
        assert (ROOT / f"{each.command[1].replace('.', '/')}.py").is_file(), each


def test_stages_are_chosen_by_pattern() -> None:
    chosen = gpu_plan(Path("/model")).only(["services/*", "decode step"])
    assert all(each.name.startswith("services/") for each in chosen.together) and len(chosen.together) > 2
    assert [each.name for each in chosen.alone] == ["decode step"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so_in_one_sentence(tmp_path: Path) -> None:
    done = run("--out", str(tmp_path / "out"))
    assert done.returncode == NOT_READY
    assert done.stderr.splitlines() == [
        "gpu_check: torch sees no CUDA device on this machine, and this check needs one NVIDIA GPU"
    ]
    assert not (tmp_path / "out").exists()


def test_missing_packages_are_named_all_at_once(tmp_path: Path) -> None:
    for module in ("redis", "structlog"):  # in the way of the real ones
        (tmp_path / f"{module}.py").write_text("raise ModuleNotFoundError('No module named here')\n")
    done = run("--out", str(tmp_path / "out"), path=str(tmp_path))
    assert done.returncode == NOT_READY
    assert " lacks redis structlog." in done.stderr and "PYTHONPATH" in done.stderr


def test_what_is_looked_for_is_what_the_project_installs() -> None:
    files = (ROOT / "pyproject.toml", ROOT / "constraints.txt")
    installed = "".join(file.read_text() for file in files).lower().replace("_", "-")
    unknown = [package for package in NEEDED.values() if package not in installed]
    assert not unknown


def test_versions_are_compared_by_their_numbers() -> None:
    assert version_numbers("2.11.0+cu130") == (2, 11, 0) >= LEAST["torch"] > version_numbers("2.9.1")
    assert version_numbers("3.6.0") >= LEAST["triton"] > version_numbers("3.5.1rc1")


def run(*arguments: str, path: str = "") -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "benchmarks.gpu.gpu_check", *arguments]
    environment = {"PYTHONPATH": path, "PATH": "/usr/bin:/bin"}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=90, check=False)
