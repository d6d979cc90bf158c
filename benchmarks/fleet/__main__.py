"""Fleets of up to 1,000 workers in virtual time, from one command: figures to JSON, and `docs/scaling.md` made of that.

Time is virtual and everything random has a seed, so the figures do not depend on the machine; only those below `host`
are measured where it runs. Takes some minutes on two free cores.

    python -m benchmarks.fleet [--only rack,shards] [--quick] [--processes N] [--output FILE] [--docs FOLDER]
    python -m benchmarks.fleet --render    # the page and the plots again, from the file alone
"""

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.fleet.costs import FIXED_8_MS, GPU_8B, measured_gateway_token_s, measured_scheduler
from benchmarks.fleet.fleet_jobs import QUESTIONS, jobs_of
from benchmarks.fleet.page import write_page
from benchmarks.paper.jobs import run_jobs
from benchmarks.report import RESULTS, ROOT, circumstances, write_result

MADE_BY = ("command", "commit")  # kept for each question, since --only leaves those of other commits in the file


def main() -> None:
    """Reads the command line, runs what it asks for, writes what came of it."""
    options = parse_arguments()
    if not options.render:
        measure(options.only, options.output, is_quick=options.quick, num_processes=options.processes)
    result: dict[str, Any] = json.loads(options.output.read_text())
    if set(result["figures"]) == set(QUESTIONS):
        write_page(result, options.docs)


def measure(only: Sequence[str], output: Path, *, is_quick: bool, num_processes: int) -> None:
    """Answer the questions, and write the file once all rows are there. Rows of other questions stay."""
    before: dict[str, Any] = json.loads(output.read_text()) if output.exists() else {}
    jobs = [job for question in only for job in jobs_of(question, is_quick=is_quick)]
    rows = run_jobs(jobs, num_processes)
    figures = before.get("figures", {}) | {
        question: [row for job, row in zip(jobs, rows, strict=True) if job.figure == question] for question in only
    }
    how = {key: value for key, value in circumstances().items() if key in MADE_BY}
    made_by = before.get("made_by", {}) | dict.fromkeys(only, how)
    result = {
        "unit": "virtual seconds; below `host` CPU time on this machine",
        "quick": sorted({*before.get("quick", ())} - {*only} | ({*only} if is_quick else set())),
        "costs": {
            "workers": [asdict(FIXED_8_MS), asdict(GPU_8B)],
            "scheduler": asdict(measured_scheduler()),
            "gateway_token_s": measured_gateway_token_s(),
        },
        "made_by": {name: made_by[name] for name in QUESTIONS if name in figures},
        "figures": {name: figures[name] for name in QUESTIONS if name in figures},
    }
    write_result(output, "fleet", result)


def parse_arguments() -> argparse.Namespace:
    """Defaults are those of the kept result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--only", type=_questions, default=list(QUESTIONS), help=f"some of {','.join(QUESTIONS)}; the others stay"
    )
    parser.add_argument("--quick", action="store_true", help="a tenth of everything, to see that it runs")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--output", type=Path, default=RESULTS / "fleet.json")
    parser.add_argument("--docs", type=Path, default=ROOT / "docs", help="folder of scaling.md; the plots: scaling/")
    parser.add_argument("--render", action="store_true", help="simulate nothing")
    return parser.parse_args()


def _questions(text: str) -> list[str]:
    names = text.split(",")
    unknown = [name for name in names if name not in QUESTIONS]
    if unknown:
        raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: give some of {', '.join(QUESTIONS)}")
    return names


if __name__ == "__main__":
    main()
