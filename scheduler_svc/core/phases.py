"""Phases of a group, and roles of workers: who computes prompts, and who goes on from there.

Knows groups alone, so that the queue may use it; see `handing_over` for how a group passes from one to the other.
"""

from enum import Enum
from typing import Literal

from scheduler_svc.core.sequence import SequenceGroup

WorkerRole = Literal["mixed", "prefill", "decode"]


class Phase(Enum):
    """Phase of a group: the tokens that it needs next."""

    PREFILL = "prefill"  # its first token
    DECODE = "decode"  # the tokens behind it; after a preemption also its prompt again


BOTH_PHASES = frozenset(Phase)


def phase_of(group: SequenceGroup) -> Phase:
    """Return the phase of a group that has no tokens in flight."""
    has_output = any(sequence.num_output_tokens for sequence in group.live)
    return Phase.DECODE if has_output else Phase.PREFILL
