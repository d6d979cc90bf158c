"""Workers that compute prompts, and workers that go on from there. Blocks hold 4 tokens."""

from typing import Any

import pytest

from scheduler_svc.core.group_state import GroupState
from scheduler_svc.core.phases import WorkerRole
from scheduler_svc.core.scheduler_config import SchedulerConfig
from scheduler_svc.core.sequence import Sequence
from tests.scheduler.core_cluster import Cluster

PROMPT = [(3 * i) % 16 + 1 for i in range(42)]


def make_cluster(depth: int = 2, num_blocks: int = 60, **roles: WorkerRole) -> Cluster:
    """`roles`: one worker of each name."""
    cluster = Cluster(SchedulerConfig(max_num_batched_tokens=16, pipeline_depth=depth, watermark=0.0))
    for worker_id, role in roles.items():
        cluster.add_worker(worker_id, num_blocks=num_blocks, block_format="f", role=role)
    return cluster


def computed(cluster: Cluster, worker_id: str) -> int:
    return cluster.workers[worker_id].num_computed_tokens


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("length", [1, 4, 5, 16, 17, 42])
def test_a_prompt_is_computed_by_one_worker_and_its_output_by_the_other(depth: int, length: int) -> None:
    cluster = make_cluster(depth, p="prefill", d="decode")
    sequence = cluster.add(PROMPT[:length], 9)
    cluster.finish_and_compare()
    assert computed(cluster, "p") == length  # no row behind it is computed in vain
    assert computed(cluster, "d") == 8  # all tokens of the output but the last
    assert sequence.group.num_preemptions == 0 and cluster.stats("d").num_fetches == 1
    assert sequence.num_cached_tokens == 0  # nothing was cached when it came


@pytest.mark.parametrize("options", [{"num_sequences": 3}, {"num_sequences": 3, "is_beam": True}])
def test_groups_are_handed_over_whole(options: dict[str, Any]) -> None:
    cluster = make_cluster(p="prefill", d="decode")
    cluster.add_group(PROMPT, max_tokens=9, **options)
    cluster.finish_and_compare()
    assert (computed(cluster, "p"), computed(cluster, "d")) == (42, 3 * 8)


def test_a_prompt_longer_than_the_memory_for_fetches_is_not_computed_again_beside_those_that_decode() -> None:
    cluster = make_cluster(1, p="prefill")
    cluster.add_worker("d", num_blocks=60, block_format="f", role="decode", max_fetched_blocks=4)
    decoding = cluster.add([7], 90)
    while decoding.worker_id != "d":
        for worker_id in "pd":
            if cluster.start(worker_id) is not None:
                cluster.complete(worker_id)
        for fetch in list(cluster.fetches):
            cluster.end_fetch(fetch)
    long = cluster.add(PROMPT, 9)
    cluster.run_until_idle()
    cluster.assert_outputs_are_unconstrained()
    cluster.assert_idle_and_unleaked()
    assert long.group.num_fetched_blocks == 11 and long.group.num_recomputed_tokens == 0


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_worker_alone_does_everything(role: WorkerRole) -> None:
    cluster = make_cluster(w=role)
    cluster.add(PROMPT, 9)
    cluster.run_until_idle()
    cluster.assert_outputs_are_unconstrained()
    assert computed(cluster, "w") == 42 + 8


@pytest.mark.parametrize("lost", ["p", "d"])
def test_the_others_take_the_role_of_a_worker_that_is_lost(lost: str) -> None:
    cluster = make_cluster(p="prefill", d="decode")
    first = cluster.add(PROMPT, 20)
    while not first.num_output_tokens > 3:
        for worker_id in "pd":
            if cluster.start(worker_id) is not None:
                cluster.complete(worker_id)
        for fetch in list(cluster.fetches):
            cluster.end_fetch(fetch)
    cluster.lose_worker(lost)
    cluster.add([7, 8, 9], 5)
    cluster.finish_and_compare()


def test_a_draining_worker_counts_as_gone() -> None:
    cluster = make_cluster(p="prefill", d="decode")
    cluster.scheduler.workers.drain_worker("d")
    cluster.add(PROMPT, 9)
    cluster.run_until_idle()
    assert computed(cluster, "d") == 0
    cluster.assert_outputs_are_unconstrained()


@pytest.mark.parametrize(
    ("options", "num_moved"),
    [({"max_tokens": 1}, 0), ({"max_tokens": 2}, 1), ({"use_prefix_cache": False, "max_tokens": 4}, 0)],
)
def test_what_would_gain_nothing_stays(options: dict[str, Any], num_moved: int) -> None:
    cluster = make_cluster(p="prefill", d="decode")
    cluster.add(PROMPT, **options)
    cluster.run_until_idle()
    cluster.assert_outputs_are_unconstrained()
    assert (computed(cluster, "d") > 0) == bool(num_moved)


def test_a_group_too_large_for_the_workers_of_its_phase_is_held_by_the_others() -> None:
    cluster = make_cluster(p="prefill")
    cluster.add_worker("d", num_blocks=6, block_format="f", role="decode")
    cluster.add(PROMPT, 9)
    small = cluster.add(PROMPT[:8], 9)
    cluster.run_until_idle()
    cluster.assert_outputs_are_unconstrained()
    assert computed(cluster, "d") == 8 and small.is_finished


