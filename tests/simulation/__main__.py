"""`python -m tests.simulation --seeds A:B`: runs the seeds, prints those that fail, and how to see one fail again.

`--seed N --trace` prints every event of one. `--record` keeps the result among those of the benchmarks.
"""

import argparse
import sys
import time
from pathlib import Path

from benchmarks.report import RESULTS, write_result
from tests.simulation.campaign import Tally, num_cores, outcomes, told
from tests.simulation.run import run_seed

SAY_EVERY_S = 30.0


def main() -> int:
    options = _options()
    if options.seed is not None:
        outcome = run_seed(options.seed, is_traced=options.trace)
        _say(f"{outcome}\n{told(outcome) if outcome.violations else 'holds'}")
        return 1 if outcome.violations else 0
    first, _, behind = options.seeds.partition(":")
    tally, began_s = Tally(), time.monotonic()
    said_s = began_s
    for outcome in outcomes(range(int(first), int(behind)), options.jobs):
        tally.add(outcome)
        if outcome.violations:
            _say(told(outcome))
        if time.monotonic() > said_s + SAY_EVERY_S:
            said_s = time.monotonic()
            _say(f"{tally.num_seeds} seeds, {len(tally.failed)} failed")
    figures = {"first_seed": int(first), **tally.figures(), "seconds": round(time.monotonic() - began_s, 1)}
    _say("\n".join(f"{name}: {value}" for name, value in figures.items()))
    if options.record:
        write_result(options.output, "simulation", figures)
    return 1 if tally.failed else 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("--seeds", default="0:500", help="A:B, from A on and before B")
    parser.add_argument("--seed", type=int, help="this one alone")
    parser.add_argument("--trace", action="store_true", help="print every event of it, and the scheduler's log")
    parser.add_argument("--jobs", type=int, default=num_cores(), help="processes")
    parser.add_argument("--record", action="store_true", help="write the result")
    parser.add_argument("--output", type=Path, default=RESULTS / "simulation.json", help="where")
    return parser.parse_args()


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    raise SystemExit(main())
