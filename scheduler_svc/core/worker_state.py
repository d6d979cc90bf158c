"""State of one worker as the scheduler keeps it: blocks, seats, running sequences, steps in flight.

Blocks and seats change hands here. The scheduler decides who gets them, and when.
"""

from bisect import bisect_left, insort
from collections import Counter, deque
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from itertools import chain, islice
from typing import NamedTuple

from scheduler_svc.core.block_hash import extend_block_hashes
from scheduler_svc.core.block_manager import BlockManager
from scheduler_svc.core.group_state import GroupState
from scheduler_svc.core.phases import WorkerRole
from scheduler_svc.core.preemption import PreemptionCosts, PreemptionMode
from scheduler_svc.core.sequence import Cohort, Sequence, SequenceGroup, SequenceStatus
from scheduler_svc.core.step_plan import StepPlan
from scheduler_svc.core.tails import cache_tail, find_tail


class Release(NamedTuple):
    """Seat and blocks that a sequence has given up, with one reference to each block."""

    seat: int
    is_described: bool  # the worker knows the seat, and must be told that it is free
    blocks: list[int]


class PlacedBlock(NamedTuple):
    """Content of a block that was fetched from another worker."""

    fetch_id: int
    fetch_index: int  # in the fetch
    block_hash: bytes


@dataclass(slots=True)
class PlannedStep:
    """A plan, and what depends on its execution. Holds the blocks in its releases and copies."""

    plan: StepPlan
    registered: list[int] = field(default_factory=list)  # blocks made findable; right only if it is executed
    placed: dict[int, PlacedBlock] = field(default_factory=dict)  # by block; findable before, and right only then
    releases: list[Release] = field(default_factory=list)  # freed once it is done: it uses them last
    copy_sources: list[int] = field(default_factory=list)  # each once; a block copied from stays until it is done
    reshaped: list[SequenceGroup] = field(default_factory=list)  # their blocks are right only if it is executed
    num_starved: int = 0  # rows left out because their block is still to be released
    preempted: list[SequenceGroup] = field(default_factory=list)  # to make room for its rows


