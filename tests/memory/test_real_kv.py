"""Mixed requests in a pool little larger than the largest of them, with a real model and real KV.

What they answer is what the model answers each of them alone, whatever is swapped, computed again, copied, shared,
pinned or lost on the way. MEMORY_TEST_SEEDS=50 looks at more than the suite has time for.
"""

import os
import random
from collections.abc import Collection
from functools import cache
from pathlib import Path

import pytest
import torch

from scheduler_svc.core.block_hash import extend_block_hashes
from scheduler_svc.core.pins import PinRefusedError
from scheduler_svc.core.preemption import PreemptionCosts, PreemptionMode
from scheduler_svc.core.scheduler_config import SchedulerConfig
from scheduler_svc.core.sequence import SequenceGroup
from tests.equality import MAX_CUT_FRACTION, comparable_length, compare_tokens
from tests.memory.model_cluster import BLOCK_SIZE, WORKER_ID, ModelCluster
from tests.memory.model_requests import SHARED_PREFIX, Answer, Reference, Request, random_request
from tests.worker.tiny_models import write_tiny_model
from worker_svc.model.decoder import Decoder, load_decoder

SEEDS = range(int(os.environ.get("MEMORY_TEST_SEEDS", "1")))
NUM_REQUESTS = 100
DISTURBED: dict[PreemptionMode, tuple[int, int]] = {"swap": (7, 3), "auto": (64, 2), "recompute": (5, 4)}
# One seed is for the suite: every mode, and both depths of the one that does what the others do.
SHORT: list[tuple[PreemptionMode, int]] = [("swap", 2), ("recompute", 1), ("auto", 1), ("auto", 2)]
LONG: list[tuple[PreemptionMode, int]] = [(mode, depth) for mode in DISTURBED for depth in (1, 2)]
MODES_AND_DEPTHS = SHORT if len(SEEDS) == 1 else LONG


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    torch.set_num_threads(1)
    folder: Path = write_tiny_model("llama_gqa", tmp_path_factory.mktemp("model"))
    return load_decoder(folder, torch.float32, torch.device("cpu"))


@cache
def requests_of(decoder: Decoder, seed: int) -> tuple[list[Request], list[list[Answer]]]:
    """Requests, and the answers of the model to each alone."""
    rng = random.Random(seed)
    requests = [random_request(rng) for _ in range(NUM_REQUESTS)]
    reference = Reference(decoder)
    return requests, [reference.answers(request) for request in requests]


def make_cluster(
    decoder: Decoder,
    requests: list[Request],
    *,
    depth: int,
    preemption: PreemptionMode,
    budget: int = 64,
    preempt_every: int | None = None,
) -> ModelCluster:
    """A pool of 1.2 times what the largest request needs, and a host pool that does not hold everything either."""
    num_blocks = int(1.2 * max(request.num_worst_case_blocks(BLOCK_SIZE) for request in requests))
    config = SchedulerConfig(
        max_num_batched_tokens=budget,
        max_num_seqs=12,
        watermark=0.0,
        pipeline_depth=depth,
        preemption=preemption,
        preempt_every=preempt_every,
    )
    cluster = ModelCluster(decoder, config, num_blocks=num_blocks, num_host_blocks=num_blocks)
    # Large groups with short contexts are cheaper to compute again, the others to swap.
    cluster.scheduler.workers.record_costs(
        WORKER_ID, PreemptionCosts(swap_blocks_per_s=16.0, prefill_tokens_per_s=20.0)
    )
    return cluster


