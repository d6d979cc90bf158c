"""Summary of cached prompts: what workers have or will have, and nothing evicted; bounded. Blocks hold 4 tokens."""

import itertools
import zlib
from collections.abc import Sequence as Seq

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.prompt_beginnings import beginnings_of, pack_hashes, unpack_hashes
from quire.v1 import inference_pb2 as pb
from scheduler_svc.core import cached_prompts
from scheduler_svc.core.block_hash import extend_block_hashes
from scheduler_svc.core.cached_prompts import MOST_HASHES, CachedPrompts, PromptBeginning
from scheduler_svc.core.scheduler_config import SchedulerConfig
from scheduler_svc.core.sequence import Sequence
from scheduler_svc.requests.live.cache_summary import CacheSummary
from tests.scheduler.core_cluster import Cluster

PROMPTS = st.lists(st.sampled_from([[1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 11, 12]]), min_size=1, max_size=5).map(
    lambda blocks: [*itertools.chain(*blocks), 77]
)


def beginnings(prompt: Seq[int]) -> list[PromptBeginning]:
    """One for each block that a prompt fills, by a hash of its tokens."""
    ends = range(4, len(prompt) + 1, 4)
    return [PromptBeginning(zlib.crc32(repr(prompt[:end]).encode()), end) for end in ends]


def hashes(prompt: Seq[int]) -> set[int]:
    return {each.hash for each in beginnings(prompt)}


class CachingCluster(Cluster):
    """A cluster that tells its summary of each prompt."""

    def __init__(self, *, num_blocks: int = 40, num_workers: int = 1) -> None:
        super().__init__(SchedulerConfig(max_num_batched_tokens=64, watermark=0.0))
        for number in range(num_workers):
            self.add_worker(f"w{number}", num_blocks=num_blocks)
        self.cached = CachedPrompts(self.scheduler.workers)

    def admit(self, prompt: list[int]) -> Sequence:
        sequence = self.add(prompt, 2)
        self.cached.add(sequence, beginnings(prompt))
        return sequence

    def run(self, prompt: list[int]) -> None:
        self.admit(prompt)
        self.run_until_idle()


def test_a_prompt_is_known_from_its_admission_until_its_blocks_are_evicted() -> None:
    cluster = CachingCluster(num_blocks=6)
    prompt = [1, 2, 3, 4, 5, 6, 7, 8, 9]
    cluster.admit(prompt)
    assert set(cluster.cached.hashes()) == hashes(prompt)
    cluster.run_until_idle()
    assert set(cluster.cached.hashes()) == hashes(prompt)
    cluster.run([21, 22, 23, 24, 25, 26, 27, 28, 29, 30, 31, 32, 33, 34, 35, 36, 37])  # 5 blocks: evicts the tail
    assert set(cluster.cached.hashes()) & hashes(prompt) == hashes(prompt[:4])
    cluster.remove_worker("w0")
    assert cluster.cached.hashes() == []


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_prompt_that_was_never_computed_is_forgotten_with_its_request(num_workers: int) -> None:
    cluster = CachingCluster(num_workers=num_workers)
    sequence = cluster.admit([1, 2, 3, 4, 5])
    assert cluster.cached.hashes()
    cluster.scheduler.finish(sequence)
    assert cluster.cached.hashes() == []


