"""The figures of the paper's evaluation from one command: rows to JSON, and the page and its plots made of that.

Time is virtual, so nothing disturbs the figures and two runs give the same. Takes some five minutes on two cores.

    python -m benchmarks.paper [--only fig12,fig13] [--quick] [--processes N] [--output FILE] [--docs FOLDER]
    python -m benchmarks.paper --render    # the page and the plots again, from the file alone
"""

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.lengths import trace_source
from benchmarks.paper.cost_model import PROMPT_TOKEN_S, SLOWER, fitted
from benchmarks.paper.figures import FIGURES, rows_of
from benchmarks.paper.jobs import FULL, QUICK
from benchmarks.paper.page import write_page
from benchmarks.paper.verdicts import verdicts
from benchmarks.paper.virtual_quire import MAX_BATCHED_TOKENS, MAX_NUM_SEQS, WATERMARK
from benchmarks.report import RESULTS, ROOT, circumstances, table, write_result


def main() -> None:
    """Reads the command line, runs what it asks for, writes what came of it."""
    options = parse_arguments()
    if not options.render:
        measure(options.only, options.output, is_quick=options.quick, num_processes=options.processes)
    result: dict[str, Any] = json.loads(options.output.read_text())
    rows = [(v.claim, v.paper, v.ours, v.difference, v.verdict) for v in verdicts(result["figures"])]
    print(table(("claim", "paper", "ours", "difference", ""), rows))
    write_page(result, options.docs)


def measure(only: list[str], output: Path, *, is_quick: bool, num_processes: int) -> None:
    """Run the jobs, and write the file once all rows are there. Rows of other figures stay."""
    scale = QUICK if is_quick else FULL
    before: dict[str, Any] = json.loads(output.read_text()) if output.exists() else {}
    if before.get("is_quick") != is_quick:
        before = {}
    rows = before.get("figures", {}) | rows_of(only, scale, num_processes)
    how = {key: value for key, value in circumstances().items() if key in ("command", "commit")}
    result = {
        "unit": "virtual seconds; rates in requests a second",
        "is_quick": is_quick,
        "lengths": trace_source(),
        "costs": asdict(fitted()),
        "scale": asdict(scale),
        "parameters": {
            "prompt_token_s": PROMPT_TOKEN_S,
            "other_cost_factor": SLOWER,
            "max_num_batched_tokens": MAX_BATCHED_TOKENS,
            "max_num_seqs": MAX_NUM_SEQS,
            "watermark": WATERMARK,
            "block_size": 16,
        },
        "made_by": before.get("made_by", {}) | dict.fromkeys(only, how),
        "figures": {name: rows[name] for name in FIGURES if name in rows},
    }
    write_result(output, "paper", result)


def parse_arguments() -> argparse.Namespace:
    """Defaults are those of the kept result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--only", type=_figures, default=list(FIGURES), help=f"some of {','.join(FIGURES)}; the others stay"
    )
    parser.add_argument("--quick", action="store_true", help="short traces, to see that it runs")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--output", type=Path, default=RESULTS / "paper.json")
    parser.add_argument(
        "--docs", type=Path, default=ROOT / "docs", help="folder of paper.md; the plots stand in paper/"
    )
    parser.add_argument("--render", action="store_true", help="measure nothing")
    return parser.parse_args()


def _figures(text: str) -> list[str]:
    names = text.split(",")
    unknown = [name for name in names if name not in FIGURES]
    if unknown:
        raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: give some of {', '.join(FIGURES)}")
    return names


if __name__ == "__main__":
    main()
