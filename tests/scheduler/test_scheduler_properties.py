"""Random schedules: whatever happens in whatever order, nothing leaks, nothing stalls, outputs stay the same."""

import random
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from scheduler_svc.core.phases import WorkerRole
from scheduler_svc.core.pins import PinRefusedError
from scheduler_svc.core.preemption import PreemptionCosts
from scheduler_svc.core.scheduler_config import SchedulerConfig
from scheduler_svc.core.sequence import Sequence, SequenceGroup
from scheduler_svc.core.worker_state import blocks_held
from tests.scheduler.core_cluster import Cluster

WORKER_IDS = ("a", "b", "c")
# Prompts that begin alike: a prefix of one of these, and a tail of their own.
PREFIXES = [[(7 * i + 3 * k) % 16 + 1 for i in range(24)] for k in range(3)]

configs = st.builds(
    SchedulerConfig,
    max_num_batched_tokens=st.sampled_from([2, 5, 16, 40]),
    max_num_seqs=st.sampled_from([1, 4, 8, 8]),
    watermark=st.sampled_from([0.0, 0.15]),
    pipeline_depth=st.sampled_from([1, 2, 2, 3]),
    enable_prefix_cache=st.sampled_from([True, True, False]),
    order=st.sampled_from(["fcfs", "edf"]),
    preemption=st.sampled_from(["swap", "swap", "auto", "recompute"]),
    preempt_every=st.sampled_from([None, None, 1, 2, 5]),
    priority_patience_s=st.sampled_from([0.01, 0.05]),
    block_fetch=st.sampled_from(["never", "auto", "always", "always"]),
)
prompts = st.builds(
    lambda prefix, length, tail: prefix[:length] + tail,
    st.sampled_from(PREFIXES),
    st.integers(0, 24),
    st.lists(st.integers(1, 3), min_size=1, max_size=4),
)


