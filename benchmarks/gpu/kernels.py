"""Speed of the kernels: as share of the device's ceilings, and beside other attention kernels, in one run.

Needs a CUDA device with Triton, takes under three minutes there (`--quick`: one) and writes kernels.json, kernels.md
and kernels.svg into `--out`. Every launch that is timed is checked against its torch reference. `--device cpu` runs
every path in small in Triton's interpreter, and measures nothing; it needs TRITON_INTERPRET=1.

    python -m benchmarks.gpu.kernels --out DIR [--quick] [--device cuda|cpu] [--sections NAME ...]
        [--fa3-library FILE] [--budget-s SECONDS]
"""

import argparse
import os
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import triton

from benchmarks.bar_chart import Bar, bar_chart
from benchmarks.gpu.kernel_bench import (
    cascade_section,
    ceilings,
    decode_section,
    layer_section,
    prefill_section,
    sampling_section,
)
from benchmarks.gpu.kernel_bench.figures import HEAD, Figure, Figures, cells, markdown, only_tried
from benchmarks.gpu.kernel_bench.lab import Lab, Size, cuda_lab, host_lab
from benchmarks.gpu.kernel_bench.peers import Peers, all_peers
from benchmarks.page_section import Document, Headline, PageSection, ResultRow, Section, Target, grid
from benchmarks.report import table, write_result

FULL_BUDGET_S, QUICK_BUDGET_S = 170.0, 55.0
Measurement = Callable[[Lab, Figures, Peers], None]
SECTIONS: dict[str, Measurement] = {
    "ceilings": lambda lab, figures, _: figures.add(*ceilings.measure(lab)),
    "decode": decode_section.measure,
    "prefill": prefill_section.measure,
    "cascade": lambda lab, figures, _: cascade_section.measure(lab, figures),
    "sampling": lambda lab, figures, _: sampling_section.measure(lab, figures),
    "layers": lambda lab, figures, _: layer_section.measure(lab, figures),
}


@dataclass(slots=True)
class Run:
    """Run with its results so far."""

    lab: Lab
    peers: Peers
    figures: Figures = field(default_factory=Figures)
    failures: dict[str, str] = field(default_factory=dict)  # by section, why it could not end
    begin: float = field(default_factory=time.monotonic)

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.begin

    @property
    def rows(self) -> list[Figure]:
        """Figures as they may be shown."""
        return [only_tried(row) for row in self.figures.rows] if self.lab.is_tiny else self.figures.rows

    @property
    def is_good(self) -> bool:
        """True if every section ended and all our results are correct."""
        return not self.failures and not any(row.is_wrong for row in self.figures.rows if row.by == "quire")

    def measure(self, name: str, budget_s: float) -> None:
        """Measure one section; after a failure its earlier figures and the other sections are kept."""
        if self.seconds > budget_s:
            self.failures[name] = "not begun: no time was left"
            return
        try:
            if self.lab.device.type == "cuda":
                torch.cuda.empty_cache()
            SECTIONS[name](self.lab, self.figures, self.peers)
        except Exception:
            self.failures[name] = traceback.format_exc()

    def write(self, folder: Path) -> None:
        result = {
            **device_facts(self.lab),
            "seconds": round(self.seconds, 1),
            "size": self.lab.size.value,
            "is_smoke_test": self.lab.is_tiny,
            "failures": self.failures,
            "key_figures": key_figures(self.rows),
            "rows": [row.as_json() for row in self.rows],
        }
        write_result(folder / "kernels.json", "kernels", result)
        (folder / "kernels.md").write_text(markdown(self.rows))
        (folder / "kernels.svg").write_text(plot(self.rows))


def device_facts(lab: Lab) -> dict[str, Any]:
    """Facts about the device that the figures are of."""
    facts: dict[str, Any] = {"device": "cpu, Triton's interpreter: times mean nothing", "triton": triton.__version__}
    if lab.device.type == "cuda":
        properties = torch.cuda.get_device_properties(lab.device)
        facts |= {
            "device": properties.name,
            "multiprocessors": properties.multi_processor_count,
            "memory_bytes": properties.total_memory,
            "cuda": torch.version.cuda,
        }
    return facts


def plot(rows: Sequence[Figure]) -> str:
    """Shares of the ceilings, ours and others'."""
    bars = [
        Bar(f"{row.section}: {row.case}", row.by, row.share, _bound_of_share(row))
        for row in rows
        if row.share is not None and row.section != "ceilings"
    ]
    return bar_chart("Share of what the device can do, measured in the same run", bars)


def _bound_of_share(row: Figure) -> float | None:
    return row.target.bound if row.target is not None and row.target.measure == "share" else None


