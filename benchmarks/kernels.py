"""How fast the kernels are: as share of what the device can do, and beside other attention kernels, in one run.

Needs a CUDA device with Triton, takes under three minutes there (`--quick`: one) and writes kernels.json, kernels.md
and kernels.svg into `--out`. Every launch that is timed is checked against its torch reference. `--device cpu` runs
every path in small in Triton's interpreter, and measures nothing; it needs TRITON_INTERPRET=1.

    python -m benchmarks.kernels --out DIR [--quick] [--device cuda|cpu] [--fa3-library FILE] [--budget-s SECONDS]
"""

import argparse
import os
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import triton

from benchmarks.bar_chart import Bar, bar_chart
from benchmarks.kernel_bench import (
    cascade_section,
    ceilings,
    decode_section,
    layer_section,
    prefill_section,
    sampling_section,
)
from benchmarks.kernel_bench.figures import HEAD, Figure, Figures, cells, markdown, only_tried
from benchmarks.kernel_bench.lab import Lab, Size, cuda_lab, host_lab
from benchmarks.kernel_bench.peers import Peers, all_peers
from benchmarks.report import table, write_result

FULL_BUDGET_S, QUICK_BUDGET_S = 170.0, 55.0
Section = Callable[[Lab, Figures, Peers], None]
SECTIONS: dict[str, Section] = {
    "ceilings": lambda lab, figures, _: figures.add(*ceilings.measure(lab)),
    "decode": decode_section.measure,
    "prefill": prefill_section.measure,
    "cascade": lambda lab, figures, _: cascade_section.measure(lab, figures),
    "sampling": lambda lab, figures, _: sampling_section.measure(lab, figures),
    "layers": lambda lab, figures, _: layer_section.measure(lab, figures),
}


def run(lab: Lab, peers: Peers, budget_s: float) -> tuple[Figures, dict[str, str]]:
    """All figures, and for each section that could not end why."""
    figures, failures = Figures(), {}
    start = time.monotonic()
    for name, measure in SECTIONS.items():
        if time.monotonic() - start > budget_s:
            failures[name] = "not begun: no time was left"
            continue
        try:
            if lab.device.type == "cuda":
                torch.cuda.empty_cache()
            measure(lab, figures, peers)
        except Exception:  # the figures of other sections are worth keeping
            failures[name] = traceback.format_exc()
    return figures, failures


def device_facts(lab: Lab) -> dict[str, Any]:
    """What the figures are of."""
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
    start = time.monotonic()
    figures, failures = run(lab, all_peers(options.fa3_library), options.budget_s or default_budget_s(lab))
    rows = [only_tried(row) for row in figures.rows] if lab.is_tiny else figures.rows
    print(table(HEAD, map(cells, rows)))
    for name, reason in failures.items():
        print(f"section {name}: {reason}")
    result = {
        **device_facts(lab),
        "seconds": round(time.monotonic() - start, 1),
        "size": lab.size.value,
        "failures": failures,
        "key_figures": key_figures(rows),
        "rows": [row.as_json() for row in rows],
    }
    write_result(options.out / "kernels.json", "kernels", result)
    (options.out / "kernels.md").write_text(markdown(rows))
    (options.out / "kernels.svg").write_text(plot(rows))
    return int(bool(failures) or any(row.is_wrong for row in figures.rows if row.by == "quire"))


def key_figures(rows: Sequence[Figure]) -> dict[str, float]:
    """Of what has a target, that which the target is for."""
    reached = {
        f"{row.section}: {row.case}, {row.target.measure}": row.share if row.target.measure == "share" else row.value
        for row in rows
        if row.target is not None
    }
    return {name: round(figure, 3) for name, figure in reached.items() if figure is not None}


def default_budget_s(lab: Lab) -> float:
    return QUICK_BUDGET_S if lab.size is Size.QUICK else FULL_BUDGET_S


def parse_arguments() -> argparse.Namespace:
    """Defaults are those of the kept result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for the results")
    parser.add_argument("--quick", action="store_true", help="the cases that targets are for, in a minute")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--fa3-library", type=Path, help="vLLM's _vllm_fa3_C.abi3.so, to measure beside it")
    parser.add_argument("--budget-s", type=float, help="no section begins later")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