class SchedulerMachine(RuleBasedStateMachine):
    """Every rule is a call, or a run of calls, that the engine may make at that moment."""

    @initialize(
        config=configs,
        block_size=st.sampled_from([1, 2, 4]),
        num_workers=st.integers(0, 3),
        most_forced=st.sampled_from([0, 0, 3]),
    )
    def configure(self, config: SchedulerConfig, block_size: int, num_workers: int, most_forced: int) -> None:
        self.cluster = Cluster(config, most_forced=most_forced)
        self.block_size = block_size
        for _ in range(num_workers):
            self.add_worker(50, 8)

    def num_blocks_for_the_largest(self) -> int:
        """Number of blocks of the smallest pool that holds each unfinished group alone, above the watermark."""
        num_needed = max((s.group.worst_case_blocks(self.block_size) for s in self.unfinished()), default=1)
        watermark = self.cluster.config.watermark
        return next(n for n in range(num_needed, 2 * num_needed + 9) if n - int(n * watermark) >= num_needed)

    def unfinished(self) -> list[Sequence]:
        return [s for s in self.cluster.sequences if not s.is_finished]

    def paused(self) -> list[SequenceGroup]:
        return list(dict.fromkeys(s.group for s in self.unfinished() if s.group.is_paused))

    def busy(self) -> list[str]:
        return sorted(worker_id for worker_id, steps in self.cluster.in_flight.items() if steps)

    @precondition(lambda self: len(self.cluster.workers) < len(WORKER_IDS))
    @rule(
        num_tokens=st.integers(30, 70),
        num_seats=st.sampled_from([1, 4, 16]),
        num_host_tokens=st.sampled_from([0, 12, 40, 70]),
        block_format=st.sampled_from(["", "f", "f", "f", "g"]),
        max_fetched_blocks=st.sampled_from([0, 3, 1000]),
        role=st.sampled_from(["mixed", "mixed", "prefill", "decode"]),
    )
    def add_worker(
        self,
        num_tokens: int,
        num_seats: int,
        num_host_tokens: int = 40,
        block_format: str = "f",
        max_fetched_blocks: int = 1000,
        role: WorkerRole = "mixed",
    ) -> None:
        worker_id = next(w for w in WORKER_IDS if w not in self.cluster.workers)
        self.cluster.add_worker(
            worker_id,
            num_blocks=num_tokens // self.block_size,
            block_size=self.block_size,
            num_seats=num_seats,
            num_host_blocks=num_host_tokens // self.block_size,
            block_format=block_format,
            max_fetched_blocks=max_fetched_blocks,
            role=role,
        )
        # The larger groups are cheaper to compute again, the smaller to swap.
        self.cluster.scheduler.workers.record_costs(
            worker_id,
            PreemptionCosts(
                swap_blocks_per_s=16.0, fetch_blocks_per_s=12.0, prefill_tokens_per_s=9.0 * self.block_size
            ),
        )

    @rule(
        prompts=st.lists(prompts, min_size=1, max_size=3),
        max_tokens=st.integers(1, 20),
        stops=st.booleans(),
        priority=st.sampled_from([0, 0, 0, 1]),
        deadline_s=st.sampled_from([None, None, 5.0, 9.0]),
        use_prefix_cache=st.sampled_from([True, True, True, False]),
        hash_seed=st.sampled_from([b"", b"", b"", b"tenant"]),
    )
    def add(self, prompts: list[list[int]], max_tokens: int, **options: Any) -> None:
        for prompt in prompts:
            self.cluster.add(prompt, max_tokens, **options)

    @rule(
        prompt=prompts,
        num_sequences=st.integers(2, 4),
        max_tokens=st.integers(1, 9),
        stops=st.booleans(),
        priority=st.sampled_from([0, 0, 0, 1]),
        use_prefix_cache=st.sampled_from([True, True, True, False]),
    )
    def add_group(self, prompt: list[int], num_sequences: int, max_tokens: int, **options: Any) -> None:
        num_sequences = min(num_sequences, self.cluster.config.max_num_seqs)
        self.cluster.add_group(prompt, num_sequences, max_tokens, **options)

    @rule(
        prompt=prompts,
        beam_width=st.integers(1, 4),
        max_tokens=st.integers(1, 8),
        priority=st.sampled_from([0, 0, 0, 1]),
    )
    def add_beams(self, prompt: list[int], beam_width: int, max_tokens: int, **options: Any) -> None:
        beam_width = min(beam_width, self.cluster.config.max_num_seqs)
        self.cluster.add_group(prompt, beam_width, max_tokens, is_beam=True, **options)

    @precondition(lambda self: self.cluster.workers)
    @rule(seconds=st.sampled_from([0.005, 0.02]))
    def let_time_pass(self, seconds: float) -> None:
        self.cluster.now_s += seconds

    @rule()
    def fill_pipelines(self) -> None:
        for worker_id in sorted(self.cluster.workers):
            while self.cluster.start(worker_id) is not None:
                self.cluster.scheduler.check()

    @precondition(lambda self: self.busy())
    @rule(data=st.data(), starts=st.booleans())
    def complete(self, data: Any, starts: bool) -> None:
        worker_id = data.draw(st.sampled_from(self.busy()))
        self.cluster.complete(worker_id)
        if starts:
            self.cluster.start(worker_id)

    @precondition(lambda self: self.cluster.workers)
    @rule(rng=st.randoms(use_true_random=False), num_calls=st.integers(1, 30))
    def go_on(self, rng: random.Random, num_calls: int) -> None:
        for _ in range(num_calls):
            worker_id = rng.choice(sorted(self.cluster.workers))
            if self.cluster.in_flight[worker_id] and rng.random() < 0.5:
                self.cluster.complete(worker_id)
            else:
                self.cluster.start(worker_id)
            self.cluster.scheduler.check()

    @precondition(lambda self: self.unfinished())
    @rule(data=st.data())
    def finish(self, data: Any) -> None:
        sequence = data.draw(st.sampled_from(self.unfinished()))
        if sequence.group.awaits_host:  # the search knows its beams: they end together
            self.cluster.scheduler.finish_group(sequence.group)
        self.cluster.scheduler.finish(sequence)
        self.cluster.scheduler.finish(sequence)

    @precondition(lambda self: self.unfinished())
    @rule(data=st.data(), keep_on_host=st.booleans())
    def pause(self, data: Any, keep_on_host: bool) -> None:
        group = data.draw(st.sampled_from(self.unfinished())).group
        self.cluster.scheduler.pause(group, keep_on_host=keep_on_host)
        assert all(sequence.seat is None and not blocks_held(sequence) for sequence in group.sequences)

    @precondition(lambda self: self.paused())
    @rule(data=st.data())
    def resume(self, data: Any) -> None:
        group = data.draw(st.sampled_from(self.paused()))
        self.cluster.scheduler.resume(group)
        self.cluster.scheduler.resume(group)

    @precondition(lambda self: self.unfinished())
    @rule(data=st.data())
    def finish_group(self, data: Any) -> None:
        group = data.draw(st.sampled_from(self.unfinished())).group
        self.cluster.scheduler.finish_group(group)
        self.cluster.scheduler.finish_group(group)

    @precondition(lambda self: self.cluster.workers)
    @rule(data=st.data(), name=st.sampled_from("xyz"), num_blocks=st.integers(1, 4))
    def pin_or_unpin(self, data: Any, name: str, num_blocks: int) -> None:
        scheduler = self.cluster.scheduler
        worker_id = data.draw(st.sampled_from(sorted(self.cluster.workers)))
        scheduler.workers.unpin_blocks(worker_id, name)
        known = [s.block_hashes[:num_blocks] for s in self.cluster.sequences if s.block_hashes]
        if known:
            try:
                scheduler.workers.pin_blocks(worker_id, name, data.draw(st.sampled_from(known)))
            except PinRefusedError:
                scheduler.check()

    @precondition(lambda self: self.cluster.fetches)
    @rule(data=st.data(), is_whole=st.sampled_from([True, True, False]))
    def end_fetch(self, data: Any, is_whole: bool) -> None:
        fetch = data.draw(st.sampled_from(self.cluster.fetches))
        num_blocks = len(fetch.blocks) if is_whole else data.draw(st.integers(0, len(fetch.blocks)))
        self.cluster.end_fetch(fetch, num_blocks)

    @precondition(lambda self: self.cluster.placing)
    @rule(data=st.data())
    def drop_fetch(self, data: Any) -> None:
        self.cluster.drop_fetch(data.draw(st.sampled_from(self.cluster.placing)))

    @precondition(lambda self: self.busy())
    @rule(data=st.data())
    def fail_steps(self, data: Any) -> None:
        self.cluster.fail_steps(data.draw(st.sampled_from(self.busy())))

    @precondition(lambda self: self.busy())
    @rule(data=st.data())
    def blame_steps(self, data: Any) -> None:
        self.cluster.blame_step(data.draw(st.sampled_from(self.busy())))

    @precondition(lambda self: len(self.cluster.workers) > 1)
    @rule(data=st.data(), lives_on=st.booleans(), is_proven=st.booleans())
    def lose_worker(self, data: Any, lives_on: bool, is_proven: bool) -> None:
        worker_id = data.draw(st.sampled_from(sorted(self.cluster.workers)))
        self.cluster.lose_worker(worker_id, is_proven=is_proven)
        self.cluster.scheduler.record_return(worker_id, is_same_process=lives_on)

    @precondition(lambda self: self.cluster.workers)
    @rule(data=st.data(), undo=st.booleans())
    def drain(self, data: Any, undo: bool) -> None:
        worker_id = data.draw(st.sampled_from(sorted(self.cluster.workers)))
        change = self.cluster.scheduler.workers.undo_drain if undo else self.cluster.scheduler.workers.drain_worker
        change(worker_id)
        change(worker_id)

    @precondition(lambda self: self.cluster.workers)
    @rule(data=st.data())
    def ask_for_a_snapshot(self, data: Any) -> None:
        self.cluster.scheduler.request_snapshot(data.draw(st.sampled_from(sorted(self.cluster.workers))))

    @precondition(lambda self: len(self.cluster.workers) > 1)
    @rule(data=st.data())
    def remove_worker(self, data: Any) -> None:
        self.cluster.remove_worker(data.draw(st.sampled_from(sorted(self.cluster.workers))))

    @invariant()
    def check(self) -> None:
        if hasattr(self, "cluster"):
            self.cluster.assert_groups_are_listed()
            self.cluster.assert_figures_add_up()

    def teardown(self) -> None:
        if not hasattr(self, "cluster"):
            return
        if len(self.cluster.workers) == len(WORKER_IDS):
            self.cluster.remove_worker("a")
        for group in self.paused():
            self.cluster.scheduler.resume(group)
        num_blocks = self.num_blocks_for_the_largest()
        self.cluster.add_worker("last", num_blocks=num_blocks, block_size=self.block_size, num_host_blocks=10)
        # Forced preemption may make it compute a sequence anew for each of its tokens, one token a plan.
        self.cluster.run_until_idle(sum(s.worst_case_tokens * (s.max_tokens + 1) for s in self.unfinished()))
        self.cluster.assert_outputs_are_unconstrained()
        for worker_id in self.cluster.workers:
            for name in "xyz":
                self.cluster.scheduler.workers.unpin_blocks(worker_id, name)
        self.cluster.assert_idle_and_unleaked()


