"""Workers 1 → 4 → 1 and schedulers 1 → 3 → 1 while streams are read: `python -m tests.scaling [containers processes]`.

Every stream must equal its reference, none may stand still for longer than 3 s, and what is told to end must end in its
time with exit code 0. With `--record` the figures are written for the results page: for a machine that does nothing
else, since a stream stands still while its worker gets no processor.

    python -m tests.scaling --record
"""

import argparse
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any

import quire
from benchmarks.report import RESULTS, ROOT, write_result
from tests.compose.engine import SmokeError, find_engine, say
from tests.scaling.containers import Containers
from tests.scaling.deployment import Deployment
from tests.scaling.processes import Processes
from tests.scaling.scenario import run
from tests.scaling.streams import WrongStreamError

MOST_PAUSE_S = 3.0
KINDS = ("containers", "processes")


def _kind(name: str) -> str:
    """Return the kind of deployment of this name; argparse's choices refuse that none is named."""
    if name not in KINDS:
        raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(KINDS)}")
    return name


def main() -> None:
    """Exit code 0 if all went well, 1 with a message if not."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("deployments", nargs="*", type=_kind, default=KINDS, help="what to scale; absent: both")
    parser.add_argument("--model", type=Path, default=ROOT / "demo" / "model", help="folder of the model to serve")
    parser.add_argument("--record", action="store_true", help="write the figures for the results page")
    parser.add_argument("--output", type=Path, default=RESULTS / "scaling_under_load.json")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what was started is ended
    runs: list[dict[str, Any]] = []
    try:
        with tempfile.TemporaryDirectory(prefix="quire-scale-") as scratch:
            deployments = (_deployment(kind, options.model.resolve(), Path(scratch)) for kind in options.deployments)
            runs.extend(map(run, deployments))
    except (SmokeError, WrongStreamError, quire.QuireError, TimeoutError) as error:
        sys.exit(f"scaling: {type(error).__name__}: {error}")
    if options.record:
        write_result(options.output, "scaling_under_load", {"most_pause_s": MOST_PAUSE_S, "runs": runs})
    slow = {each["deployment"]: each["longest_pause_s"] for each in runs if each["longest_pause_s"] > MOST_PAUSE_S}
    if slow:
        sys.exit(f"scaling: a stream stood still for longer than {MOST_PAUSE_S:g} s: {slow}")
    say("scaling: all well")


def _deployment(kind: str, model: Path, scratch: Path) -> Deployment:
    return Processes(model) if kind == "processes" else Containers(find_engine(scratch), model)


if __name__ == "__main__":
    main()
