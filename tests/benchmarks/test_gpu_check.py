"""The GPU check's orchestration, without a GPU: what it needs, what it runs, what it leaves in its folder."""

import ast
import itertools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.gpu.check_environment import (
    LEAST,
    NEEDED,
    device_fault,
    missing_requirements,
    version_numbers,
)
from benchmarks.gpu.check_plan import (
    ATTENTION_LIBRARIES,
    FIRST_KERNELS,
    KERNEL_TESTS,
    CheckPlan,
    StageGroup,
    dry_plan,
    gpu_plan,
)
from benchmarks.gpu.check_report import LOG_FILE, PAGE_FILE, REPORT_FILE, Report, ResumeError, figure_rows
from benchmarks.gpu.check_stages import Stage, StageResult
from benchmarks.gpu.gpu_check import MAX_PLOTS, NOT_READY, check, jobs_at_once, refuse_unless_ready
from benchmarks.report import ROOT
from tests.on_gpu.families import own_share
from tests.on_gpu.test_families import SOME
from tests.worker.tiny_models import TINY_MODELS
from worker_svc.start.attention_libraries import LIBRARY_NAMES

MAX_FILES = 8
DRAWS = "import sys; [open(f'{sys.argv[1]}/plot{n}.svg', 'w').write('<svg/>') for n in range(9)]"


def stage(name: str, code: str, *, is_correctness: bool, needs: str | None = None, least_s: float = 0) -> Stage:
    command = ("-c", code, "{out}")
    return Stage(name=name, command=command, limit_s=30, least_s=least_s, is_correctness=is_correctness, needs=needs)


def plan_of(together: tuple[Stage, ...], alone: tuple[Stage, ...]) -> CheckPlan:
    return CheckPlan((StageGroup(together, is_parallel=True), StageGroup(alone, is_parallel=False)))


def report_of(folder: Path, plan: CheckPlan, commit: str = "abc") -> Report:
    return Report(folder, [each.name for each in plan.stages], {"gpu": None}, {"commit": commit})


def checked(folder: Path, plan: CheckPlan) -> tuple[bool, dict[str, Any]]:
    is_correct = check(plan, report_of(folder, plan), budget_s=60, jobs=2)
    return is_correct, json.loads((folder / REPORT_FILE).read_text())


def test_a_failed_benchmark_is_recorded_and_does_not_make_the_check_fail(tmp_path: Path) -> None:
    plan = plan_of(
        (stage("kernels/a", "print('fine')", is_correctness=True),),
        (stage("fast", "raise SystemExit('slow')", is_correctness=False),),
    )
    is_correct, report = checked(tmp_path, plan)
    assert is_correct and report["is_correct"] and report["is_complete"]
    assert [(each["name"], each["status"]) for each in report["stages"]] == [
        ("kernels/a", "passed"),
        ("fast", "failed"),
    ]
    assert "slow" in report["stages"][1]["tail"]
    log = (tmp_path / LOG_FILE).read_text()
    assert "===== kernels/a: passed" in log and "fine" in log and "slow" in log
    page = (tmp_path / PAGE_FILE).read_text()
    assert "Complete." in page and "## fast: failed\n\n```\nslow\n```" in page


def test_a_wrong_kernel_makes_the_check_fail_and_the_rest_is_still_measured(tmp_path: Path) -> None:
    plan = plan_of(
        (stage("kernels/a", "assert 1 == 2", is_correctness=True),),
        (stage("plots", DRAWS, is_correctness=False),),
    )
    is_correct, report = checked(tmp_path, plan)
    assert not is_correct and not report["is_correct"]
    assert [each["status"] for each in report["stages"]] == ["failed", "passed"]
    assert len(list(tmp_path.glob("*.svg"))) == MAX_PLOTS
    assert len(list(tmp_path.iterdir())) <= MAX_FILES
    assert "**NOT correct.**" in (tmp_path / PAGE_FILE).read_text()


def test_a_check_with_a_skipped_stage_is_not_complete(tmp_path: Path) -> None:
    plan = plan_of(
        (stage("kernels/a", "pass", is_correctness=True),),
        (stage("late", "pass", is_correctness=False, least_s=1e6),),
    )
    is_correct, report = checked(tmp_path, plan)
    assert is_correct and not report["is_complete"] and report["not_ended"] == ["late"]
    assert "Not complete; `--resume` continues with: late." in (tmp_path / PAGE_FILE).read_text()