def compare(cluster: ModelCluster, answers: list[list[Answer]], cancelled: Collection[SequenceGroup] = ()) -> None:
    """Compare the answers that were not cancelled, and beam scores. A near tie cuts a search's beams at the start."""
    tokens, margins, ours = [], [], []
    for group, expected in zip(cluster.groups, answers, strict=True):
        if group in cancelled:
            continue
        tokens += [answer.token_ids for answer in expected]
        margins += [answer.margins for answer in expected]
        ours += cluster.outputs(group)
        if group in cluster.searches and comparable_length(expected[0].margins):
            scores = [hypothesis.score for hypothesis in cluster.searches[group].finish()]
            assert scores == pytest.approx([answer.score for answer in expected], abs=1e-4)
    report = compare_tokens(tokens, margins, ours)
    print(report)  # noqa: T201 - each cut is counted and printed
    assert report.num_cuts <= max(4, MAX_CUT_FRACTION * report.num_sequences), "more than one search, or 1 % of all"


@pytest.mark.long
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("preemption", "depth"), MODES_AND_DEPTHS)
def test_mixed_requests_under_pressure_answer_as_each_does_alone(
    decoder: Decoder, preemption: PreemptionMode, depth: int, seed: int
) -> None:
    requests, answers = requests_of(decoder, seed)
    cluster = make_cluster(decoder, requests, depth=depth, preemption=preemption)
    for request in requests:
        cluster.add(request)
    cluster.run(max_steps=4000)
    stats = cluster.stats
    assert 0 < stats.num_copied_blocks <= cluster.pool.num_copied, "tails are copied besides"
    assert stats.num_swapped_in_blocks == cluster.pool.num_swapped_in
    assert (stats.num_swaps > 0) == (preemption != "recompute")
    assert (stats.num_preemptions > stats.num_swaps) or preemption == "swap"
    assert stats.num_prefix_hit_tokens > 0
    compare(cluster, answers)
    assert cluster.num_kv_checks > NUM_REQUESTS
    cluster.assert_idle_and_unleaked()


@pytest.mark.long
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("preemption", "depth"), MODES_AND_DEPTHS)
def test_pins_failed_steps_snapshots_and_cancelled_requests_change_no_other_answer(
    decoder: Decoder, preemption: PreemptionMode, depth: int, seed: int
) -> None:
    budget, preempt_every = DISTURBED[preemption]
    requests, answers = requests_of(decoder, seed)
    cluster = make_cluster(
        decoder, requests, depth=depth, preemption=preemption, budget=budget, preempt_every=preempt_every
    )
    rng = random.Random(seed)
    waiting, cancelled, num_failed, num_pinned = list(requests), set(), 0, 0
    while waiting or not cluster.is_done:
        if waiting and (rng.random() < 0.5 or cluster.is_done):
            cluster.add(waiting.pop(0))
        cluster.go_on()
        event = rng.random()
        if event < 0.02:
            cluster.fill()
            num_failed += cluster.num_in_flight
            cluster.fail(is_executed=rng.random() < 0.5)
        elif event < 0.04:
            cluster.scheduler.request_snapshot(WORKER_ID)
        elif event < 0.08:
            num_pinned += pin_prefix(cluster, rng)
        elif event < 0.10 and not cluster.is_done:
            group = rng.choice([group for group in cluster.groups if not group.is_finished])
            cluster.cancel(group)
            cancelled.add(group)
        assert cluster.num_steps < 6000, "the requests do not get done"
    cluster.drain()
    compare(cluster, answers, cancelled)
    stats = cluster.stats
    assert stats.num_preemptions > 0 and (stats.num_swaps > 0) == (preemption != "recompute")
    assert num_failed > 0 and num_pinned + len(cancelled) > 0
    cluster.unpin("prefix")
    cluster.assert_idle_and_unleaked()


def pin_prefix(cluster: ModelCluster, rng: random.Random) -> bool:
    """Pin as many blocks of the shared prefix as exist and are allowed, instead of those pinned before."""
    cluster.unpin("prefix")
    hashes: list[bytes] = []
    extend_block_hashes(hashes, b"", SHARED_PREFIX, BLOCK_SIZE, rng.randint(1, len(SHARED_PREFIX) // BLOCK_SIZE))
    try:
        return cluster.pin("prefix", hashes)
    except PinRefusedError:
        return False