def test_a_group_that_only_the_other_role_can_hold_waits_for_it() -> None:
    cluster = make_cluster(d="decode")
    cluster.add_worker("p", num_blocks=6, block_format="f", role="prefill")
    cluster.add(PROMPT, 9)
    cluster.run_until_idle()
    cluster.assert_outputs_are_unconstrained()
    assert computed(cluster, "p") == 0


def run_both(cluster: Cluster, sequence: Sequence) -> None:
    """Run until the decode worker goes on with the sequence."""
    while not (sequence.worker_id == "d" and sequence.num_output_tokens > 2):
        for worker_id in "pd":
            if cluster.start(worker_id) is not None:
                cluster.complete(worker_id)
        for fetch in list(cluster.fetches):
            cluster.end_fetch(fetch)


def test_the_queue_of_one_phase_does_not_hold_up_the_other() -> None:
    """The prompt of a better class is first in order, and the worker for prompts has no room for it."""
    cluster = make_cluster(num_blocks=24, p="prefill", d="decode")
    cluster.add_worker("q", num_blocks=24, block_format="f", role="prefill")
    cluster.scheduler.workers.drain_worker("q")
    running = cluster.add(PROMPT, 9)
    run_both(cluster, running)
    cluster.scheduler.workers.drain_worker("p")  # no worker takes prompts now but the draining ones
    cluster.scheduler.workers.undo_drain("q")
    blocked = [cluster.add([5] * 60, 9, priority=-1), cluster.add([6] * 60, 9, priority=-1)]
    cluster.start("q")
    cluster.fail_steps("d")
    cluster.scheduler.pause(running.group, keep_on_host=False)
    cluster.scheduler.resume(running.group)
    assert blocked[1].group.state is GroupState.WAITING and running.group.state is GroupState.WAITING
    cluster.start("d")
    assert running.group.state in (GroupState.RUNNING, GroupState.FETCHING)
    cluster.run_until_idle()
    cluster.assert_outputs_are_unconstrained()


def test_groups_that_have_their_prompts_at_once_leave_one_by_one_where_not_all_can_be_fetched() -> None:
    cluster = make_cluster(p="prefill")
    cluster.add_worker("d", num_blocks=60, block_format="f", role="decode", max_fetched_blocks=3)
    sequences = [cluster.add([number + 1] * 8, 20) for number in range(2)]
    cluster.run_until_idle()
    cluster.assert_outputs_are_unconstrained()
    assert computed(cluster, "p") + computed(cluster, "d") == len(sequences) * (8 + 19)
    assert computed(cluster, "d") > 19


def test_a_group_that_goes_elsewhere_keeps_no_prompt_waiting_while_its_token_is_in_flight() -> None:
    """Regression: beside a backlog every second step of a worker for prompts had none."""
    cluster = make_cluster(p="prefill", d="decode")
    leaving = cluster.add(PROMPT[:8], 9)
    cluster.start("p")
    prompt = cluster.add(PROMPT[:5], 9)
    plan = cluster.start("p")
    assert leaving.group.state is GroupState.PARKED and plan is not None and plan.sequences == [prompt]
    cluster.finish_and_compare()


def test_prompts_add_no_row_to_the_steps_of_a_worker_that_decodes() -> None:
    cluster = make_cluster(p="prefill", d="decode")
    running = cluster.add(PROMPT[:8], 20)
    run_both(cluster, running)
    for number in range(6):
        cluster.add([number + 1] * 40, 3)
    most = 0
    while not running.is_finished:
        for worker_id in "pd":
            plan = cluster.start(worker_id)
            if plan is None:
                continue
            if worker_id == "d":
                most = max([most, *plan.num_tokens])
            cluster.complete(worker_id)
        for fetch in list(cluster.fetches):
            cluster.end_fetch(fetch)
    assert most == 1
    cluster.run_until_idle()
    cluster.assert_outputs_are_unconstrained()


@pytest.mark.parametrize("room", [{"num_seats": 3, "num_blocks": 60}, {"num_seats": 16, "num_blocks": 46}])
def test_no_token_is_computed_twice_while_the_workers_that_decode_are_full(room: dict[str, int]) -> None:
    """A group that waited for one would lose its blocks to the prompts behind it."""
    cluster = make_cluster(p="prefill", num_blocks=150)
    cluster.add_worker("d", block_format="f", role="decode", **room)
    sequences = [cluster.add([number + 1] * 40, 20) for number in range(16)]
    while not all(sequence.is_finished for sequence in sequences):
        for worker_id in "pd":
            if cluster.start(worker_id) is not None:
                cluster.complete(worker_id)
        for fetch in list(cluster.fetches):
            cluster.end_fetch(fetch)
    cluster.assert_outputs_are_unconstrained()
    cluster.assert_idle_and_unleaked()
    num_twice = sum(computed(cluster, worker_id) for worker_id in "pd") - len(sequences) * (40 + 19)
    assert num_twice <= sum(
        sequence.group.num_preemptions for sequence in sequences
    )  # one computes its last token anew
    assert computed(cluster, "d") > 5 * 19
