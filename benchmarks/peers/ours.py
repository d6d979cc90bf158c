"""Systems that are ours, and the comparison of our defaults with our best flags."""

from collections.abc import Sequence

from benchmarks.peers.figures import Verdict, verdicts
from benchmarks.peers.runs_file import Run
from benchmarks.peers.systems import OFFLINE

OURS, OURS_WITH_FLAGS, OURS_OVER_HTTP = "quire", "quire-flags", "quire-http"
REFERENCE = "reference"
_FLAGS_TARGET = {"tokens_per_s": 0.97}  # of what it does with flags is what it does without


def is_peer(system: str) -> bool:
    """True if the system competes in the comparison; our run without flags is one of those."""
    return system not in (REFERENCE, OURS_WITH_FLAGS)


def default_verdicts(runs: Sequence[Run], load: str) -> list[Verdict]:
    """Compare our defaults with our flags, on a load that arrives at once. Empty if either is missing."""
    ours = [run for run in runs if run.system in (OURS, OURS_WITH_FLAGS)]
    return verdicts(ours, load, OURS, _FLAGS_TARGET if load in OFFLINE else {})
