"""The scheduler's core and a worker's runner with a real model and real KV, one call at a time, without a wire.

Freed blocks are poisoned at once, cached ones must keep their bytes, and the ledger counts along.
"""

from collections import deque

import torch

from common.sampling_params import SequenceSampling
from common.step import Candidates, Step
from common.step_codec import step_from_pb, step_to_pb
from kernels.native.torch_kernels import TorchKernels
from scheduler_svc.core.beam_search import BeamSearch, Candidate
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.scheduler_config import SchedulerConfig
from scheduler_svc.core.scheduler_stats import WorkerCounters
from scheduler_svc.core.sequence import Sequence, SequenceGroup
from scheduler_svc.core.step_plan import StepPlan
from scheduler_svc.core.worker_state import WorkerState
from scheduler_svc.workers.step_builder import build_step
from tests.memory.audited_pool import AuditedPool
from tests.memory.ledger import Ledger
from tests.memory.model_requests import Reference, Request
from tests.worker.tiny_models import MAX_POSITIONS
from worker_svc.cpu.host_decoder import HostDecoder
from worker_svc.cpu.runner import CpuRunner
from worker_svc.model.decoder import Decoder
from worker_svc.steps.step_limits import StepLimits

BLOCK_SIZE, NUM_SEATS = 4, 16
WORKER_ID = "w"