class WorkerState:
    """One worker. Every member of a running group holds one seat and one reference to each block of its table."""

    def __init__(
        self,
        worker_id: str,
        *,
        num_blocks: int,
        block_size: int,
        num_seats: int,
        num_watermark_blocks: int,
        max_num_batched_tokens: int,
        enable_prefix_cache: bool,
        num_host_blocks: int,
        preemption: PreemptionMode,
        max_model_len: int | None = None,
        block_format: str = "",
        max_fetched_blocks: int = 0,
        max_placed_blocks: int | None = None,
        role: WorkerRole = "mixed",
    ) -> None:
        self.worker_id = worker_id
        self.block_size = block_size
        self.num_seats = num_seats
        self.num_watermark_blocks = num_watermark_blocks  # left available by admissions
        self.max_num_batched_tokens = max_num_batched_tokens  # in a step
        self.max_model_len = max_model_len  # prompt and output of each sequence
        self.enable_prefix_cache = enable_prefix_cache
        self.preemption: PreemptionMode = preemption
        self.block_format = block_format  # blocks pass between workers with the same; empty: none do
        self.max_fetched_blocks = max_fetched_blocks  # that it keeps before they are placed
        self.max_placed_blocks = max_placed_blocks  # by a step with rows of others; None: any number
        self.costs: PreemptionCosts | None = None  # unknown at first
        self.blocks = BlockManager(num_blocks)
        self.host = BlockManager(num_host_blocks) if num_host_blocks else None
        self.pins: dict[str, list[int]] = {}  # by name; one reference to each block
        self.num_pinned_blocks = 0  # a block counts once
        self.read_by_fetches: dict[int, list[int]] = {}  # by fetch; one reference to each block
        self.placed_by_fetches: dict[int, list[int]] = {}  # by fetch, until all of it is placed; one reference to each
        self.role: WorkerRole = role
        self.running: list[Sequence] = []  # by sort_key; idle beams are not in it
        self.catching_up: dict[Sequence, None] = {}  # those of running that are not `is_decoding`
        self.num_members = 0  # of running groups, idle beams included: they hold seats
        self.parked: dict[SequenceGroup, None] = {}  # PARKED here
        self.swapped: list[SequenceGroup] = []  # SWAPPED here, by order
        self.paused: dict[SequenceGroup, None] = {}  # with tokens in flight or host blocks here
        self.unsent_swap_out: list[int] = []  # flat (device block, host block), for the next plan
        self.unsent_placed: dict[int, PlacedBlock] = {}  # by block, for the next plan
        self.num_coming_fetched = 0  # blocks of fetches under way to this worker
        self.in_flight: deque[PlannedStep] = deque()  # consecutive step ids
        self.copy_holds: Counter[int] = Counter()  # block -> steps, not yet done, that copy from it
        self.uncached: list[Sequence] = []  # have filled a block that is not in the prefix cache yet
        self.free_seats = list(range(num_seats - 1, -1, -1))
        self.freed_seats: list[int] = []  # the worker is yet to be told
        self.next_step_id = 1
        self.forced_step_id = 0  # the latest before which a preemption was forced
        self.needs_snapshot = True
        self.is_draining = False  # gets nothing new
        self.trial: Cohort | None = None  # whose turn it is; None: the groups without a cohort
        self.num_trial_steps = 0  # of the present trial, or the last
        self.num_steps_between = 0  # of the other groups since then
        self.num_prefix_query_tokens = 0
        self.num_prefix_hit_tokens = 0
        self.num_preemptions = 0
        self.num_recomputed_tokens = 0
        self.num_copied_blocks = 0
        self.num_swaps = 0
        self.num_swapped_out_blocks = 0
        self.num_swapped_in_blocks = 0
        self.num_fetches = 0
        self.num_fetched_blocks = 0

    def empty_copy(self) -> "WorkerState":
        """Return the state of a worker of the same size that has just come."""
        return WorkerState(
            self.worker_id,
            num_blocks=self.blocks.num_blocks,
            block_size=self.block_size,
            num_seats=self.num_seats,
            num_watermark_blocks=self.num_watermark_blocks,
            max_num_batched_tokens=self.max_num_batched_tokens,
            enable_prefix_cache=self.enable_prefix_cache,
            num_host_blocks=self.host.num_blocks if self.host is not None else 0,
            preemption=self.preemption,
            max_model_len=self.max_model_len,
            block_format=self.block_format,
            max_fetched_blocks=self.max_fetched_blocks,
            max_placed_blocks=self.max_placed_blocks,
            role=self.role,
        )

    @property
    def capacity_blocks(self) -> int:
        """Most blocks that a group may come to hold here: a larger one is never started."""
        return self.blocks.num_blocks - self.num_pinned_blocks - self.num_watermark_blocks

    @property
    def has_preempted(self) -> bool:
        """True if a group that is to go on here waits for its tokens in flight: none starts before it."""
        return any(not group.is_leaving for group in self.parked)

    def num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def num_spare_tokens(self) -> int:
        """Return what the running sequences would leave of the token budget of the next step."""
        num_wanted = sum(s.num_tokens - s.num_computed_tokens for s in self.running if not s.has_all_tokens)
        return max(0, self.max_num_batched_tokens - num_wanted)

    def has_spare_tokens(self) -> bool:
        """True if `num_spare_tokens` are more than 0; looks at every sequence only where that may not be so."""
        num_wanted = sum(s.num_tokens - s.num_computed_tokens for s in self.catching_up if not s.has_all_tokens)
        num_decoding = len(self.running) - len(self.catching_up)  # none of which wants more than one
        return num_wanted + num_decoding < self.max_num_batched_tokens or self.num_spare_tokens() > 0

    def find_prefix(self, sequence: Sequence, known: Seq[int] = ()) -> list[int]:
        """Return the cached blocks of a sequence's head, the first of which are `known` and not looked up.

        At least its last token is left to compute.
        """
        if not (self.enable_prefix_cache and sequence.use_prefix_cache):
            return []
        num_blocks = (sequence.num_tokens - 1) // self.block_size
        hashes = sequence.block_hashes
        extend_block_hashes(hashes, sequence.hash_seed, sequence.token_ids, self.block_size, num_blocks)
        return [*known, *self.blocks.lookup(islice(hashes, len(known), num_blocks))]

    def find_tail(self, sequence: Sequence, num_prefix_blocks: int) -> int | None:
        """Return the cached tail that continues so many blocks of `find_prefix`; None if there is none.

        Without a prefix cache, or for a sequence that is not looked up, no tail has a name: see `stop_sequence`.
        """
        return find_tail(self.blocks, sequence, num_prefix_blocks, self.block_size)

    def stop_sequence(self, sequence: Sequence, *, keeps_tail: bool = False) -> None:
        """Take seat and blocks from a member of a running group: now, or when its last step in flight is done.

        `keeps_tail`: put its partial block into the prefix cache, too, since it is to go on.
        """
        step = self._step_in_flight(sequence.last_step)
        if sequence.status is SequenceStatus.RUNNING:
            self.remove_running(sequence)
            self.cache_full_blocks(sequence, step)
            if keeps_tail:
                self._cache_tail(sequence, step)
        assert sequence.seat is not None
        release = Release(sequence.seat, sequence.first_step_id > 0, blocks_held(sequence))
        self.num_members -= 1
        sequence.leave_worker()
        if step is None:
            self.free_release(release)
        else:
            step.releases.append(release)

    def add_running(self, sequence: Sequence) -> None:
        """Put a sequence among the running ones: most often behind all others, since it came last."""
        if self.running and sequence.sort_key < self.running[-1].sort_key:
            insort(self.running, sequence, key=running_order)
        else:
            self.running.append(sequence)
        self.catching_up[sequence] = None

    def remove_running(self, sequence: Sequence) -> None:
        index = bisect_left(self.running, sequence.sort_key, key=running_order)
        assert self.running[index] is sequence
        del self.running[index]
        self.catching_up.pop(sequence, None)

    def stop_group(self, group: SequenceGroup, *, keeps_computed: bool = False) -> None:
        """Stop a running group: PARKED, and listed in `parked` while it has tokens in flight.

        It is to be computed again, unless it `keeps_computed`: then its blocks are swapped out.
        """
        group.move_to(GroupState.PARKED)
        for sequence in group.unfinished:
            self.stop_sequence(sequence, keeps_tail=not keeps_computed)
            if not keeps_computed:
                sequence.lose_computed_tokens()
            if sequence.is_live:
                sequence.status = SequenceStatus.PREEMPTED
        if group.num_pending_tokens:
            self.parked[group] = None

    def set_aside(self, group: SequenceGroup, *, keeps_computed: bool = False) -> None:
        """Stop a group that is to go on later or elsewhere, which by itself counts as no preemption of the group."""
        self.stop_group(group, keeps_computed=keeps_computed)
        for sequence in group.live:
            sequence.num_preemptions += 1

    def preempt(self, group: SequenceGroup, *, keeps_computed: bool = False) -> None:
        """Stop a group to make room. It has no row in a step that is being planned."""
        self.set_aside(group, keeps_computed=keeps_computed)
        group.num_preemptions += 1
        self.num_preemptions += 1

    def cache_full_blocks(self, sequence: Sequence, step: PlannedStep | None) -> None:
        """Put its blocks into the prefix cache that are full, known, and computed once `step` is done (None: already).

        Before its first row here it puts none: what it holds then comes from a step that may still be in flight.
        """
        if not self.enable_prefix_cache or not sequence.last_step:
            return
        num_full = min(sequence.num_computed_tokens, len(sequence.token_ids)) // self.block_size
        if num_full <= sequence.num_registered_blocks:
            return
        hashes = sequence.block_hashes
        extend_block_hashes(hashes, sequence.hash_seed, sequence.token_ids, self.block_size, num_full)
        for index in range(sequence.num_registered_blocks, num_full):
            block = sequence.block_table[index]
            if self.blocks.register(block, hashes[index]) and step is not None:
                step.registered.append(block)
        sequence.num_registered_blocks = num_full

    def _cache_tail(self, sequence: Sequence, step: PlannedStep | None) -> None:
        """Put its partial block into the prefix cache. As `cache_full_blocks`, nothing before its first row here."""
        if not (self.enable_prefix_cache and sequence.use_prefix_cache):
            return
        block = cache_tail(self.blocks, sequence, self.block_size)
        if block is not None and step is not None:
            step.registered.append(block)

    def uncache_blocks(self, group: SequenceGroup) -> None:
        """Take a group's full blocks out of the prefix cache, since they may be wrong, those that it has given up, too.

        Pinned blocks stay. A group that runs here has lost what it has computed.
        """
        pinned = {block for blocks in self.pins.values() for block in blocks}
        for sequence in group.unfinished:
            for block_hash in sequence.block_hashes:
                if self.blocks.find(block_hash) not in pinned:
                    self.blocks.forget(block_hash)
            if sequence.seat is not None and sequence.worker_id == self.worker_id:
                sequence.lose_computed_tokens()  # now: a sequence that is stopped puts what it has computed there

    def forget_tails(self, group: SequenceGroup) -> None:
        """Take the tails that a group started from out of the prefix cache, since they may be wrong."""
        for sequence in group.unfinished:
            if sequence.tail is not None:
                self.blocks.forget(sequence.tail.block_hash)
                sequence.tail = None

    def free_placed(self) -> bool:
        """Give up the references to what was placed of fetches: it may be evicted. False: there were none."""
        held = [blocks for blocks in self.placed_by_fetches.values() if blocks]
        for blocks in held:
            self.blocks.free(blocks)
            blocks.clear()
        return bool(held)

    def can_fetch_from(self, other: "WorkerState") -> bool:
        """True if blocks of another worker may pass to this one."""
        return bool(self.block_format) and self.block_format == other.block_format and self.max_fetched_blocks > 0

    @property
    def num_fetchable_blocks(self) -> int:
        """Blocks that another fetch may have. The worker keeps what has come until the step is done that places it."""
        placed = chain(self.unsent_placed.values(), *(step.placed.values() for step in self.in_flight))
        num_kept = sum(1 for each in placed if each.fetch_id not in self.placed_by_fetches)  # others are still coming
        return self.max_fetched_blocks - self.num_coming_fetched - num_kept

    def hold_copy_source(self, block: int, step: PlannedStep) -> None:
        """Keep a block that `step` copies from until the step is done."""
        if block not in step.copy_sources:
            step.copy_sources.append(block)
            self.blocks.share([block])
            self.copy_holds[block] += 1

    def blocks_in_doubt(self) -> set[int]:
        """Return the findable blocks whose content depends on steps in flight, or on the next one."""
        in_doubt = set(self.unsent_placed)
        for step in self.in_flight:
            in_doubt.update(step.registered, step.placed)
        return in_doubt

    def num_holders(self, block: int) -> int:
        """Count the sequences that hold a block, in their tables or to copy it, but not steps that only read it."""
        return self.blocks.ref_count(block) - self.copy_holds[block]

    def cache_decoded_blocks(self) -> None:
        """Put blocks that decoding has filled into the prefix cache: outside of a step, since hashing takes time."""
        uncached, self.uncached = self.uncached, []
        for sequence in uncached:
            if sequence.worker_id == self.worker_id and sequence.status is SequenceStatus.RUNNING:
                self.cache_full_blocks(sequence, self._step_in_flight(sequence.last_step))

    def num_coming_blocks(self) -> int:
        """Count the blocks that become available when the steps in flight are done."""
        coming = [release.blocks for step in self.in_flight for release in step.releases]
        return self.blocks.num_freed_by([*coming, *(step.copy_sources for step in self.in_flight)])

    def complete_step(self) -> None:
        """Free what waited for the oldest step in flight, which was executed."""
        self.free_held_by(self.in_flight.popleft())

    def free_held_by(self, step: PlannedStep) -> None:
        """Free what a step held that is no longer in flight."""
        for release in step.releases:
            self.free_release(release)
        if step.copy_sources:
            self.copy_holds.subtract(step.copy_sources)
            self.copy_holds = +self.copy_holds  # drops the zeros
            self.blocks.free(step.copy_sources)

    def free_release(self, release: Release) -> None:
        self.blocks.free(release.blocks)
        self.free_seats.append(release.seat)
        if release.is_described:
            self.freed_seats.append(release.seat)

    def take_out(self, group: SequenceGroup) -> None:
        """Take a group out of the list here that its state names; no-op if it is in none."""
        if group.state is GroupState.PARKED:
            self.parked.pop(group, None)
        elif group.state is GroupState.SWAPPED:
            self.swapped.remove(group)
        elif group.state is GroupState.PAUSED:
            self.paused.pop(group, None)

    def _step_in_flight(self, step_id: int) -> PlannedStep | None:
        if not self.in_flight or step_id < self.in_flight[0].plan.step_id:
            return None
        return self.in_flight[step_id - self.in_flight[0].plan.step_id]


def blocks_held(sequence: Sequence) -> list[int]:
    """Return the blocks that a sequence has a reference to: its table, and the tail that it is yet to copy."""
    if sequence.fork_tail is None:
        return sequence.block_table
    return [*sequence.block_table, sequence.fork_tail]


def running_order(sequence: Sequence) -> tuple[float, ...]:
    return sequence.sort_key
