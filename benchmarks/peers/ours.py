"""Which of the systems are ours, and how what we do by default compares with what we do with flags."""

from collections.abc import Sequence

from benchmarks.peers.figures import Verdict, verdicts
from benchmarks.peers.runs_file import Run
from benchmarks.peers.systems import OFFLINE

OURS, OURS_WITH_FLAGS = "quire", "quire-flags"
REFERENCE = "reference"
_FLAGS_TARGET = {"tokens_per_s": 0.97}  # of what it does with flags is what it does without


def is_peer(system: str) -> bool:
    """Whether the system stands beside the others in the comparison; ours is one of them."""
    return system not in (REFERENCE, OURS_WITH_FLAGS)


def default_verdicts(runs: Sequence[Run], load: str) -> list[Verdict]:
    """Ours without flags against ours with them, of a load that comes at once. Empty where either is missing."""
    ours = [run for run in runs if run.system in (OURS, OURS_WITH_FLAGS)]
    return verdicts(ours, load, OURS, _FLAGS_TARGET if load in OFFLINE else {})