class ModelCluster:
    """One worker. Requests are known by the order in which they were added."""

    def __init__(self, decoder: Decoder, config: SchedulerConfig, *, num_blocks: int, num_host_blocks: int) -> None:
        self.config = config
        self.scheduler = Scheduler(config)
        self.scheduler.workers.add_worker(
            WORKER_ID,
            num_blocks=num_blocks,
            block_size=BLOCK_SIZE,
            num_seats=NUM_SEATS,
            num_host_blocks=num_host_blocks,
        )
        self.ledger = Ledger(self.scheduler)
        self.ledger.add_worker(WORKER_ID)
        self.pool = AuditedPool(decoder.block_shape(BLOCK_SIZE), num_blocks, num_host_blocks)
        limits = StepLimits(
            num_seats=NUM_SEATS,
            num_blocks=num_blocks,
            num_host_blocks=num_host_blocks,
            block_size=BLOCK_SIZE,
            vocab_size=decoder.config.vocab_size,
            max_model_len=MAX_POSITIONS,
            max_batched_tokens=config.max_num_batched_tokens,
        )
        self._runner = CpuRunner(HostDecoder(decoder, TorchKernels()), self.pool, limits)
        self._reference = Reference(decoder)
        self._in_flight: deque[tuple[StepPlan, Step]] = deque()
        self._sampling: dict[int, SequenceSampling] = {}
        self._sequences: list[Sequence] = []
        self._cached: dict[tuple[int, bytes], bytes] = {}  # (block, hash) -> digest
        self.groups: list[SequenceGroup] = []
        self.num_steps = 0
        self.num_kv_checks = 0
        self.searches: dict[SequenceGroup, BeamSearch] = {}
        self._candidates: dict[Sequence, Candidates] = {}
        self._live_beams: dict[SequenceGroup, list[Sequence]] = {}  # best first

    @property
    def worker(self) -> WorkerState:
        return self.scheduler._places.workers[WORKER_ID]

    @property
    def stats(self) -> WorkerCounters:
        return self.scheduler.stats().workers[0]

    @property
    def is_done(self) -> bool:
        return all(group.is_finished for group in self.groups)

    @property
    def num_in_flight(self) -> int:
        return len(self._in_flight)

    def add(self, request: Request) -> SequenceGroup:
        first_id = len(self._sequences)
        sequences = [
            Sequence(first_id + index, list(request.prompt), len(request.prompt), request.max_tokens, frozenset())
            for index in range(request.num_sequences)
        ]
        group = SequenceGroup(
            sequences,
            arrival=first_id,
            priority=request.priority,
            awaits_host=request.beams is not None,
            num_candidates=0 if request.beams is None else BeamSearch(request.beams).num_candidates,
        )
        if request.beams is not None:
            self.searches[group] = BeamSearch(request.beams)
        self._sampling.update((s.seq_id, request.sampling(index)) for index, s in enumerate(sequences))
        self._sequences += sequences
        self.groups.append(group)
        self.scheduler.add(group)
        return group

    def run(self, max_steps: int) -> None:
        """Run until all is done, with a full pipeline and both of its ends in turn."""
        while not self.is_done:
            self.go_on()
            assert self.num_steps <= max_steps, "the requests do not get done"
        self.drain()

    def drain(self) -> None:
        while self._in_flight:
            self.complete()

    def go_on(self) -> None:
        """Fill the pipeline, then complete the oldest step."""
        self.fill()
        assert self._in_flight, "nothing runs although a request is unfinished"
        self.complete()

    def fill(self) -> None:
        while self.start():
            pass

    def start(self) -> bool:
        self.ledger.before_plan(WORKER_ID)
        plan = self.scheduler.schedule(WORKER_ID)
        if plan is not None:
            self.num_steps += 1
            message = step_to_pb(build_step(plan, 1, self._sampling))
            self._in_flight.append((plan, step_from_pb(message)))
            self.ledger.planned(plan, self._unfinished())
        self._look()
        return plan is not None

    def complete(self) -> None:
        """Execute the oldest step in flight, and take what it found."""
        plan, step = self._in_flight.popleft()
        result = self._runner.launch(step)
        assert not result.invalid_samples, "a row read what nobody wrote"
        self.ledger.done(WORKER_ID)
        for sequence, _ in self.scheduler.apply(WORKER_ID, plan.step_id, result.token_ids):
            if sequence.num_output_tokens == sequence.max_tokens:
                self._finish(sequence)
        beams = [plan.sequences[row] for row in plan.candidate_rows]
        self._candidates.update(zip(beams, result.candidates, strict=True))
        for group in dict.fromkeys(beam.group for beam in beams):
            if group.live and group.awaits_decision:
                self._search_on(group)
        self._look()
        self._check_cached_bytes()
        self._poison_what_is_free()

    def fail(self, *, is_executed: bool) -> None:
        """The steps in flight are lost, after or before the oldest was executed."""
        if is_executed and self._in_flight:
            self._runner.launch(self._in_flight[0][1])
        self._in_flight.clear()
        self.scheduler.rollback(WORKER_ID)
        self.ledger.undone(WORKER_ID)
        self._look()

    def cancel(self, group: SequenceGroup) -> None:
        self.scheduler.finish_group(group)
        self._look()

    def pin(self, name: str, block_hashes: list[bytes]) -> bool:
        blocks = self.worker.blocks.lookup(block_hashes)
        is_pinned = self.scheduler.workers.pin_blocks(WORKER_ID, name, block_hashes)
        if is_pinned:
            self.ledger.pin(WORKER_ID, name, blocks)
        return is_pinned

    def unpin(self, name: str) -> None:
        self.scheduler.workers.unpin_blocks(WORKER_ID, name)
        self.ledger.unpin(WORKER_ID, name)

    def outputs(self, group: SequenceGroup) -> list[list[int]]:
        if group in self.searches:
            return [list(hypothesis.token_ids) for hypothesis in self.searches[group].finish()]
        return [sequence.output_token_ids for sequence in group.sequences]

    def assert_idle_and_unleaked(self) -> None:
        self.scheduler.check()
        stats = self.stats
        assert stats.num_used_blocks == stats.num_used_host_blocks == stats.num_running == 0
        assert stats.num_free_blocks + stats.num_cached_blocks == stats.num_blocks
        assert not self.worker.unsent_swap_out and not self.worker.in_flight

    def _search_on(self, group: SequenceGroup) -> None:
        search = self.searches[group]
        live = self._live_beams.get(group, group.live)
        found = [self._candidates.pop(beam) for beam in live]
        assert all(found_one.token_ids for found_one in found), "a row of candidates read what nobody wrote"
        survivors = search.advance(
            [[Candidate(t, p) for t, p in zip(one.token_ids, one.logprobs, strict=True)] for one in found]
        )
        if not survivors:
            for beam in live:
                self._compare_kv(beam)
            self.scheduler.finish_group(group)
            return
        choice = [(live[survivor.parent], survivor.token_id) for survivor in survivors]
        self._live_beams[group] = self.scheduler.replace_beams(group, choice)

    def _finish(self, sequence: Sequence) -> None:
        self._compare_kv(sequence)
        self.scheduler.finish(sequence)

    def _compare_kv(self, sequence: Sequence) -> None:
        """Compare the KV in its blocks with the KV of its tokens, computed at once and alone."""
        num_tokens = len(sequence.token_ids) - (sequence.num_computed_tokens < len(sequence.token_ids))
        if sequence.seat is None or num_tokens < BLOCK_SIZE:
            return
        expected = self._reference.kv(sequence.token_ids[:num_tokens], BLOCK_SIZE)
        for index, block in enumerate(sequence.block_table[: len(expected)]):
            num_filled = min(BLOCK_SIZE, num_tokens - index * BLOCK_SIZE)
            ours = self.pool.blocks[block, :, :, :num_filled]
            assert torch.allclose(ours, expected[index, :, :, :num_filled], atol=1e-3)
        self.num_kv_checks += 1

    def _unfinished(self) -> list[Sequence]:
        return [s for s in self._sequences if not s.is_finished]

    def _look(self) -> None:
        self._forget_uncached()
        self.ledger.look(self._sequences)
        self.scheduler.check()
        self.ledger.check(self._unfinished())

    def _check_cached_bytes(self) -> None:
        """Check that each cached block has the bytes that it had when it was first seen cached."""
        for (block, block_hash), digest in self._cached.items():
            assert self.pool.digest(block) == digest, f"cached block {block} was written, {block_hash.hex()}"
        for key in self._computed_and_findable() - self._cached.keys():
            self._cached[key] = self.pool.digest(key[0])

    def _forget_uncached(self) -> None:
        """Forget blocks that were evicted or freed; they may be computed again with slightly other bytes."""
        findable = self._computed_and_findable()
        self._cached = {key: digest for key, digest in self._cached.items() if key in findable}

    def _computed_and_findable(self) -> set[tuple[int, bytes]]:
        in_trust = {block for step in self.worker.in_flight for block in step.registered}
        hashes = enumerate(self.worker.blocks._hashes)
        return {(block, each) for block, each in hashes if each is not None and block not in in_trust}

    def _poison_what_is_free(self) -> None:
        """Poison all free blocks, except those still to be swapped out or in."""
        worker, plans = self.worker, [plan for plan, _ in self._in_flight]
        leaving = {*worker.unsent_swap_out[::2], *(block for plan in plans for block in plan.swap_out[::2])}
        coming = {block for plan in plans for block in plan.swap_in[::2]}
        blocks, host = worker.blocks, worker.host
        free = [b for b in range(blocks.num_blocks) if blocks.ref_count(b) == 0 and not blocks.is_findable(b)]
        host_free = [b for b in range(host.num_blocks) if host.ref_count(b) == 0] if host is not None else []
        self.pool.poison([b for b in free if b not in leaving], [b for b in host_free if b not in coming])
