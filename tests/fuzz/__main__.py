"""Hostile input against real processes: no death, no traceback, no UNKNOWN or INTERNAL, no effect on other clients.

    python -m tests.fuzz [--share 1.0] [--seed 1] [--only STAGES] [--record]

50,000 messages over every RPC, 200 damaged model folders and 60 given to `quire serve`, abuse of HTTP/2. Prints what
came of each stage, and ends with status 1 if there is a fault. `--record` keeps the result of all stages among those of
the benchmarks.
"""

import argparse
import asyncio
import sys
from pathlib import Path

from benchmarks.report import RESULTS, write_result
from tests.fuzz import folder_stage, http2_stage, rpc_stage

STAGES = (*rpc_stage.STAGES, *http2_stage.STAGES, *folder_stage.STAGES)


def main() -> None:
    """Plays the stages one after another."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--share", type=float, default=1.0, help="of all inputs")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", nargs="+", choices=[each.name for each in STAGES], metavar="STAGE")
    parser.add_argument("--record", action="store_true", help="write the result")
    parser.add_argument("--output", type=Path, default=RESULTS / "fuzz.json", help="where")
    options = parser.parse_args()
    if options.record and options.only is not None:
        parser.error("a record is one of all stages: leave out --only")
    outcomes = []
    for stage in STAGES:
        if options.only is None or stage.name in options.only:
            outcome = asyncio.run(stage.play(max(1, round(options.share * stage.num_inputs)), options.seed))
            print(outcome, flush=True)  # noqa: T201
            outcomes.append(outcome)
    if options.record:
        stages = [outcome.record() for outcome in outcomes]
        write_result(options.output, "fuzz", {"seed": options.seed, "share": options.share, "stages": stages})
    sys.exit(1 if any(outcome.faults for outcome in outcomes) else 0)


if __name__ == "__main__":
    main()