def test_random_calls_leak_nothing_and_every_sequence_gets_its_output() -> None:
    run_state_machine_as_test(
        SchedulerMachine,
        settings=settings(
            max_examples=80,  # the machine of tests/memory is the one for long runs
            stateful_step_count=40,
            phases=[Phase.generate],  # add Phase.shrink to look at a failure: it takes minutes
            suppress_health_check=list(HealthCheck),
        ),
    )


def _load(cluster: Cluster, seed: int, num_sequences: int) -> None:
    rng = random.Random(seed)
    for _ in range(num_sequences):
        prefix = rng.choice(PREFIXES)[: rng.randrange(25)]
        tail = [rng.randrange(1, 4) for _ in range(rng.randrange(1, 5))]
        cluster.add(prefix + tail, rng.randrange(1, 21), stops=rng.random() < 0.5, priority=rng.randrange(2))


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("watermark", [0.0, 0.1])
@pytest.mark.parametrize("max_num_batched_tokens", [1, 7, 64])
def test_a_pool_barely_larger_than_one_sequence_gets_everything_done(
    depth: int, watermark: float, max_num_batched_tokens: int
) -> None:
    config = SchedulerConfig(max_num_batched_tokens=max_num_batched_tokens, watermark=watermark, pipeline_depth=depth)
    cluster = Cluster(config)
    # The largest sequence has 24 + 4 + 20 = 48 tokens: 12 blocks of 4.
    cluster.add_worker(num_blocks=13 if watermark == 0 else 14, block_size=4)
    _load(cluster, seed=1, num_sequences=40)
    num_worst_case_tokens = sum(s.worst_case_tokens for s in cluster.sequences)
    cluster.run_until_idle(max_plans=2 * num_worst_case_tokens)
    cluster.assert_outputs_are_unconstrained()
    cluster.assert_idle_and_unleaked()
    assert cluster.stats().num_preemptions > 0 or watermark > 0 or max_num_batched_tokens == 1