@given(st.lists(st.tuples(PROMPTS, st.booleans()), max_size=12), st.integers(1, 2))
def test_what_is_known_is_what_the_workers_have(asked: list[tuple[list[int], bool]], num_workers: int) -> None:
    """After requests that share beginnings on workers of 8 blocks, now and then with a look in between."""
    cluster = CachingCluster(num_blocks=8, num_workers=num_workers)
    for prompt, looks in asked:
        cluster.run(prompt)
        if looks:
            cluster.cached.hashes()
    known = set(cluster.cached.hashes())
    for prompt, _ in asked:
        chain: list[bytes] = []
        extend_block_hashes(chain, b"", prompt, 4, len(prompt) // 4)
        has = [cluster.scheduler.workers.is_cached(block_hash) for block_hash in chain]
        assert [each.hash in known for each in beginnings(prompt)] == has
    assert known <= set().union(*(hashes(prompt) for prompt, _ in asked))
    cluster.assert_idle_and_unleaked()


@pytest.mark.parametrize("are_computed", [False, True])
def test_a_summary_is_bounded_and_leaves_out_what_was_not_used_for_longest(are_computed: bool) -> None:
    cluster = CachingCluster(num_blocks=3000)
    prompts = [[number + 1, *range(1000, 1000 + 4 * 30)] for number in range(90)]  # 30 blocks each, 2,700 in all
    for prompt in prompts:
        cluster.admit(prompt)
    if are_computed:
        cluster.run_until_idle()
        cluster.cached.hashes()
        cluster.run(prompts[0])  # used again, after all others
    known = cluster.cached.hashes()
    assert len(known) == len(set(known)) == MOST_HASHES
    present = [[each.hash in known for each in beginnings(prompt)] for prompt in prompts]
    assert all(each == sorted(each, reverse=True) for each in present)  # never a longer one without a shorter one
    assert all(present[-1]) and not any(present[1]) and all(present[0]) == are_computed


def test_of_more_prompts_than_are_remembered_those_used_last_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cached_prompts, "_MOST_KNOWN", 3)
    cluster = CachingCluster()
    prompts = [[number, 2, 3, 4, 5] for number in range(1, 6)]
    for prompt in prompts:
        cluster.run(prompt)
    assert set(cluster.cached.hashes()) == set().union(*(hashes(prompt) for prompt in prompts[2:]))


def test_what_is_cached_no_more_takes_no_room_of_what_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cached_prompts, "_MOST_KNOWN", 2)
    cluster = CachingCluster(num_workers=2)
    prompts = [[number, 2, 3, 4, 5] for number in range(1, 4)]
    workers = cluster.scheduler.workers
    for prompt, drained in ((prompts[0], "w1"), (prompts[1], "w0")):
        workers.drain_worker(drained)
        cluster.run(prompt)
        workers.undo_drain(drained)
    cluster.remove_worker("w1")
    assert set(cluster.cached.hashes()) == hashes(prompts[0])
    cluster.run(prompts[2])
    assert set(cluster.cached.hashes()) == hashes(prompts[0]) | hashes(prompts[2])


@pytest.mark.parametrize("num_coming", [3, 4, 5])
def test_what_is_coming_goes_before_what_is_cached(num_coming: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cached_prompts, "MOST_HASHES", 4)
    cluster = CachingCluster()
    cached, coming = [9] * 9, [*range(1, 4 * num_coming + 1), 7]
    cluster.run(cached)
    cluster.admit(coming)
    known = cluster.cached.hashes()
    first = {each.hash for each in beginnings(coming)[:4]}
    assert len(known) == 4 and set(known) >= first and set(known) <= first | hashes(cached)


def test_a_summary_has_what_a_client_computes_of_its_prompt() -> None:
    cluster = Cluster(SchedulerConfig(max_num_batched_tokens=4096, watermark=0.0))
    cluster.add_worker(num_blocks=400)
    summary = CacheSummary(3, cluster.scheduler.workers)
    assert (summary.to_pb().shard, summary.to_pb().version, summary.to_pb().hashes) == (3, 0, b"")
    prompt = list(range(2, 602))
    request = pb.GenerateRequest(tenant="me", cache_salt="s", token_ids=pb.TokenIds(ids=prompt))
    summary.record_admitted(request, cluster.add(prompt, 2))
    cluster.run_until_idle()
    own = frozenset(each.short_hash for each in beginnings_of(prompt, "s", "me"))
    said = summary.to_pb()
    assert unpack_hashes(said.hashes) == own and len(own) == 9  # of 64 tokens each
    assert said.version and said.hashes == pack_hashes(own) and said == summary.to_pb()
