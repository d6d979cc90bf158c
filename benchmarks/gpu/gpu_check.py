"""GPU checks in one command: kernels, models and services are right, and how fast they are.

For a machine with one NVIDIA GPU, its own Python, torch and Triton, and no network; nothing is installed. Correctness
comes first, then the figures that say most. Each stage is a process with a time limit; the folder gets
`gpu_check.json` (all results in one file, rewritten after each stage), `gpu_check.log`, and a few plots.

    python -m benchmarks.gpu.gpu_check --out DIR [--only PATTERN ...] [--budget-s S]
    python -m benchmarks.gpu.gpu_check --out DIR --device cpu --smoke    # all on the demo model, a few minutes

Exit status: 0; 1 if a stage of correctness did not pass; 2 if there is no GPU, or a Python package is missing.
"""

import argparse
import json
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from fnmatch import fnmatch
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from benchmarks.gpu.check_stages import Stage, StageResult, StageRunner
from benchmarks.report import ROOT, circumstances, table

BUDGET_S = 570.0  # of the ten minutes
MAX_PLOTS = 6  # with report and log eight files
MAX_PLOT_BYTES = 1 << 20
MAX_LOG_BYTES = 256 << 10  # of each stage, its end
NOT_READY = 2
_MODEL_SCRATCH_BYTES = 20 << 30
# A warning of a library's other version is no failure here, and a first launch compiles.
_PYTEST = (
    "-m",
    "pytest",
    "-q",
    "-p",
    "no:cacheprovider",
    "-W",
    "default",
    "-s",
    "-o",
    "timeout=190",
    "--durations",
    "3",
)
# What services and models have to answer, on whatever device the workers find: the same files as without a GPU.
SERVICE_TESTS = ("parallel_sampling", "beam_search", "parameters")
_TESTS_S = 200


@dataclass(frozen=True, slots=True)
class StagePlan:
    """Stages by how they run: those of `together` side by side, then those of `alone` one after another."""

    together: tuple[Stage, ...]
    alone: tuple[Stage, ...]

    def only(self, patterns: Sequence[str]) -> "StagePlan":
        """Keep the stages whose name matches a pattern; all without patterns."""

        def chosen(stages: tuple[Stage, ...]) -> tuple[Stage, ...]:
            return tuple(each for each in stages if not patterns or any(fnmatch(each.name, one) for one in patterns))

        return StagePlan(chosen(self.together), chosen(self.alone))


@dataclass(slots=True)
class Report:
    """Report of the results so far, kept in the folder."""

    folder: Path
    environment: dict[str, Any]
    circumstances: dict[str, Any]
    results: list[StageResult] = field(default_factory=list)
    began: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))

    def add(self, result: StageResult, log: Path) -> None:
        """Add a result and rewrite the report, so that it is complete whenever this process is killed."""
        self.results.append(result)
        print(f"{result.status:9}  {result.seconds:6.1f} s  {result.name}  {_brief(result.key_figures)}", flush=True)
        with (self.folder / "gpu_check.log").open("ab") as file:
            file.write(f"===== {result.name}: {result.status} after {result.seconds} s\n".encode())
            file.write(log.read_bytes()[-MAX_LOG_BYTES:] if log.is_file() else f"{result.tail}\n".encode())
        self.write(is_complete=False)

    def write(self, *, is_complete: bool) -> None:
        content = {
            "check": "gpu_check",
            "began": self.began,
            "is_complete": is_complete,
            "is_correct": self.is_correct,
            **self.circumstances,
            "environment": self.environment,
            "key_figures": {each.name: each.key_figures for each in self.results if each.key_figures},
            "stages": [asdict(each) for each in self.results],
        }
        part = self.folder / "gpu_check.json.part"
        part.write_text(json.dumps(content, indent=1) + "\n")
        part.replace(self.folder / "gpu_check.json")

    @property
    def is_correct(self) -> bool:
        return all(each.is_good for each in self.results)