def test_a_check_in_pieces_is_complete_when_every_stage_has_ended_in_one_of_them(tmp_path: Path) -> None:
    counts = "import os, sys; open(os.environ['TALLY'], 'a').write(sys.argv[2])"
    environment = {"TALLY": str(tmp_path / "tally")}

    def counted(name: str, **more: Any) -> Stage:
        command = ("-c", counts, "{out}", name)
        return Stage(name=name, command=command, limit_s=30, least_s=0, environment=environment, **more)

    plan = plan_of((counted("a"), counted("b")), (counted("m"), counted("c", needs="m")))
    out = tmp_path / "out"
    out.mkdir()
    first = report_of(out, plan)
    check(plan.part(["a"]), first, budget_s=60, jobs=2)
    assert not first.is_complete and first.not_ended == ["b", "m", "c"]
    second = report_of(out, plan)
    second.resume()
    check(plan.part(["b"], second.passed), second, budget_s=60, jobs=2)
    third = report_of(out, plan)
    third.resume()
    check(plan.part([], third.passed), third, budget_s=60, jobs=2)
    report = json.loads((out / REPORT_FILE).read_text())
    assert report["is_complete"] and [each["name"] for each in report["stages"]] == ["a", "b", "m", "c"]
    assert (tmp_path / "tally").read_text() == "abmc", "each stage has run once"


def test_a_stage_that_is_run_again_brings_what_it_needs(tmp_path: Path) -> None:
    model = stage("model", "pass", is_correctness=False)
    reader = stage("reader", "pass", is_correctness=False, needs="model")
    plan = plan_of((), (model, stage("other", "pass", is_correctness=False), reader))
    assert plan.part(["reader"]).stages == (model, reader)
    assert plan.part([], ["model", "other"]).stages == (model, reader)
    assert plan.part([], ["model", "other", "reader"]).groups == ()


def test_results_of_another_commit_are_not_continued(tmp_path: Path) -> None:
    plan = plan_of((stage("a", "pass", is_correctness=True),), ())
    checked(tmp_path, plan)
    with pytest.raises(ResumeError, match=r"is of commit 'abc', and this is 'def': take another --out"):
        report_of(tmp_path, plan, commit="def").resume()


def test_the_page_has_measured_figures_beside_their_floors() -> None:
    step = {"batch": 256, "read_gb": 49.4, "tflop": 3.9, "step_ms": 14.0, "floor_ms": 12.8, "ratio": 1.094}
    rows = [
        {"section": "prefill", "case": "4 x 4096", "by": "quire", "unit": "TFLOP/s", "value": 400.0, "share": 0.5},
        {"section": "prefill", "case": "4 x 4096", "by": "other", "unit": "TFLOP/s", "value": 300.0, "share": 0.4},
    ]
    results = {"decode_step.json": step, "kernels.json": {"rows": rows}, "cut.json": "not finished"}
    result = StageResult(name="all", is_correctness=False, status="passed", results=results)
    assert list(figure_rows(result)) == [
        ("decode step, batch 256, 49.4 GB, 3.9 TFLOP", "14.0 ms", "12.8 ms", "1.094 ×"),
        ("prefill: 4 x 4096", "400 TFLOP/s", "800 TFLOP/s", "50%"),
    ]


def test_what_tells_most_comes_first_and_every_stage_runs_a_file_that_exists() -> None:
    plan = gpu_plan(Path("/model"))
    names = [each.name for each in plan.stages]
    assert len(set(names)) == len(names)
    assert names[:2] == ["device", "first/model"]
    last_first = max(index for index, name in enumerate(names) if name.startswith("first/"))
    assert names[last_first + 1 : last_first + 5] == ["random model", "decode step", "prefill", "kernel speed"]
    assert names[-5:] == [f"families {share} of 5" for share in range(1, 6)], "what takes longest is last"
    assert {"kernels/test_decode_attention", "families 1 of 5", "services/equal_outputs"} <= set(names)
    for each in (*plan.stages, *dry_plan(Path("/model")).stages):
        if each.is_correctness:
            files = [part.partition("::")[0] for part in each.command if part.startswith("tests/")]
            assert files and all((ROOT / file).exists() for file in files), each
        else:
            assert (ROOT / f"{each.command[1].replace('.', '/')}.py").is_file(), each


def test_groups_of_gpus_are_checked_where_there_are_two_and_else_the_page_says_so(tmp_path: Path) -> None:
    one, two = (gpu_plan(Path("/model"), num_gpus=number) for number in (1, 2))
    assert {each.name for each in two.stages} - {each.name for each in one.stages} == {"groups of GPUs"}
    assert one.left_out == {"groups of GPUs": "needs 2 GPUs, and there is one"} == one.part(["device"]).left_out
    assert two.left_out == dry_plan(Path("/model")).left_out == {}
    names = [each.name for each in one.stages]
    report = Report(tmp_path, names, {"gpu": None}, {"commit": "abc"}, one.left_out)
    report.write()
    assert "Not run on this machine: groups of GPUs, which needs 2 GPUs, and there is one." in report.page()
    assert json.loads((tmp_path / REPORT_FILE).read_text())["left_out"] == dict(one.left_out)


