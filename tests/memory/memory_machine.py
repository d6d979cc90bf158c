"""Random calls on an audited cluster: fork, append, free, copy-on-write, swap, pin, evict, in any order allowed.

After every rule the reference counts equal the ledger's holders; at the end everybody gets the output of an
unconstrained run, and all blocks are free.
"""

import hashlib
import random
import struct
from collections import Counter
from typing import Any, ClassVar

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from scheduler_svc.core.pins import PinRefusedError
from scheduler_svc.core.preemption import PreemptionCosts
from scheduler_svc.core.scheduler_config import SchedulerConfig
from scheduler_svc.core.sequence import Sequence, SequenceGroup
from tests.memory.audited_cluster import AuditedCluster
from tests.scheduler.core_executor import unconstrained_output

WORKER_IDS = ("a", "b", "c")
MAX_UNFINISHED = 30  # sequences, when more are added
PIN_NAMES = "xyz"
# Prompts that begin alike: a prefix of one of these, and a tail of their own.
PREFIXES = [[(5 * i + 7 * k) % 16 + 1 for i in range(20)] for k in range(2)]
PRIORITIES = st.sampled_from([0, 0, 0, 0, -1, 2])

configs = st.builds(
    SchedulerConfig,
    max_num_batched_tokens=st.sampled_from([1, 3, 16, 64, 64]),
    max_num_seqs=st.sampled_from([2, 6, 12, 12, 12]),
    watermark=st.sampled_from([0.0, 0.0, 0.12]),
    pipeline_depth=st.sampled_from([1, 2, 2, 2, 3]),
    enable_prefix_cache=st.sampled_from([True, True, False]),
    order=st.sampled_from(["fcfs", "fcfs", "edf"]),
    preemption=st.sampled_from(["swap", "swap", "swap", "auto", "auto", "recompute"]),
    preempt_every=st.sampled_from([None, None, None, None, 2, 3, 5]),
)
prompts = st.builds(
    lambda prefix, length, tail: prefix[:length] + tail,
    st.sampled_from(PREFIXES),
    st.integers(0, 20),
    st.lists(st.integers(1, 3), min_size=1, max_size=4),
)
rngs = st.integers(0, 2**32).map(random.Random)