def gpu_plan(model: Path, fa3_library: Path | None = None) -> StagePlan:
    """Stages for a machine with a GPU. `model`: folder of the random model of 8 B parameters, which is written once."""
    # Families have tests of their own here, which start all their workers at once.
    equal_outputs = _tests("services/equal_outputs", "tests/e2e/test_equal_outputs.py", "-k", "not family")
    pressure = _tests("services/memory_pressure", "tests/e2e/test_memory_pressure.py", "-k", "swapped or recomputed")
    services = [_tests(f"services/{name}", f"tests/e2e/test_{name}.py") for name in SERVICE_TESTS]
    models = [_tests(f"models/{path.stem}", path) for path in _test_files("tests/on_gpu")]
    kernels = [_tests(f"kernels/{path.stem}", path) for path in _test_files("tests/kernels/on_device")]
    on_model = ("--device", "cuda", "--model", str(model), "--out", "{out}")
    small_enough = ("--device", "cuda", "--out", "{out}")
    peer = () if fa3_library is None else ("--fa3-library", str(fa3_library.resolve()))
    return StagePlan(
        together=(*models, equal_outputs, pressure, *kernels, *services, _tests("runner", "tests/worker/device")),
        alone=(
            Stage(
                name="kernel speed",
                command=("-m", "benchmarks.gpu.kernels", "--quick", *peer, *small_enough),
                limit_s=120,
                least_s=30,
            ),
            Stage(name="random model", command=("-m", "benchmarks.random_models", "8b", str(model)), limit_s=90),
            Stage(name="decode step", command=("-m", "benchmarks.gpu.decode_step", *on_model), limit_s=150, least_s=45),
            Stage(
                name="against transformers",
                command=("-m", "benchmarks.gpu.against_transformers", "--limit-s", "60", *on_model),
                limit_s=220,
                least_s=90,
            ),
            Stage(name="block moves", command=("-m", "benchmarks.gpu.block_moves", *small_enough), limit_s=60),
            Stage(name="swap or recompute", command=("-m", "benchmarks.gpu.swap_or_recompute", *on_model), limit_s=90),
            Stage(
                name="block sizes",
                command=("-m", "benchmarks.gpu.block_size_sweep", "--limit-s", "100", *small_enough),
                limit_s=130,
                least_s=40,
            ),
        ),
    )


def smoke_plan() -> StagePlan:
    """Stages for any machine: every benchmark in small, and one file of kernels in Triton's interpreter."""
    small = ("--device", "cpu", "--small", "--out", "{out}")
    return StagePlan(
        together=(_tests("services/parameters", "tests/e2e/test_parameters.py"),),
        alone=(
            Stage(
                name="random model",
                command=("-m", "benchmarks.random_models", "tiny", "{out}/model", "--device", "cpu"),
                limit_s=60,
            ),
            Stage(name="decode step", command=("-m", "benchmarks.gpu.decode_step", *small), limit_s=120),
            Stage(
                name="against transformers", command=("-m", "benchmarks.gpu.against_transformers", *small), limit_s=180
            ),
            Stage(
                name="block sizes",
                command=("-m", "benchmarks.gpu.block_size_sweep", "--sizes", "16", "4", *small),
                limit_s=180,
            ),
            Stage(name="block moves", command=("-m", "benchmarks.gpu.block_moves", *small), limit_s=120),
            Stage(name="swap or recompute", command=("-m", "benchmarks.gpu.swap_or_recompute", *small), limit_s=180),
        ),
    )


def check(plan: StagePlan, report: Report, *, budget_s: float, jobs: int) -> bool:
    """Run the stages and fill the folder. True if all stages of correctness passed."""
    with tempfile.TemporaryDirectory(prefix="quire-check-") as work:
        runner = StageRunner(
            Path(work), budget_s, lambda result: report.add(result, runner.folder(result.name) / "log")
        )
        try:
            runner.run_all(plan.together, jobs)
            runner.run_all(plan.alone)
        finally:
            runner.close()
            _keep_plots(Path(work), report.folder)
            report.write(is_complete=len(report.results) == len(plan.together) + len(plan.alone))
    return report.is_correct