@pytest.mark.parametrize("library", ATTENTION_LIBRARIES)
def test_attention_libraries_are_checked_where_one_is_installed_and_else_the_page_says_so(library: str) -> None:
    name = "kernels/test_attention_libraries"
    none, one = (gpu_plan(Path("/model"), libraries=installed) for installed in ((), (library,)))
    assert {each.name for each in one.stages} - {each.name for each in none.stages} == {name}
    assert none.left_out == {name: "needs FlashInfer or FlashAttention-3, and neither is installed"}
    assert one.left_out == {}


def test_attention_libraries_have_the_names_of_the_workers_option() -> None:
    assert tuple(ATTENTION_LIBRARIES) == LIBRARY_NAMES


@pytest.mark.parametrize("plan", [gpu_plan(Path("model")), dry_plan(Path("model"))], ids=["gpu", "dry"])
def test_every_family_is_in_one_share_of_the_stages(plan: CheckPlan) -> None:
    stages = [each for each in plan.stages if "tests/on_gpu/test_families.py" in each.command]
    shares = [each.environment["ON_GPU_FAMILIES"] for each in stages]
    families = [family for share in shares for family in own_share(tuple(TINY_MODELS), share)]
    assert sorted(families) == sorted(TINY_MODELS)
    sizes = [len(own_share(tuple(TINY_MODELS), share)) for share in shares]
    assert max(sizes) <= 3, "they take twenty seconds each, beside others, after a start of half a minute"
    assert all(own_share(SOME, share) for share in shares), "pytest fails without a test"


@pytest.mark.parametrize("share", ["0/5", "6/5", "two"])
def test_a_share_that_is_none_is_refused(share: str) -> None:
    with pytest.raises(ValueError):
        own_share(("opt", "gpt2"), share)


def test_asking_which_stages_there_are_imports_no_torch() -> None:
    """The first process on the device is a stage's, and what is missing must be said in words."""
    code = "import sys, benchmarks.gpu.gpu_check; raise SystemExit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_device_that_a_worker_would_refuse_is_refused_before_any_stage(capsys: pytest.CaptureFixture[str]) -> None:
    fault = device_fault()
    assert fault is not None and "torch sees no CUDA device" in fault
    environment = {"missing": {}, "gpu": {"num_gpus": 1, "fault": "Triton compiles its launcher in C, which failed"}}
    refuse_unless_ready(environment, needs_gpu=False)
    refuse_unless_ready({"missing": {}, "gpu": {"num_gpus": 1, "fault": None}}, needs_gpu=True)
    with pytest.raises(SystemExit) as ended:
        refuse_unless_ready(environment, needs_gpu=True)
    assert ended.value.code == NOT_READY
    assert "no worker would start on this machine: Triton compiles its launcher" in capsys.readouterr().err


@pytest.mark.parametrize(("free_gib", "jobs"), [(139, 8), (79, 8), (39, 5), (22, 3), (6, 1)])
def test_fewer_stages_run_side_by_side_where_the_gpu_has_less_memory(free_gib: int, jobs: int) -> None:
    environment = {"num_cpus": 16, "gpu": {"free_memory_bytes": free_gib << 30}}
    assert jobs_at_once(environment, is_dry_run=False) == jobs
    assert jobs_at_once({"num_cpus": 4, "gpu": None}, is_dry_run=True) == 4


def test_each_kind_of_kernel_comes_first_by_tests_that_exist() -> None:
    for test in (test for tests in FIRST_KERNELS.values() for test in tests):
        file, _, name = test.partition("::")
        assert f"def {name}(" in (ROOT / KERNEL_TESTS / file).read_text(), test


def test_a_dry_run_walks_every_stage_and_needs_no_gpu() -> None:
    dry, full = dry_plan(Path("/model")), gpu_plan(Path("/model"))
    assert [each.name for each in dry.stages] == [each.name for each in full.stages]
    assert not any("cuda" in each.command or "8b" in each.command for each in dry.stages)
    assert not any("TRITON_INTERPRET" in each.environment for each in full.stages)
    kernels = [each for each in dry.stages if any(part.startswith(KERNEL_TESTS) for part in each.command)]
    assert kernels and all(each.environment["TRITON_INTERPRET"] == "1" for each in kernels)


def test_stages_are_chosen_by_pattern() -> None:
    chosen = gpu_plan(Path("/model")).part(["services/*", "decode step"])
    names = [each.name for each in chosen.stages]
    assert names[:2] == ["random model", "decode step"]
    assert len(names) > 4 and all(name.startswith("services/") for name in names[2:])


