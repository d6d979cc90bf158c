"""The report of `gpu_check`: all results in one JSON file, a log, and one page; continued by a later call.

Rewritten after each stage, so that it is whole whenever the check is ended. Runs nothing.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.gpu.check_stages import StageResult
from benchmarks.page_section import commit_of, first_line, grid

REPORT_FILE, PAGE_FILE, LOG_FILE = "gpu_check.json", "gpu_check.md", "gpu_check.log"
MAX_LOG_BYTES = 256 << 10  # of each stage, its end
_TAIL_LINES = 12  # of a stage that did not pass, on the page


class ResumeError(Exception):
    """Refusal to continue a report; the message says why."""


@dataclass(slots=True)
class Report:
    """Report of the results so far, kept in the folder. `planned`: names of all stages, in order."""

    folder: Path
    planned: Sequence[str]
    environment: dict[str, Any]
    circumstances: dict[str, Any]
    left_out: Mapping[str, str] = field(default_factory=dict)  # stages that this machine cannot run, and why
    is_dry_run: bool = False
    results: list[StageResult] = field(default_factory=list)
    began: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))

    def resume(self) -> None:
        """Take over the results that are in the folder. Raises ResumeError if they are of something else."""
        path = self.folder / REPORT_FILE
        if not path.is_file():
            raise ResumeError(f"there is no {path} to resume: leave --resume out")
        former = json.loads(path.read_text())
        for name, value in self._identity().items():
            if former.get(name) != value:
                raise ResumeError(
                    f"{path} is of {name} {former.get(name)!r}, and this is {value!r}: take another --out, or leave "
                    "--resume out to write the report anew"
                )
        self.began = former["began"]
        self.results = [StageResult(**each) for each in former["stages"] if each["name"] in self.planned]

    @property
    def passed(self) -> list[str]:
        """Names of the stages that passed, in this call or before."""
        return [each.name for each in self.results if each.status == "passed"]

    @property
    def is_correct(self) -> bool:
        return all(each.is_good for each in self.results)

    @property
    def not_ended(self) -> list[str]:
        """Names of the planned stages that have not run to their end: skipped, timed out, or not asked for."""
        ended = {each.name for each in self.results if each.has_ended}
        return [name for name in self.planned if name not in ended]

    @property
    def is_complete(self) -> bool:
        """True if every planned stage has run to its end, in this call or before."""
        return not self.not_ended

    def add(self, result: StageResult, log: Path) -> None:
        """Add a result, instead of an earlier one of the same stage, and rewrite the report."""
        self.results = [each for each in self.results if each.name != result.name]
        self.results.append(result)
        print(f"{result.status:9}  {result.seconds:6.1f} s  {result.name}  {brief(result.key_figures)}", flush=True)
        with (self.folder / LOG_FILE).open("ab") as file:
            file.write(f"===== {result.name}: {result.status} after {result.seconds} s\n".encode())
            file.write(log.read_bytes()[-MAX_LOG_BYTES:] if log.is_file() else f"{result.tail}\n".encode())
        self.write()

    def write(self) -> None:
        """Write the JSON file and the page."""
        content = {
            "check": "gpu_check",
            "began": self.began,
            "is_complete": self.is_complete,
            "is_correct": self.is_correct,
            "not_ended": self.not_ended,
            "left_out": dict(self.left_out),
            **self.circumstances,
            **self._identity(),
            "environment": self.environment,
            "key_figures": {each.name: each.key_figures for each in self._in_order() if each.key_figures},
            "stages": [asdict(each) for each in self._in_order()],
        }
        self._replace(REPORT_FILE, json.dumps(content, indent=1) + "\n")
        self._replace(PAGE_FILE, self.page())

    def page(self) -> str:
        """One page: the verdict, what was measured beside its floor, the stages, and why some did not pass."""
        return "\n\n".join([*self._head(), *self._figures(), self._stage_table(), *self._faults()]) + "\n"

    def _identity(self) -> dict[str, Any]:
        """Facts in which all calls for one report agree."""
        gpu = self.environment.get("gpu") or {}
        return {
            "is_dry_run": self.is_dry_run,
            "commit": self.circumstances.get("commit"),
            "gpu": gpu.get("name"),
        }

    def _head(self) -> Iterator[str]:
        yield "# GPU check" + (" (dry run: the figures mean nothing)" if self.is_dry_run else "")
        gpu, versions = self.environment.get("gpu") or {}, self.environment.get("versions", {})
        names = ", ".join(
            f"{name} {versions[name]}" for name in ("torch", "triton", "transformers") if name in versions
        )
        device = f"{gpu['name']}, {gpu['memory_bytes'] / 2**30:.0f} GiB, CUDA {gpu['cuda']}" if gpu else "no GPU"
        yield f"{device}; {names}; commit {commit_of(self.circumstances.get('commit'))}; begun {self.began}."
        correct = "All that was tested is correct." if self.is_correct else "**NOT correct.**"
        left = ", ".join(self.not_ended)
        yield f"{correct} {'Complete.' if self.is_complete else f'Not complete; `--resume` continues with: {left}.'}"
        for name, why in self.left_out.items():
            yield f"Not run on this machine: {name}, which {why}."

    def _figures(self) -> Iterator[str]:
        """Measured figures beside the roofline."""
        rows = [row for each in self._in_order() for row in figure_rows(each)]
        if rows:
            yield "## Beside the roofline\n\n" + grid(("", "measured", "floor or ceiling", "ratio or share"), rows)

    def _stage_table(self) -> str:
        rows = [(each.name, each.status, each.seconds, brief(each.key_figures)) for each in self._in_order()]
        return "## Stages\n\n" + grid(("stage", "", "seconds", ""), rows)

    def _faults(self) -> Iterator[str]:
        for each in self._in_order():
            if each.status in ("failed", "timed out"):
                lines = each.tail.rstrip().splitlines()[-_TAIL_LINES:]
                text = "\n".join(first_line(line) for line in lines)
                yield f"## {each.name}: {each.status}\n\n```\n{text}\n```"

    def _in_order(self) -> list[StageResult]:
        return sorted(self.results, key=lambda each: self.planned.index(each.name))

    def _replace(self, name: str, text: str) -> None:
        part = self.folder / f"{name}.part"
        part.write_text(text)
        part.replace(self.folder / name)


def figure_rows(result: StageResult) -> Iterator[tuple[str, str, str, str]]:
    """Rows of the page for a stage's files: rates of the device, a step against its floor, kernels against ceilings."""
    for content in result.results.values():
        if not isinstance(content, dict):
            continue
        figures = content.get("key_figures", {})
        if "product_tflop_per_s" in figures:
            yield "reading", f"{figures['read_gb_per_s']} GB/s", "", ""
            yield "products of matrices", f"{figures['product_tflop_per_s']} TFLOP/s", "", ""
        if "floor_ms" in content:
            name = f"decode step, batch {content['batch']}, {content['read_gb']} GB, {content['tflop']} TFLOP"
            yield name, f"{content['step_ms']} ms", f"{content['floor_ms']} ms", f"{content['ratio']} ×"
        for row in content.get("rows", ()):
            if row.get("by") == "quire" and row.get("share") is not None:
                ceiling = row["value"] / row["share"]
                name, unit = f"{row['section']}: {row['case']}", row["unit"]
                yield name, f"{row['value']:.4g} {unit}", f"{ceiling:.4g} {unit}", f"{row['share']:.0%}"


def brief(figures: dict[str, Any]) -> str:
    """Figures in one line."""
    return ", ".join(f"{name} {value}" for name, value in figures.items())
