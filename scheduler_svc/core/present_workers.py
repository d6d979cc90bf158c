"""The workers that are present: arrival and loss, draining, pins, and the largest group that they could hold.

Knows nothing of steps, nor of the order in which groups are served.
"""

from collections.abc import Sequence as Seq

from scheduler_svc.core import pins, placement
from scheduler_svc.core.draining import leaving_groups, serving_workers
from scheduler_svc.core.group_places import GroupPlaces
from scheduler_svc.core.memory_use import work_of
from scheduler_svc.core.pausing import unbind_paused
from scheduler_svc.core.phases import WorkerRole
from scheduler_svc.core.placement import WorkerLimits
from scheduler_svc.core.preemption import PreemptionCosts
from scheduler_svc.core.scheduler_config import SchedulerConfig
from scheduler_svc.core.scheduler_stats import TotalCounters
from scheduler_svc.core.seat_use import SeatUse, seat_use
from scheduler_svc.core.sequence import Sequence
from scheduler_svc.core.swapping import drop_host_copy
from scheduler_svc.core.worker_state import WorkerState


class PresentWorkers:
    """Workers by id, as they come and go."""

    def __init__(self, config: SchedulerConfig, limits: WorkerLimits, places: GroupPlaces) -> None:
        self._config = config
        self._limits = limits
        self._places = places
        self._workers = places.workers
        self._absent: WorkerState | None = None  # like the last that left when no other was here
        self.departed = TotalCounters()  # of all workers that have left

    def add_worker(
        self,
        worker_id: str,
        *,
        num_blocks: int,
        block_size: int,
        num_seats: int,
        max_num_batched_tokens: int | None = None,
        num_host_blocks: int = 0,
        max_model_len: int | None = None,
        block_format: str = "",
        max_fetched_blocks: int = 0,
        max_placed_blocks: int | None = None,
        role: WorkerRole = "mixed",
    ) -> None:
        """Add a worker, empty. `max_num_batched_tokens` bounds its steps, `max_model_len` each of its sequences.

        Blocks pass between workers with the same `block_format`, up to `max_fetched_blocks` at once to this one,
        and up to `max_placed_blocks` into its pool by a step that has rows of others (None: any number).

        Raises ValueError for an id in use, and for a block size other than that of the present workers.
        """
        if worker_id in self._workers:
            raise ValueError(f"worker {worker_id} is here already: remove it first")
        if num_seats < 1 or block_size < 1:
            raise ValueError(f"worker {worker_id} has {num_seats} seats, block size {block_size}: both are >= 1")
        for other in self._workers.values():
            if other.block_size != block_size:
                raise ValueError(
                    f"worker {worker_id} has block size {block_size}, worker {other.worker_id} has "
                    f"{other.block_size}: start all workers with the same"
                )
        max_num_batched_tokens = min(
            self._config.max_num_batched_tokens, max_num_batched_tokens or self._config.max_num_batched_tokens
        )
        self._workers[worker_id] = WorkerState(
            worker_id,
            max_num_batched_tokens=max_num_batched_tokens,
            num_blocks=num_blocks,
            block_size=block_size,
            num_seats=num_seats,
            num_watermark_blocks=int(num_blocks * self._config.watermark),
            enable_prefix_cache=self._config.enable_prefix_cache,
            num_host_blocks=num_host_blocks,
            preemption=self._config.preemption,
            max_model_len=max_model_len,
            block_format=block_format if self._config.block_fetch != "never" else "",
            max_fetched_blocks=max_fetched_blocks,
            max_placed_blocks=max_placed_blocks,
            role=role,
        )
        self._places.waiting.restore_deferred()
        if len(self._workers) == 1:
            for group in [*self._places.waiting, *self._places.paused]:  # their hashes may be of another block size
                group.shares = None
                for sequence in group.sequences:
                    sequence.block_hashes.clear()
                    sequence.tail = None
        self._places.move_from_draining()

    def remove_worker(self, worker_id: str) -> list[Sequence]:
        """Remove a worker that is gone, with its KV and the tokens in flight. Return what ran there; it waits again."""
        worker = self._workers.pop(worker_id)
        self._places.fetches.forget_destination(worker)
        self.departed += work_of(worker)
        if not self._workers:
            self._absent = worker.empty_copy()
        for step in worker.in_flight:
            beams = [step.plan.sequences[row] for row in step.plan.candidate_rows]
            for sequence in [*step.plan.sampled_sequences, *beams]:
                sequence.num_pending_tokens = 0
        running = [sequence.group for sequence in worker.running]
        for group in dict.fromkeys([*running, *worker.parked, *worker.swapped, *worker.paused]):
            drop_host_copy(worker, group)
            for sequence in group.unfinished:
                sequence.leave_worker()
            if group.is_paused:
                unbind_paused(worker, group)
            else:
                self._places.queue_again(group)
        return worker.running

    def drain_worker(self, worker_id: str) -> None:
        """Give a worker nothing new, and move its groups to workers that can hold them. Idempotent.

        A group that has run and fits nowhere else ends there.
        """
        self._workers[worker_id].is_draining = True
        self._places.move_from_draining()

    def undo_drain(self, worker_id: str) -> None:
        """Have a worker serve as before. Idempotent."""
        self._workers[worker_id].is_draining = False
        self._places.waiting.restore_deferred()
        self._places.move_from_draining()

    def is_cached(self, block_hash: bytes) -> bool:
        """True if any worker has a block that can be found under this hash."""
        return any(worker.blocks.is_cached(block_hash) for worker in self._workers.values())

    @property
    def block_size(self) -> int | None:
        """Block size of all workers; None while there is none."""
        return next((worker.block_size for worker in self._workers.values()), None)

    def record_costs(self, worker_id: str, costs: PreemptionCosts) -> None:
        """Record the measured speeds of a worker. Called when they change, not in each step.

        Before the first call `auto` recomputes, and only a deadline that has passed keeps a group from being started.
        """
        self._workers[worker_id].costs = costs
        self._places.waiting.restore_late()  # a group that seemed too late may be in time

    def num_sequences_on(self, worker_id: str) -> int:
        """Count the sequences that run on a worker, those preempted and still bound to it, and fetches from it."""
        worker = self._workers[worker_id]
        kept = dict.fromkeys([*worker.parked, *worker.swapped])
        return len(worker.running) + sum(len(group.live) for group in kept) + len(worker.read_by_fetches)

    def pin_blocks(self, worker_id: str, name: str, block_hashes: Seq[bytes]) -> bool:
        """Keep the cached blocks with these hashes on a worker until `unpin_blocks`. False: some are not there.

        Raises PinRefusedError if a group that was admitted might then not fit, ValueError for a name in use.
        """
        worker = self._workers[worker_id]
        if name in worker.pins:
            raise ValueError(f"{name} is pinned on worker {worker_id} already: unpin it first")
        blocks = pins.pinned_blocks(worker, block_hashes)
        if blocks is None:
            return False
        paused = [g for g in self._places.paused if g.worker_id is None or self._places.worker_of(g).is_draining]
        elsewhere = [*self._places.waiting, *paused, *leaving_groups(self._workers.values())]
        pins.check_promises(worker, blocks, serving_workers(self._workers.values()), elsewhere, self._limits)
        pins.add_pin(worker, name, blocks)
        return True

    def unpin_blocks(self, worker_id: str, name: str) -> None:
        """Let the blocks of a pin be evicted again; no-op if there is no such pin."""
        pins.remove_pin(self._workers[worker_id], name)
        self._places.waiting.restore_deferred()  # a group that was too large may fit now

    def num_pinned_blocks(self) -> int:
        """Return the pinned blocks of the worker that has the most."""
        return max((worker.num_pinned_blocks for worker in self._workers.values()), default=0)

    def max_tokens_that_fit(self, num_prompt_tokens: int = 0, num_sequences: int = 1, *, with_pins: bool = True) -> int:
        """Return the most tokens, prompt and output, of each sequence of a group that every worker could hold alone.

        `num_prompt_tokens` are those that its `num_sequences` share. Without `with_pins`: if nothing were pinned.
        Draining workers count if there is no other; while none is present, the last that was. 0 before the first.
        """
        return min(
            (
                placement.max_tokens_of_each(
                    worker, self._limits, num_prompt_tokens, num_sequences, with_pins=with_pins
                )
                for worker in self._measured_workers()
            ),
            default=0,
        )

    def max_sequences_that_fit(self) -> int:
        """Return the most sequences of a group that the workers of `max_tokens_that_fit` could each hold alone."""
        return min((placement.most_sequences(each, self._limits) for each in self._measured_workers()), default=0)

    def longest_prompt_that_fits(self, num_sequences: int) -> int:
        """Return the longest prompt of a group that those workers could each hold alone, with a token of each sequence.

        0 if they could not hold so many sequences.
        """
        workers = self._measured_workers()
        return min((placement.longest_prompt(each, self._limits, num_sequences) for each in workers), default=0)

    def seat_use(self) -> list[SeatUse]:
        """Return the use of seats on each worker that new groups are given to."""
        return seat_use(self._workers.values(), self._limits)

    def _measured_workers(self) -> list[WorkerState]:
        """Return the workers that a new group must fit on."""
        return serving_workers(self._workers.values()) or ([self._absent] if self._absent is not None else [])