@pytest.mark.parametrize("num_workers", [1, 2, 3])
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("enable_prefix_cache", [True, False])
@pytest.mark.parametrize("preempt_every", [None, 1, 3])
def test_outputs_do_not_depend_on_the_schedule(
    num_workers: int, depth: int, enable_prefix_cache: bool, preempt_every: int | None
) -> None:
    cluster = Cluster(
        SchedulerConfig(
            max_num_batched_tokens=24,
            max_num_seqs=8,
            pipeline_depth=depth,
            enable_prefix_cache=enable_prefix_cache,
            preempt_every=preempt_every,
        )
    )
    for worker_id in WORKER_IDS[:num_workers]:
        cluster.add_worker(worker_id, num_blocks=20, block_size=4)
    _load(cluster, seed=2, num_sequences=30)
    cluster.run_until_idle()
    assert all(s.is_finished for s in cluster.sequences)
    cluster.assert_outputs_are_unconstrained()
    cluster.assert_idle_and_unleaked()
    stats = [cluster.stats(worker_id) for worker_id in cluster.workers]
    assert all(cluster.workers[w].num_computed_tokens > 0 for w in cluster.workers)
    assert (sum(w.num_prefix_hit_tokens for w in stats) > 0) == enable_prefix_cache
    if preempt_every is not None:
        assert sum(w.num_preemptions for w in stats) > 0
