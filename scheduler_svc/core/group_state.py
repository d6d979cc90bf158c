"""States of a group of sequences, and the transitions that are allowed between them.

`SequenceGroup.move_to` is the only writer of a state and refuses every other transition. The queue, the workers and the
scheduler list a group where its state says, and `Scheduler.check` compares the two. Knows nothing of sequences.

    from         to           when
    NEW          WAITING      added
                 PAUSED       added as paused
    WAITING      RUNNING      started on a worker
                 DEFERRED     no present worker can hold the group, or its deadline cannot be met
                 FETCHING     the worker that is to start it reads blocks of it from another worker
                 QUARANTINED  suspected: a step with the group failed, or a worker was lost
    FETCHING     WAITING      the blocks have come, or will not
                 QUARANTINED  suspected
    DEFERRED     WAITING      workers, pins or costs have changed, or a member has finished
                 QUARANTINED  suspected
    QUARANTINED  RUNNING      started for its trial
                 WAITING      cleared of suspicion
    RUNNING      PARKED       preempted, rolled back, or about to be paused
                 WAITING      its worker is lost; QUARANTINED if suspected
    PARKED       SWAPPED      no token is in flight, and its blocks are in the host pool
                 WAITING      no token is in flight, and it is to be recomputed; QUARANTINED if suspected
    SWAPPED      RUNNING      swapped in
                 WAITING      its worker drains or is lost, or the swap was rolled back; QUARANTINED if suspected
    PAUSED       WAITING      resumed
                 PARKED       resumed with tokens in flight or blocks in the host pool

    Every state but RUNNING and ENDED -> PAUSED: paused. Every state but ENDED -> ENDED: no member is live any more.
"""

from collections.abc import Mapping
from enum import Enum


class GroupState(Enum):
    """State of a group: decides where it is listed, and what may happen to it next."""

    NEW = "new"  # not yet added to the scheduler
    WAITING = "waiting"  # in the queue, in order
    DEFERRED = "deferred"  # in the queue, skipped until something changes
    FETCHING = "fetching"  # in the queue, waits for blocks that pass from one worker to another
    QUARANTINED = "quarantined"  # in the queue, waits for the trial of its cohort
    RUNNING = "running"  # on a worker, with seats and blocks
    PARKED = "parked"  # preempted; bound to its worker until the tokens in flight are known
    SWAPPED = "swapped"  # preempted; its blocks are in the host pool of its worker
    PAUSED = "paused"  # off the device until it is resumed
    ENDED = "ended"


_IN_QUEUE = frozenset({GroupState.WAITING, GroupState.QUARANTINED})
_PAUSED_OR_ENDED = frozenset({GroupState.PAUSED, GroupState.ENDED})

NEXT_STATES: Mapping[GroupState, frozenset[GroupState]] = {
    GroupState.NEW: _PAUSED_OR_ENDED | {GroupState.WAITING},
    GroupState.WAITING: _PAUSED_OR_ENDED
    | {GroupState.RUNNING, GroupState.DEFERRED, GroupState.FETCHING, GroupState.QUARANTINED},
    GroupState.FETCHING: _PAUSED_OR_ENDED | _IN_QUEUE,
    GroupState.DEFERRED: _PAUSED_OR_ENDED | _IN_QUEUE,
    GroupState.QUARANTINED: _PAUSED_OR_ENDED | {GroupState.RUNNING, GroupState.WAITING},
    GroupState.RUNNING: _IN_QUEUE | {GroupState.PARKED, GroupState.ENDED},
    GroupState.PARKED: _PAUSED_OR_ENDED | _IN_QUEUE | {GroupState.SWAPPED},
    GroupState.SWAPPED: _PAUSED_OR_ENDED | _IN_QUEUE | {GroupState.RUNNING},
    GroupState.PAUSED: frozenset({GroupState.WAITING, GroupState.PARKED, GroupState.ENDED}),
    GroupState.ENDED: frozenset(),
}