@pytest.mark.long
@pytest.mark.timeout(300)
def test_a_part_of_a_dry_run_and_the_rest_of_it(tmp_path: Path) -> None:
    out = str(tmp_path / "out")
    done = run("--out", out, "--dry-run", "--only", "device", "--jobs", "1")
    assert done.returncode == 0, done.stdout + done.stderr
    part = ("--only", "device", "first/norms*", "block moves")
    done = run("--out", out, "--dry-run", "--resume", *part, "--jobs", "1")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "device" not in done.stdout.splitlines()[0], "it has passed before"
    report = json.loads((tmp_path / "out" / REPORT_FILE).read_text())
    statuses = {each["name"]: each["status"] for each in report["stages"]}
    assert statuses == dict.fromkeys(("device", "first/norms, rotary, activation", "block moves"), "passed")
    assert report["is_dry_run"] and report["is_correct"] and not report["is_complete"]
    assert "dry run: the figures mean nothing" in (tmp_path / "out" / PAGE_FILE).read_text()


@pytest.mark.long
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so_in_one_sentence(tmp_path: Path) -> None:
    done = run("--out", str(tmp_path / "out"))
    assert done.returncode == NOT_READY
    sentence = "torch sees no CUDA device on this machine, and this check needs one NVIDIA GPU; --dry-run needs none"
    assert done.stderr.splitlines() == [f"gpu_check: {sentence}"]
    assert not (tmp_path / "out").exists()


@pytest.mark.long
def test_missing_packages_are_named_all_at_once(tmp_path: Path) -> None:
    for module in ("redis", "structlog"):  # in the way of the real ones
        (tmp_path / f"{module}.py").write_text("raise ModuleNotFoundError('No module named here')\n")
    done = run("--out", str(tmp_path / "out"), path=str(tmp_path))
    assert done.returncode == NOT_READY
    assert " lacks redis structlog." in done.stderr and "PYTHONPATH" in done.stderr


def test_what_a_broken_package_lacks_is_named_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, needs in {"outer": "inner>=2", "inner": "absent", "other": 'extra-one; extra == "more"'}.items():
        info = tmp_path / f"{name}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\nRequires-Dist: {needs}\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert missing_requirements("outer") == {"absent"}
    assert missing_requirements("other") == set()


SERVICES = ("scheduler_svc.__main__", "worker_svc.__main__", "quire.cli.__main__")  # that stages start


@pytest.mark.parametrize("plan", [gpu_plan(Path("model")), dry_plan(Path("model"))], ids=["gpu", "dry"])
def test_what_stages_import_is_looked_for(plan: CheckPlan) -> None:
    """Follows the imports at the top of every module of ours that a stage runs, or that those import."""
    looked_for = {name.partition(".")[0] for name in NEEDED} | sys.stdlib_module_names
    waiting = {*SERVICES, *(name for each in plan.stages for name in modules_of(each))}
    assert {"tests.on_gpu.test_served_streams", "tests.conftest", "benchmarks.gpu.decode_step"} <= waiting
    seen: set[str] = set()
    strange = set()
    while waiting:
        module = waiting.pop()
        seen.add(module)
        names = imported(module)
        ours = {name for name in names if (ROOT / name.partition(".")[0]).is_dir()}
        strange |= {f"{module}: {name}" for name in names - ours if name.partition(".")[0] not in looked_for}
        parents = {name.rsplit(".", dots)[0] for name in ours for dots in range(name.count(".") + 1)}
        waiting |= {name for name in parents if file_of(name) is not None} - seen
    assert {"tests.quire.serve_lines", "worker_svc.gpu.runner", "common.log"} <= seen
    assert not strange


def modules_of(stage: Stage) -> set[str]:
    """Modules that a stage's command names: the one that it runs, or those of pytest's files and plugins."""
    _, program, *words = stage.command
    if program != "pytest":
        return {program}
    plugins = {word for option, word in itertools.pairwise(words) if option == "-p" and word.startswith("tests.")}
    paths = [ROOT / word.partition("::")[0] for word in words if word.startswith("tests/")]
    files = [file for path in paths for file in (path.rglob("*.py") if path.is_dir() else [path])]
    files += [folder / "conftest.py" for path in paths for folder in path.parents if (folder / "conftest.py").exists()]
    return plugins | {".".join(file.relative_to(ROOT).with_suffix("").parts) for file in files}


def file_of(module: str) -> Path | None:
    """The file of a module of ours; None: it is none."""
    path = ROOT.joinpath(*module.split("."))
    return next((file for file in (path.with_suffix(".py"), path / "__init__.py") if file.exists()), None)


def imported(module: str) -> set[str]:
    """Names that a module imports when it is imported: modules, and what may be modules in packages."""
    file = file_of(module)
    assert file is not None, module
    names: set[str] = set()
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names


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
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=250, check=False)
