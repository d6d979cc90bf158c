"""Hostile input against real processes: no death, no traceback, no UNKNOWN or INTERNAL, no effect on other clients.

    python -m tests.fuzz [--share 1.0] [--seed 1] [--only STAGES]

50,000 messages over every RPC, 200 damaged model folders and 60 given to `quire serve`, abuse of HTTP/2. Prints what
came of each stage, and ends with status 1 if there is a fault.
"""

import argparse
import asyncio
import sys

from tests.fuzz import folder_stage, http2_stage, rpc_stage

STAGES = (*rpc_stage.STAGES, *http2_stage.STAGES, *folder_stage.STAGES)


def main() -> None:
    """Plays the stages one after another."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--share", type=float, default=1.0, help="of all inputs")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", nargs="+", choices=[each.name for each in STAGES], metavar="STAGE")
    options = parser.parse_args()
    num_faults = 0
    for stage in STAGES:
        if options.only is None or stage.name in options.only:
            outcome = asyncio.run(stage.play(max(1, round(options.share * stage.num_inputs)), options.seed))
            print(outcome, flush=True)  # noqa: T201
            num_faults += len(outcome.faults)
    sys.exit(1 if num_faults else 0)


if __name__ == "__main__":
    main()
