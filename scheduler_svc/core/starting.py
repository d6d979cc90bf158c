"""Start of a waiting group on a worker: what it finds in the cache, what its members share, what it allocates.

The first member computes what all have in common; the others hold the same blocks from the start, and wait for it.
Does not decide which group starts.
"""

from dataclasses import dataclass, replace

from scheduler_svc.core.group_state import GroupState
from scheduler_svc.core.sequence import Sequence, SequenceGroup, SequenceStatus
from scheduler_svc.core.sharing import have_same_tokens, shared_blocks
from scheduler_svc.core.worker_state import PlannedStep, WorkerState


@dataclass(frozen=True, slots=True)
class MemberStart:
    """Blocks that a member begins with: cached ones, or the first blocks of an earlier member."""

    sequence: Sequence
    prefix: list[int]
    source: Sequence | None = None
    num_shared_blocks: int = 0  # of the source's; full ones
    tail: int | None = None  # cached: continues the prefix, to be copied


@dataclass(frozen=True, slots=True)
class GroupStart:
    """Start of a group on one worker, as it would be now."""

    members: list[MemberStart]  # the live ones
    is_fork: bool  # all have the same tokens: the first computes them, all sample from its last row
    num_new_blocks: int
    num_unreferenced: int  # cached blocks that are taken out of the available ones

    @property
    def num_prefix_blocks(self) -> int:
        return len(self.members[0].prefix)


def plan_start(worker: WorkerState, group: SequenceGroup) -> GroupStart:
    """Return what the group would take. Changes nothing but the hashes and shares that the group keeps.

    A tail is copied, so for a moment it takes a block more: without room for that it is computed again.
    """
    start = _plan_start_without_tails(worker, group)
    if all(member.sequence.tail is None for member in start.members):
        return start
    members = [_with_tail(worker, member) for member in start.members]
    tails = {member.tail for member in members if member.tail is not None}
    if not tails:
        return start
    num_unreferenced = start.num_unreferenced + worker.blocks.num_unreferenced(tails)  # no tail is in a prefix
    with_tails = replace(start, members=members, num_unreferenced=num_unreferenced)
    return with_tails if has_room_for(worker, with_tails) else start


def _plan_start_without_tails(worker: WorkerState, group: SequenceGroup) -> GroupStart:
    live = group.live
    if have_same_tokens(live):
        prefix = worker.find_prefix(live[0])
        members = [MemberStart(live[0], prefix)]
        members += [MemberStart(sequence, [], live[0]) for sequence in live[1:]]
        num_new = worker.num_blocks_for(live[0].num_tokens) - len(prefix)
        return GroupStart(members, True, num_new, worker.blocks.num_unreferenced(prefix))
    if group.shares is None:
        group.shares = shared_blocks(live, worker.block_size)
    members = []
    num_new = 0
    prefixes: list[list[int]] = []  # beside members: what is cached of each
    found: set[int] = set()
    for sequence, (earlier, num_shared) in zip(live, group.shares, strict=True):
        known = prefixes[earlier][:num_shared] if prefixes else []
        hashes = sequence.block_hashes
        hashes += live[earlier].block_hashes[len(hashes) : num_shared]
        prefix = worker.find_prefix(sequence, known)
        prefixes.append(prefix)
        if len(prefix) >= num_shared:
            members.append(MemberStart(sequence, prefix))
            found.update(prefix[len(known) :])  # the earlier one starts with the others
        else:
            members.append(MemberStart(sequence, [], live[earlier], num_shared))
        num_new += worker.num_blocks_for(sequence.num_tokens) - max(num_shared, len(prefix))
    return GroupStart(members, False, num_new, worker.blocks.num_unreferenced(found))


def has_room_for(worker: WorkerState, start: GroupStart) -> bool:
    """True if the present tokens of all its members fit above the watermark."""
    num_needed = start.num_new_blocks + start.num_unreferenced
    return num_needed + worker.num_watermark_blocks <= worker.blocks.num_available_blocks