class MemoryMachine(RuleBasedStateMachine):
    """Every rule is what the engine may do at that moment."""

    cluster: AuditedCluster
    seen: ClassVar[Counter[str]] = Counter()  # in all examples

    @initialize(
        config=configs,
        block_size=st.sampled_from([1, 2, 3, 4]),
        num_workers=st.sampled_from([1, 1, 1, 2, 3]),
        rng=rngs,
        decides_at_once=st.booleans(),
    )
    def configure(
        self, config: SchedulerConfig, block_size: int, num_workers: int, rng: random.Random, decides_at_once: bool
    ) -> None:
        self.cluster = AuditedCluster(config, rng.randrange(1000), self.seen)
        self.cluster.decides_at_once = decides_at_once
        self.block_size = block_size
        for _ in range(num_workers):
            self.add_worker(rng)

    @precondition(lambda self: len(self.cluster.unfinished()) < MAX_UNFINISHED)
    @rule(
        prompt=prompts,
        num_sequences=st.sampled_from([1, 1, 2, 3, 4]),
        max_tokens=st.integers(1, 12),
        stops=st.booleans(),
        priority=PRIORITIES,
        deadline_s=st.sampled_from([None, None, 3.0, 8.0]),
        use_prefix_cache=st.sampled_from([True, True, True, False]),
        hash_seed=st.sampled_from([b"", b"", b"", b"tenant"]),
        is_beam=st.sampled_from([False, False, True]),
        num_times=st.sampled_from([1, 1, 2, 3]),
    )
    def add(self, prompt: list[int], num_sequences: int, max_tokens: int, num_times: int, **options: Any) -> None:
        num_sequences = min(num_sequences, self.cluster.config.max_num_seqs)
        if options["is_beam"]:
            options["stops"] = False
        for _ in range(num_times):
            self.cluster.add_group(prompt, num_sequences, max_tokens, **options)

    @precondition(lambda self: len(self.cluster.unfinished()) < MAX_UNFINISHED)
    @rule(prompt=prompts, num_sequences=st.integers(1, 4), num_left=st.integers(1, 6), rng=rngs)
    def add_of_an_earlier_life(self, prompt: list[int], num_sequences: int, num_left: int, rng: random.Random) -> None:
        """Add a group with output that was delivered before this process began, member by member."""
        max_tokens = 5 + num_left
        num_sequences = min(num_sequences, self.cluster.config.max_num_seqs)
        sequences = []
        for index in range(num_sequences):
            output = unconstrained_output(prompt, max_tokens, frozenset(), index)[: rng.randrange(max_tokens)]
            seq_id = len(self.cluster.sequences) + index
            sequences.append(Sequence(seq_id, prompt + output, len(prompt), max_tokens, frozenset()))
        group = SequenceGroup(sequences, arrival=len(self.cluster.sequences))
        self.cluster.sequences += sequences
        self.cluster.scheduler.add(group)

    @precondition(lambda self: self.cluster.workers)
    @rule(rng=rngs, num_calls=st.integers(1, 10))
    def go_on(self, rng: random.Random, num_calls: int) -> None:
        for _ in range(num_calls):
            worker_id = rng.choice(sorted(self.cluster.workers))
            undecided = self.cluster.undecided()
            if undecided and rng.random() < 0.4:
                self.cluster.decide(rng.choice(undecided), rng)
            elif self.cluster.in_flight[worker_id] and rng.random() < 0.5:
                self.cluster.complete(worker_id)
            elif rng.random() < 0.9:
                self.cluster.start(worker_id)
            else:
                self.cluster.scheduler.cache_decoded_blocks(worker_id)
            self.cluster.check()

    @precondition(lambda self: self.cluster.workers)
    @rule(rng=rngs, num_calls=st.integers(10, 60))
    def go_on_for_long(self, rng: random.Random, num_calls: int) -> None:
        self.go_on(rng, num_calls)
        self.cluster.check_cached_contents()

    @precondition(lambda self: self.cluster.unfinished())
    @rule(rng=rngs, is_whole_group=st.booleans())
    def finish(self, rng: random.Random, is_whole_group: bool) -> None:
        """Finish a member or a whole group, beams and idle ones included."""
        sequence = rng.choice(self.cluster.unfinished())
        if is_whole_group:
            self.cluster.finish_group(sequence.group)
        else:
            self.cluster.finish(sequence)

    @precondition(lambda self: self.cluster.workers)
    @rule(rng=rngs, name=st.sampled_from(PIN_NAMES), num_blocks=st.integers(0, 12))
    def pin_or_unpin(self, rng: random.Random, name: str, num_blocks: int) -> None:
        """The head of anything that was ever asked for, of what is there if possible, also while it runs."""
        worker_id = rng.choice(sorted(self.cluster.workers))
        self.cluster.unpin(worker_id, name)
        chains = [chain_of(s, self.block_size)[:num_blocks] for s in self.cluster.sequences if num_blocks]
        chains = [chain for chain in chains if self.cluster.has_cached(worker_id, chain)] or chains
        if chains:
            try:
                self.cluster.pin(worker_id, name, rng.choice(chains))
            except PinRefusedError:
                self.seen["refused pins"] += 1

    @precondition(lambda self: len(self.cluster.unfinished()) < MAX_UNFINISHED)
    @rule(rng=rngs)
    def flood_the_cache(self, rng: random.Random) -> None:
        """Run a long request that shares nothing, so that cached blocks are evicted."""
        self.cluster.add([rng.randrange(1, 16) for _ in range(rng.randrange(8, 24))], 1)

    @rule(rng=rngs)
    def disturb(self, rng: random.Random) -> None:
        """Disturb from outside: workers join, leave, fail and are measured; time passes."""
        num_workers = len(self.cluster.workers)
        calls = [self.let_time_pass, self.let_time_pass]
        if num_workers < len(WORKER_IDS):
            calls.append(self.add_worker)
        if num_workers:
            calls += [self.measure, self.ask_for_a_snapshot, self.fail_steps, self.fail_steps, self.remove_worker]
        rng.choice(calls)(rng)

    def let_time_pass(self, rng: random.Random) -> None:
        self.cluster.now_s += rng.choice([0.5, 2.0])
        self.cluster.end_expired()

    def add_worker(self, rng: random.Random) -> None:
        worker_id = next(w for w in WORKER_IDS if w not in self.cluster.workers)
        self.cluster.add_worker(
            worker_id,
            num_blocks=rng.randrange(32, 72) // self.block_size,
            block_size=self.block_size,
            num_seats=rng.choice([4, 16, 16]),
            num_host_blocks=rng.choice([0, 10, 30, 60, 100]) // self.block_size,
        )

    def remove_worker(self, rng: random.Random) -> None:
        self.cluster.remove_worker(self.any_worker(rng))

    def measure(self, rng: random.Random) -> None:
        """One that swaps faster than it computes, or the other way round."""
        self.cluster.scheduler.workers.record_costs(
            self.any_worker(rng),
            PreemptionCosts(
                swap_blocks_per_s=rng.choice([None, 1.0, 10.0, 100.0]), prefill_tokens_per_s=10.0 ** rng.randrange(1, 4)
            ),
        )

    def ask_for_a_snapshot(self, rng: random.Random) -> None:
        self.cluster.scheduler.request_snapshot(self.any_worker(rng))

    def fail_steps(self, rng: random.Random) -> None:
        busy = sorted(worker_id for worker_id, steps in self.cluster.in_flight.items() if steps)
        self.cluster.fail_steps(rng.choice(busy) if busy else self.any_worker(rng))

    def any_worker(self, rng: random.Random) -> str:
        return rng.choice(sorted(self.cluster.workers))

    @invariant()
    def check(self) -> None:
        if hasattr(self, "cluster"):
            self.cluster.check()

    def teardown(self) -> None:
        if not hasattr(self, "cluster"):
            return
        cluster = self.cluster
        if len(cluster.workers) == len(WORKER_IDS):
            cluster.remove_worker("a")
        num_blocks = self.num_blocks_for_the_largest()
        cluster.add_worker("last", num_blocks=num_blocks, block_size=self.block_size, num_host_blocks=10)
        cluster.decides_at_once = True
        cluster.decide_all()
        cluster.end_expired()
        # Forced preemption may make it compute a sequence anew for each of its tokens, one token a plan.
        cluster.run_until_idle(sum(s.worst_case_tokens * (s.max_tokens + 1) for s in self.cluster.unfinished()))
        cluster.check()
        cluster.check_cached_contents()
        cluster.assert_outputs_are_unconstrained()
        for worker_id in cluster.workers:
            for name in PIN_NAMES:
                cluster.unpin(worker_id, name)
        cluster.assert_idle_and_unleaked()

    def num_blocks_for_the_largest(self) -> int:
        """Number of blocks of the smallest pool that holds each unfinished group alone, above the watermark."""
        num_needed = max((s.group.worst_case_blocks(self.block_size) for s in self.cluster.unfinished()), default=1)
        watermark = self.cluster.config.watermark
        return next(n for n in range(num_needed, 2 * num_needed + 9) if n - int(n * watermark) >= num_needed)


def chain_of(sequence: Sequence, block_size: int) -> list[bytes]:
    """The hashes of its full blocks, made here."""
    hashes = []
    parent = hashlib.sha256(sequence.hash_seed).digest()
    for start in range(0, len(sequence.token_ids) - block_size + 1, block_size):
        tokens = sequence.token_ids[start : start + block_size]
        parent = hashlib.sha256(parent + struct.pack(f"<{block_size}i", *tokens)).digest()
        hashes.append(parent)
    return hashes
