"""GPU checks in one command: kernels, models and services are right, and how fast they are.

For a machine with one NVIDIA GPU, its own Python, torch and Triton, and no network; nothing is installed. What tells
most comes first: the device, one kernel of each kind and one served model within the first minute, then a decode step
and prefill of 8 B parameters, then all tests and the other figures. Each stage is a process with a time limit. The
folder gets `gpu_check.md` (one page), `gpu_check.json` (all results; both rewritten after each stage), `gpu_check.log`,
and a few plots.

    python -m benchmarks.gpu.gpu_check --out DIR [--only PATTERN ...] [--resume] [--budget-s S]
    python -m benchmarks.gpu.gpu_check --out DIR --dry-run    # every stage in small on a CPU, in Triton's interpreter

`--resume` keeps what has passed and runs the rest, so the check can be done in pieces. Exit status: 0; 1 if a stage of
correctness did not pass; 2 if there is no GPU, a Python package is missing, or the folder is another check's.
"""

import argparse
import json
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from benchmarks.gpu.check_plan import CheckPlan, dry_plan, gpu_plan
from benchmarks.gpu.check_report import LOG_FILE, PAGE_FILE, Report, ResumeError, brief
from benchmarks.gpu.check_stages import StageRunner
from benchmarks.report import ROOT, circumstances, table
from worker_svc.option_check import installed_attention

BUDGET_S, DRY_BUDGET_S = 570.0, 900.0  # of ten minutes; of the fifteen that `make test` has
MAX_PLOTS = 5  # with page, report and log eight files
MAX_PLOT_BYTES = 1 << 20
MAX_JOBS = 8
NOT_READY = 2
_MODEL_SCRATCH_BYTES = 20 << 30
_STAGE_BYTES = 7 << 30  # of the GPU: caches whose offsets pass 32 bits have 4 GiB, some families' workers a little more


def check(plan: CheckPlan, report: Report, *, budget_s: float, jobs: int) -> bool:
    """Run the stages and fill the folder. True if no stage of correctness, now or before, did not pass."""
    with tempfile.TemporaryDirectory(prefix="quire-check-") as work:
        runner = StageRunner(
            Path(work), budget_s, lambda result: report.add(result, runner.folder(result.name) / "log")
        )
        try:
            for group in plan.groups:
                runner.run_all(group.stages, jobs if group.is_parallel else 1)
        finally:
            runner.close()
            _keep_plots(Path(work), report.folder)
            report.write()
    return report.is_correct


def main() -> None:
    """Reads the command line, looks whether the machine has what is needed, and checks."""
    options = parse_arguments()
    signal.signal(signal.SIGTERM, _end)
    environment = _environment()
    refuse_unless_ready(environment, needs_gpu=not options.dry_run)
    scratch = _scratch_folder(is_large=not options.dry_run)
    try:
        model = scratch / "model"
        if options.dry_run:
            whole = dry_plan(model)
        else:
            num_gpus = environment["gpu"]["num_gpus"]
            whole = gpu_plan(model, options.fa3_library, num_gpus, installed_attention())
        report = _report(options, whole, environment)
        plan = whole.part(options.only, report.passed)
        if not plan.groups and not options.resume:
            _refuse(f"no stage is named {' or '.join(options.only)}")
        jobs = options.jobs or jobs_at_once(environment, is_dry_run=options.dry_run)
        budget_s = options.budget_s or (DRY_BUDGET_S if options.dry_run else BUDGET_S)
        is_correct = check(plan, report, budget_s=budget_s, jobs=jobs)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    _print_summary(report)
    raise SystemExit(0 if is_correct else 1)


def _report(options: argparse.Namespace, plan: CheckPlan, environment: dict[str, Any]) -> Report:
    """Report in the folder: a new one, or the one that is there."""
    names = [stage.name for stage in plan.stages]
    report = Report(options.out, names, environment, circumstances(), plan.left_out, is_dry_run=options.dry_run)
    if options.resume:
        try:
            report.resume()
        except ResumeError as error:
            _refuse(str(error))
    else:
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / LOG_FILE).unlink(missing_ok=True)
    return report