def main() -> None:
    """Reads the command line, looks whether the machine has what is needed, and checks."""
    options = parse_arguments()
    signal.signal(signal.SIGTERM, _end)
    environment = _environment()
    _refuse_unless_ready(environment, options.device)
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "gpu_check.log").unlink(missing_ok=True)
    scratch = _scratch_folder()
    try:
        plan = smoke_plan() if options.smoke else gpu_plan(scratch / "8b", options.fa3_library)
        plan = plan.only(options.only)
        if not plan.together and not plan.alone:
            _refuse(f"no stage is named {' or '.join(options.only)}")
        report = Report(options.out, environment, circumstances())
        jobs = options.jobs or max(1, min(6, environment["num_cpus"] // 2))
        is_correct = check(plan, report, budget_s=options.budget_s, jobs=jobs)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    _print_summary(report)
    raise SystemExit(0 if is_correct else 1)


def _tests(name: str, path: Path | str, *more: str) -> Stage:
    return Stage(name=name, command=(*_PYTEST, *more, str(path)), limit_s=_TESTS_S, is_correctness=True)


def _test_files(folder: str) -> list[Path]:
    """Test files, each for a process of its own: after an error on the device all later tests of a process fail."""
    return [path.relative_to(ROOT) for path in sorted((ROOT / folder).glob("test_*.py"))]


def _environment() -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.gpu.check_environment"]
    answer = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    environment: dict[str, Any] = json.loads(answer.stdout.splitlines()[-1])
    return environment


def _refuse_unless_ready(environment: dict[str, Any], device: str) -> None:
    """Exit with the names of all missing packages at once, so that they can be installed in one go."""
    if environment["missing"]:
        names = " ".join(sorted(environment["missing"]))
        reasons = "".join(f"\n  {name}: {why}" for name, why in sorted(environment["missing"].items()))
        _refuse(
            f"{environment['executable']} lacks {names}.{reasons}\nWithout a network: `pip download --no-deps` these "
            "elsewhere, for this Python, `pip install --no-index --no-deps --target FOLDER` them here, and put FOLDER "
            "on PYTHONPATH."
        )
    if device == "cuda" and environment["gpu"] is None:
        _refuse("torch sees no CUDA device on this machine, and this check needs one NVIDIA GPU")


def _refuse(why: str) -> NoReturn:
    print(f"gpu_check: {why}", file=sys.stderr)
    raise SystemExit(NOT_READY)


def _scratch_folder() -> Path:
    """Choose the large model's folder: in memory if there is room, else among temporary files."""
    memory = Path("/dev/shm")
    has_room = memory.is_dir() and shutil.disk_usage(memory).free > _MODEL_SCRATCH_BYTES
    return Path(tempfile.mkdtemp(prefix="quire-check-model-", dir=memory if has_room else None))


def _keep_plots(work: Path, folder: Path) -> None:
    plots = [path for path in sorted(work.rglob("*.svg")) if path.stat().st_size <= MAX_PLOT_BYTES]
    for path in plots[:MAX_PLOTS]:
        shutil.copyfile(path, folder / path.name)


def _print_summary(report: Report) -> None:
    rows = [(each.name, each.status, each.seconds, _brief(each.key_figures)) for each in report.results]
    print(table(("stage", "", "seconds", ""), rows))
    for each in report.results:
        if each.status != "passed":
            print(f"\n----- {each.name}: {each.status}\n{each.tail[-2000:]}")
    print(f"\n{'correct' if report.is_correct else 'NOT correct'}; see {report.folder / 'gpu_check.json'}")


def _brief(figures: dict[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in figures.items())


def _end(number: int, frame: FrameType | None) -> NoReturn:
    raise SystemExit(128 + number)


def parse_arguments() -> argparse.Namespace:
    """Defaults are those of `make gpu-check`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder of the report")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--smoke", action="store_true", help="small stages that run anywhere")
    parser.add_argument("--only", nargs="*", default=[], help='names of stages, e.g. "kernels/*" "decode step"')
    parser.add_argument("--budget-s", type=float, default=BUDGET_S, help="of all stages together")
    parser.add_argument("--fa3-library", type=Path, help="FlashAttention-3, as `benchmarks.gpu.kernels` says")
    parser.add_argument("--jobs", type=int, help="stages of correctness at once; default: half the CPUs, at most 6")
    options = parser.parse_args()
    if options.device == "cpu" and not options.smoke:
        parser.error("without a GPU there is only --smoke")
    return options


if __name__ == "__main__":
    main()