def start_group(worker: WorkerState, group: SequenceGroup, start: GroupStart, step: PlannedStep) -> None:
    """Give every member a seat, and every live one blocks for all its present tokens.

    `step`: the first that it may have rows in. Tails are copied before that computes.
    """
    for member in start.members:
        worker.blocks.share(member.prefix)  # before any allocation, which could evict it
        if member.tail is not None:
            worker.hold_copy_source(member.tail, step)
    for member in start.members:
        if member.source is None:
            _start_alone(worker, member, step)
        elif start.is_fork:
            share_all_blocks(worker, member.source, member.sequence)
            member.sequence.source = member.source
            member.sequence.num_shared_tokens = member.sequence.num_tokens
        else:
            _start_after(worker, member.sequence, member.source, member.num_shared_blocks)
    seat_members(worker, group)


def share_all_blocks(worker: WorkerState, parent: Sequence, child: Sequence) -> None:
    """Give the child the parent's full blocks; hold the partial one as its `fork_tail`, to be copied."""
    num_full, num_in_tail = divmod(len(parent.token_ids), worker.block_size)
    child.block_table = parent.block_table[:num_full]
    child.fork_tail = parent.block_table[num_full] if num_in_tail else None
    worker.blocks.share(child.block_table)
    if child.fork_tail is not None:
        worker.blocks.share([child.fork_tail])


def seat_members(worker: WorkerState, group: SequenceGroup) -> None:
    """Have the group run here: a seat for each member, a place in the running list for the live ones."""
    group.move_to(GroupState.RUNNING)
    group.worker_id = worker.worker_id
    group.num_times_left = 0
    group.fetch_id = 0
    group.destination = None
    group.is_leaving = False
    group.shares = None
    group.waits_since_s = None
    for sequence in group.unfinished:
        worker.num_members += 1
        sequence.seat = worker.free_seats.pop()
        sequence.worker_id = worker.worker_id
        sequence.last_step = 0
        if sequence.is_live:
            sequence.status = SequenceStatus.RUNNING
            sequence.num_tokens_at_start = sequence.num_tokens
            worker.add_running(sequence)


def count_prefix_hits(worker: WorkerState, start: GroupStart) -> None:
    """Count the cached and the recomputed tokens of a group that has just been started."""
    first = start.members[0].sequence
    if worker.enable_prefix_cache and first.use_prefix_cache and not _has_run(first):
        worker.num_prefix_query_tokens += first.num_tokens
        worker.num_prefix_hit_tokens += first.num_computed_tokens
        for member in start.members:
            member.sequence.num_cached_tokens = first.num_computed_tokens
    for member in start.members:
        sequence = member.sequence
        num_saved = sequence.num_computed_tokens if sequence.source is None else sequence.num_shared_tokens
        num_recomputed = max(0, sequence.num_lost_tokens - num_saved)
        worker.num_recomputed_tokens += num_recomputed
        sequence.group.num_recomputed_tokens += num_recomputed
        sequence.num_lost_tokens = 0


def _has_run(sequence: Sequence) -> bool:
    """True if it has computed anything before this start: here or elsewhere, also under an earlier scheduler."""
    return bool(sequence.num_preemptions or sequence.num_lost_tokens or sequence.num_output_tokens)


def _with_tail(worker: WorkerState, member: MemberStart) -> MemberStart:
    if member.source is not None:
        return member
    return replace(member, tail=worker.find_tail(member.sequence, len(member.prefix)))


def _start_alone(worker: WorkerState, member: MemberStart, step: PlannedStep) -> None:
    sequence, num_prefix_blocks = member.sequence, len(member.prefix)
    num_new = worker.num_blocks_for(sequence.num_tokens) - num_prefix_blocks
    sequence.block_table = member.prefix + worker.blocks.allocate(num_new)
    sequence.num_computed_tokens = num_prefix_blocks * worker.block_size
    sequence.num_registered_blocks = num_prefix_blocks
    if member.tail is not None:
        assert sequence.tail is not None
        step.plan.copies += (member.tail, sequence.block_table[num_prefix_blocks])
        step.reshaped.append(sequence.group)
        sequence.num_computed_tokens = min(sequence.tail.num_tokens, sequence.num_tokens - 1)


def _start_after(worker: WorkerState, sequence: Sequence, source: Sequence, num_shared: int) -> None:
    shared = source.block_table[:num_shared]
    worker.blocks.share(shared)
    num_new = worker.num_blocks_for(sequence.num_tokens) - num_shared
    sequence.block_table = shared + worker.blocks.allocate(num_new)
    sequence.source = source
    sequence.num_shared_tokens = num_shared * worker.block_size
    sequence.num_registered_blocks = num_shared