def _environment() -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.gpu.check_environment"]
    answer = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    environment: dict[str, Any] = json.loads(answer.stdout.splitlines()[-1])
    return environment


def refuse_unless_ready(environment: dict[str, Any], *, needs_gpu: bool) -> None:
    """Exit with all missing packages at once, to be installed in one go, or with why the GPU cannot be used."""
    if environment["missing"]:
        names = " ".join(sorted(environment["missing"]))
        reasons = "".join(f"\n  {name}: {why}" for name, why in sorted(environment["missing"].items()))
        _refuse(
            f"{environment['executable']} lacks {names}.{reasons}\nWithout a network: `pip download --no-deps` these "
            "elsewhere, for this Python, `pip install --no-index --no-deps --target FOLDER` them here, and put FOLDER "
            "on PYTHONPATH."
        )
    if needs_gpu and environment["gpu"] is None:
        _refuse("torch sees no CUDA device on this machine, and this check needs one NVIDIA GPU; --dry-run needs none")
    if needs_gpu and environment["gpu"]["fault"] is not None:
        _refuse(f"no worker would start on this machine: {environment['gpu']['fault']}")


def _refuse(why: str) -> NoReturn:
    print(f"gpu_check: {why}", file=sys.stderr)
    raise SystemExit(NOT_READY)


def jobs_at_once(environment: dict[str, Any], *, is_dry_run: bool) -> int:
    """Stages of correctness that run side by side: as many as processors, and a GPU's free memory, allow."""
    num_cpus: int = environment["num_cpus"]
    if is_dry_run:
        return max(1, min(MAX_JOBS, num_cpus))
    in_memory: int = environment["gpu"]["free_memory_bytes"] // _STAGE_BYTES
    return max(1, min(MAX_JOBS, num_cpus // 2, in_memory))


def _scratch_folder(*, is_large: bool) -> Path:
    """Choose the model's folder: a large one's in memory if there is room, else among temporary files."""
    memory = Path("/dev/shm")
    in_memory = is_large and memory.is_dir() and shutil.disk_usage(memory).free > _MODEL_SCRATCH_BYTES
    return Path(tempfile.mkdtemp(prefix="quire-check-model-", dir=memory if in_memory else None))


def _keep_plots(work: Path, folder: Path) -> None:
    plots = [path for path in sorted(work.rglob("*.svg")) if path.stat().st_size <= MAX_PLOT_BYTES]
    room = MAX_PLOTS - len({path.name for path in folder.glob("*.svg")} - {path.name for path in plots})
    for path in plots[: max(0, room)]:
        shutil.copyfile(path, folder / path.name)


def _print_summary(report: Report) -> None:
    rows = [(each.name, each.status, each.seconds, brief(each.key_figures)) for each in report.results]
    print(table(("stage", "", "seconds", ""), rows))
    for each in report.results:
        if each.status != "passed":
            print(f"\n----- {each.name}: {each.status}\n{each.tail[-2000:]}")
    for name, why in report.left_out.items():
        print(f"\nnot run on this machine: {name}, which {why}")
    words = f"{'correct' if report.is_correct else 'NOT correct'}, {'' if report.is_complete else 'not '}complete"
    print(f"\n{words}; see {report.folder / PAGE_FILE}")


def _end(number: int, frame: FrameType | None) -> NoReturn:
    raise SystemExit(128 + number)


def parse_arguments() -> argparse.Namespace:
    """Defaults are those of `make gpu-check`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder of the report")
    parser.add_argument(
        "--dry-run", action="store_true", help="every stage in small on a CPU; no figure means anything"
    )
    parser.add_argument("--only", nargs="*", default=[], help='names of stages, e.g. "first/*" "decode step"')
    parser.add_argument(
        "--resume", action="store_true", help="continue the report in the folder with what has not passed"
    )
    parser.add_argument("--budget-s", type=float, help="of all stages of this call together; default 570, dry 900")
    parser.add_argument("--fa3-library", type=Path, help="FlashAttention-3, as `benchmarks.gpu.kernels` says")
    parser.add_argument(
        "--jobs",
        type=int,
        help="stages of correctness at once; default: half the CPUs, one for 7 GiB of GPU memory, at most 8",
    )
    return parser.parse_args()


if __name__ == "__main__":
    main()
