"""Paused groups: off the device, without a seat, and out of the queue until they are resumed.

A paused group is bound to a worker only while tokens of it are in flight there, or its blocks are in the host pool.
Preempted groups may take those host blocks. Functions over one worker; they know nothing of the queue.
"""

from scheduler_svc.core.sequence import SequenceGroup
from scheduler_svc.core.swapping import can_swap, copy_to_host, drop_host_copy, num_filled_blocks
from scheduler_svc.core.worker_state import WorkerState


def stop_for_pause(worker: WorkerState, group: SequenceGroup, *, keep_on_host: bool) -> None:
    """Stop a running group. With `keep_on_host`, copy its blocks to the host pool if there is room."""
    num_filled = num_filled_blocks(worker, group)
    has_room = worker.host is not None and 0 < num_filled <= worker.host.num_available_blocks
    is_kept = keep_on_host and has_room and can_swap(worker, group)
    if is_kept:
        copy_to_host(worker, group, worker.next_step_id)
    worker.set_aside(group, keeps_computed=is_kept)


def bind_paused(worker: WorkerState, group: SequenceGroup, *, keep_on_host: bool) -> None:
    """List a paused group with its worker while anything of it is there. Drop its host blocks unless `keep_on_host`."""
    worker.paused[group] = None
    if not keep_on_host and group.swap_step is not None:
        drop_host_copy(worker, group)
    unbind_paused(worker, group)


def unbind_paused(worker: WorkerState, group: SequenceGroup) -> None:
    """Unbind a paused group from its worker when it has no pending tokens and no host blocks."""
    if group.swap_step is None and not group.num_pending_tokens:
        worker.paused.pop(group, None)
        group.worker_id = None
        for sequence in group.live:
            sequence.worker_id = None


def num_reclaimable_host_blocks(worker: WorkerState) -> int:
    """Count the host blocks that a preempted group may have: free ones, and those of paused groups."""
    if worker.host is None:
        return 0
    held = {block for group in worker.paused for sequence in group.live for block in sequence.host_blocks}
    return worker.host.num_available_blocks + len(held)


def reclaim_host_blocks(worker: WorkerState, num_blocks: int) -> None:
    """Have that many host blocks available: drop the host copies of paused groups, the last in order first."""
    assert worker.host is not None
    while worker.host.num_available_blocks < num_blocks:
        kept = [group for group in worker.paused if group.swap_step is not None]
        group = max(kept, key=lambda one: one.order)
        drop_host_copy(worker, group)
        unbind_paused(worker, group)