def main() -> int:
    """Reads the command line and measures; 1 if a result was wrong or a section failed."""
    options = parse_arguments()
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if options.device == "cuda" and (interpreted or not torch.cuda.is_available()):
        print("This needs a CUDA device, and TRITON_INTERPRET unset; --device cpu tries the paths without one.")
        return 2
    if options.device == "cpu" and not interpreted:
        print("--device cpu runs in Triton's interpreter: set TRITON_INTERPRET=1.")
        return 2
    lab = host_lab() if options.device == "cpu" else cuda_lab(Size.QUICK if options.quick else Size.FULL)
    run = Run(lab, all_peers(options.fa3_library))
    budget_s = options.budget_s or (QUICK_BUDGET_S if options.quick else FULL_BUDGET_S)
    for name in SECTIONS if options.sections is None else dict.fromkeys(("ceilings", *options.sections)):
        run.measure(name, budget_s)
        run.write(options.out)  # each time, since whoever started this may end it
    print(table(HEAD, map(cells, run.rows)))
    for name, reason in run.failures.items():
        print(f"section {name}: {reason}")
    return int(not run.is_good)


def key_figures(rows: Sequence[Figure]) -> dict[str, float]:
    """Figures that have a target, by name."""
    reached = {
        f"{row.section}: {row.case}, {row.target.measure}": row.share if row.target.measure == "share" else row.value
        for row in rows
        if row.target is not None
    }
    return {name: round(figure, 3) for name, figure in reached.items() if figure is not None}


def parse_arguments() -> argparse.Namespace:
    """Defaults are those of the kept result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for the results")
    parser.add_argument("--quick", action="store_true", help="the cases that targets are for, in a minute")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument(
        "--sections", nargs="+", choices=SECTIONS, help="these alone, behind the ceilings; default: all"
    )
    parser.add_argument("--fa3-library", type=Path, help="vLLM's _vllm_fa3_C.abi3.so, to measure beside it")
    parser.add_argument("--budget-s", type=float, help="no section begins later")
    return parser.parse_args()


def section_of(document: Document) -> Section:
    """Section of the results page."""
    rows = [row for row in document["rows"] if row["value"] is not None]
    names = dict.fromkeys(row["section"] for row in rows if row["section"] not in ("ceilings", "comparisons"))
    return Section(
        variant=", ".join(names),
        done=(
            "Launches replayed from a graph, their inputs larger than the second-level cache, each checked against the "
            "torch reference. Ceilings are of the same run."
        ),
        headlines=[_headline(row, rows) for row in rows if row["target"]],
        blocks=[
            grid(
                ("", "by", "figure", "us", "of the ceiling"),
                [
                    (
                        _name(row),
                        row["by"],
                        _figure(row),
                        None if row["us"] is None else f"{row['us']:,.1f}",
                        None if (share := _share(row, rows)) is None else f"{share:.1%}",
                    )
                    for row in rows
                ],
            )
        ],
        versions=("torch", "triton", "transformers"),
    )


def _name(row: ResultRow) -> str:
    return f"{row['section']}, {row['case']}"


def _figure(row: ResultRow) -> str:
    value, unit = row["value"], row["unit"]
    return f"{value:,.2f} ×" if unit == "x" else f"{value:,.1f} {unit}" if value < 1000 else f"{value:,.0f} {unit}"


def _headline(row: ResultRow, rows: Sequence[ResultRow]) -> Headline:
    share = _share(row, rows)
    if not row["target"].endswith("%"):
        return Headline(f"{_name(row)}: {_figure(row)}", [Target(row["target"], row["is_met"])])
    is_met = None if share is None else share >= float(row["target"].strip("≥ %")) / 100
    of_it = "" if share is None else f", {share:.1%} of what can be read"
    return Headline(f"{_name(row)}: {_figure(row)}{of_it}", [Target(row["target"], is_met)])


def _share(row: ResultRow, rows: Sequence[ResultRow]) -> float | None:
    """Share of the ceiling, which results of decode attention before this page's first lack."""
    if row["share"] is not None or row["section"] != "decode" or row["unit"] != "GB/s":
        return row["share"]  # type: ignore[no-any-return]
    read = next((each["value"] for each in rows if each["case"] == ceilings.READ), None)
    return None if read is None else row["value"] / read


SECTION = PageSection(
    kinds=("kernels",),
    title="Kernels on a GPU",
    question="How near do the kernels come to what the device can do?",
    command="python -m benchmarks.gpu.kernels --out DIR",
    measures=("kernels",),
    target="decode ≥ 85 % of read bandwidth, prefill ≥ 350 TFLOP/s, cascade ≥ 3 × plain decode, paging < 5 %",
    render=section_of,
)


if __name__ == "__main__":
    sys.exit(main())
