"""Numbers of shards that change, in any order of events: no id is accepted twice, and what is gone is forgotten."""

import random
from dataclasses import dataclass, field, replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.errors import ShardsChangedError
from quire.shards import MOST_SHARDS, ShardNumbers, places_of_id, shard_of_id
from scheduler_svc.journal.redis_plan import RedisShardPlan
from scheduler_svc.journal.shard_plan import FormerNumber, ShardPlan
from scheduler_svc.journal.store import StoreConfigurationError
from scheduler_svc.leadership.settling import Settling
from scheduler_svc.requests.shard_rule import ShardRule

MOST = 4  # shards
NUM_CLIENTS = 3
IDS = [f"ours-{number}" for number in range(3)]
CHANGES = st.lists(st.tuples(st.sampled_from(["wanted", "ready", "settled"]), st.integers(1, MOST)), max_size=12)


def changed(plan: ShardPlan, changes: list[tuple[str, int]]) -> list[ShardPlan]:
    """Plans that follow one another; settled: of all that came before so many versions ago."""
    plans = [plan]
    for what, number in changes:
        plan = plans[-1]
        if what == "wanted":
            plans.append(plan.with_wanted(number))
        elif what == "ready":
            plans.append(plan.with_ready())
        else:
            plans.append(plan.without_settled([plan.version + 1 - number] * plan.num_kept))
    return plans


@given(st.integers(1, MOST), CHANGES)
def test_each_change_makes_a_later_version_and_keeps_what_may_have_requests(
    first: int, changes: list[tuple[str, int]]
) -> None:
    plans = changed(ShardPlan.first(first), changes)
    for before, after in pairwise(plans):
        assert after == before or after.version == before.version + 1
        assert after.num_kept >= max(after.num_shards, after.num_wanted)
        numbers = [each.num_shards for each in after.former]
        assert len(set(numbers)) == len(numbers) and after.num_shards not in numbers
        if after.num_shards != before.num_shards:
            assert after.former[0] == FormerNumber(before.num_shards, before.version)
    assert [ShardPlan.parse(str(plan)) for plan in plans] == plans


def test_fewer_shards_count_at_once_and_more_when_they_are_ready() -> None:
    plan = ShardPlan.first(1).with_wanted(3)
    assert (plan.num_shards, plan.num_wanted, plan.num_kept, plan.former) == (1, 3, 3, ())
    plan = plan.with_ready()
    assert (plan.num_shards, plan.num_kept, plan.former) == (3, 3, (FormerNumber(1, 2),))
    plan = plan.with_wanted(2)
    assert (plan.num_shards, plan.num_wanted, plan.num_kept) == (2, 2, 3)
    assert plan.former == (FormerNumber(3, 3), FormerNumber(1, 2))
    assert plan.without_settled([4, 4, 3]).num_kept == 3  # shard 2 took requests up to version 3
    kept = plan.without_settled([3, 3, 4])
    assert (kept.num_kept, kept.former) == (2, (FormerNumber(3, 3),))  # the others may have some of that time
    assert plan.without_settled([4, 4, 4]) == replace(plan, version=5, num_kept=2, former=())
    assert plan.without_settled([0, 0, 0]) is plan


def test_a_shard_that_never_took_requests_is_forgotten_at_once() -> None:
    plan = ShardPlan.first(2).with_wanted(4).with_wanted(2)
    assert plan.num_kept == 4 and plan.without_settled([0] * 4).num_kept == 2


@pytest.mark.parametrize(
    "text",
    ["", "1", "1 1 1", "0 1 1 1", "1 0 1 1", "1 2 2 1", f"1 1 1 {MOST_SHARDS + 1}", "1 1 1 1 x", "1 1 1 1 2", "a"],
)
def test_another_text_is_no_plan(text: str) -> None:
    with pytest.raises(ValueError):
        ShardPlan.parse(text)


def test_a_plan_may_have_the_most_shards() -> None:
    assert ShardPlan.parse(str(ShardPlan.first(MOST_SHARDS))) == ShardPlan.first(MOST_SHARDS)


def test_a_text_of_a_plan_has_at_most_64_kib() -> None:
    text = "1 1 1 1" + " 2:1" * 16381 + " 2:10"
    assert len(text) == 64 << 10 and len(ShardPlan.parse(text).former) == 16382
    with pytest.raises(ValueError, match="too long"):
        ShardPlan.parse(text + "0")


def test_a_plan_that_cannot_be_read_is_named_with_its_key() -> None:
    plans = RedisShardPlan("redis://localhost", deployment="ours")
    assert plans.parse(None) is None
    assert plans.parse(b"1 2 2 2") == ShardPlan.first(2)
    with pytest.raises(StoreConfigurationError, match=r"at the key {quire:ours}:shards cannot be read"):
        plans.parse(b"two")


@given(st.integers(1, MOST), CHANGES, CHANGES)
def test_of_two_plans_of_one_version_the_numbers_of_both_count_from_then_on(
    first: int, ours: list[tuple[str, int]], theirs: list[tuple[str, int]]
) -> None:
    here, there = changed(ShardPlan.first(first), ours)[-1], changed(ShardPlan.first(first), theirs)[-1]
    there = replace(there, version=here.version)
    merged = there.merged_with(here)
    assert merged.version == here.version + 1 and ShardPlan.parse(str(merged)) == merged
    numbers = {merged.num_shards, *(each.num_shards for each in merged.former)}
    assert numbers == {plan.num_shards for plan in (here, there)} | {
        each.num_shards for plan in (here, there) for each in plan.former
    }
    assert merged.num_kept >= max(here.num_kept, there.num_kept) and merged.num_shards == there.num_shards


def test_of_a_number_in_two_plans_of_one_version_the_later_end_counts_and_the_present_number_is_none_of_them() -> None:
    here = ShardPlan(version=5, num_shards=2, num_wanted=2, num_kept=2, former=(FormerNumber(3, 3), FormerNumber(1, 1)))
    there = ShardPlan(
        version=5, num_shards=1, num_wanted=1, num_kept=3, former=(FormerNumber(3, 4), FormerNumber(2, 2))
    )
    merged = ShardPlan(
        version=6, num_shards=1, num_wanted=1, num_kept=3, former=(FormerNumber(2, 5), FormerNumber(3, 4))
    )
    assert there.merged_with(here) == merged


@dataclass
class Leader:
    """Leader of a shard, which knows the plan as of its last look, and when it looked."""

    plan: ShardPlan
    plan_read_s: float = 0.0
    is_several: bool = True


@dataclass
class Submitting:
    """A submission of a client: it looks in the other places by its numbers, then goes to the last."""

    request_id: str
    client: int
    version: int = 0
    places: list[int] = field(default_factory=list)  # yet to be asked; the last takes it


class World:
    """Leaders and clients that learn of changes late, in any order; each shard's requests with the version then."""

    def __init__(self) -> None:
        self.plan = ShardPlan.first(1)
        self.plans = [self.plan]  # all there were
        self.now_s = 0.0
        self.leaders = [Leader(self.plan) for _ in range(MOST)]
        self.rules = [ShardRule(shard, leader, 0.0) for shard, leader in enumerate(self.leaders)]
        self.requests: list[dict[str, int]] = [{} for _ in range(MOST)]
        self.numbers = [numbers_of(self.plan) for _ in range(NUM_CLIENTS)]
        self.submitting: list[Submitting] = []
        self.num_accepted = 0

    def act(self, what: str, number: int) -> None:
        self.now_s += 1
        if self.plan != self.plans[-1]:
            self.plans.append(self.plan)
        shard, client, request_id = number % MOST, number // 4 % NUM_CLIENTS, IDS[number // 12 % len(IDS)]
        match what:
            case "wanted":
                self.plan = self.plan.with_wanted(1 + shard)
            case "ready":
                self.plan = self.plan.with_ready()
            case "settled":
                self.plan = self.plan.without_settled([self.settled(each) for each in range(self.plan.num_kept)])
            case "look":
                self.leaders[shard].plan, self.leaders[shard].plan_read_s = self.plan, self.now_s
            case "take over":  # by a scheduler that has not looked for a while
                self.leaders[shard] = Leader(self.plans[-1 - number % min(3, len(self.plans))])
                self.rules[shard] = ShardRule(shard, self.leaders[shard], self.now_s)
            case "learn":
                self.numbers[client] = numbers_of(self.plan)
            case "submit":
                self.submitting.append(self.placed(Submitting(request_id, client)))
            case "go on" if self.submitting:
                self.go_on(self.submitting[number % len(self.submitting)])
            case "expire":
                for each in self.requests:
                    each.pop(request_id, None)

    def placed(self, submitting: Submitting) -> Submitting:
        numbers = self.numbers[submitting.client]
        own, *others = places_of_id(submitting.request_id, numbers)
        submitting.version, submitting.places = numbers.version, [*others, own]
        return submitting

    def go_on(self, submitting: Submitting) -> None:
        request_id, shard = submitting.request_id, submitting.places[0]
        try:
            if len(submitting.places) > 1:
                self.rules[shard].check_known(submitting.version)
                del submitting.places[0 if request_id not in self.requests[shard] else slice(1, None)]
                return
            if request_id not in self.requests[shard]:
                self.rules[shard].check_new(request_id, submitting.version)
                elsewhere = [number for number, has in enumerate(self.requests) if request_id in has]
                assert not elsewhere, f"{request_id} is in shard {elsewhere}, and was accepted by {shard}"
                self.requests[shard][request_id] = self.leaders[shard].plan.version
                self.num_accepted += 1
            self.submitting.remove(submitting)
        except ShardsChangedError:
            self.placed(submitting)

    def settled(self, shard: int) -> int:
        """Version before which nothing is left of what a shard accepted."""
        return min(self.requests[shard].values(), default=self.leaders[shard].plan.version)


def numbers_of(plan: ShardPlan) -> ShardNumbers:
    return ShardNumbers(
        version=plan.version,
        num_shards=plan.num_shards,
        num_kept=plan.num_kept,
        former=tuple(each.num_shards for each in plan.former),
    )


# How often each happens: submissions go on more often than leaders and clients learn of a change.
ACTIONS = {"wanted": 1, "ready": 1, "settled": 1, "look": 6, "take over": 1, "learn": 10}
ACTIONS |= {"submit": 6, "go on": 60, "expire": 6}


@pytest.mark.parametrize("seed", range(12))
def test_no_id_is_in_two_shards_whoever_learns_of_a_change_first(seed: int) -> None:
    world, rng = World(), random.Random(seed)
    for what in rng.choices(list(ACTIONS), list(ACTIONS.values()), k=8000):
        world.act(what, rng.randrange(3600))
    assert world.num_accepted > 100 and world.plan.version > 50


def test_once_all_know_the_numbers_every_submission_is_accepted_or_found() -> None:
    world = World()
    for wanted in (2, 0, 4, 1):
        for client, each in enumerate(IDS):
            world.submitting.append(world.placed(Submitting(each, client % NUM_CLIENTS)))
        world.act("wanted", wanted)
        world.act("ready", 0)
        for number in range(MOST):
            world.act("look", number)
            world.act("learn", 4 * number)
        for _ in range(4 * len(IDS)):
            world.act("go on", 0)
        assert not world.submitting and world.num_accepted == len(IDS)


def test_an_id_whose_request_was_found_under_a_former_number_is_new_in_its_present_shard_alone() -> None:
    """Between the look and the submission the record may expire, and another client finds it nowhere."""
    plan = ShardPlan.first(1).with_wanted(2).with_ready()
    rules = [ShardRule(shard, Leader(plan), 0.0) for shard in range(2)]
    assert {shard_of_id(each, 2) for each in IDS} == {0, 1}
    for request_id in IDS:
        own = shard_of_id(request_id, 2)
        rules[own].check_new(request_id, plan.version)
        with pytest.raises(ShardsChangedError):
            rules[1 - own].check_new(request_id, plan.version)


def test_a_removed_shard_takes_no_new_requests_also_of_clients_that_know_no_numbers() -> None:
    plan = ShardPlan.first(3).with_wanted(2)
    for shard in range(2):
        ShardRule(shard, Leader(plan), 0.0).check_new("ours", 0)
    with pytest.raises(ShardsChangedError, match="shard 2 takes no new requests; 2 of") as caught:
        ShardRule(2, Leader(plan), 0.0).check_new("ours", 0)
    assert caught.value.version == plan.version


@given(
    st.lists(st.tuples(st.sets(st.sampled_from(IDS)), st.integers(0, 40)), min_size=1, max_size=20),
    st.integers(1, 30),
)
def test_a_version_is_settled_when_what_was_there_has_ended_and_its_records_are_gone(
    looks: list[tuple[set[str], int]], ttl_s: int
) -> None:
    """`looks`: which requests live, and how many seconds later the next look is."""
    plan = ShardPlan.first(1).with_wanted(2).with_ready()
    settling, now_s = Settling(ttl_s), 0.0
    left, ended_s = set(looks[0][0]), None
    for present, later_s in looks:
        settling.update(plan, lambda: set(present), now_s)  # noqa: B023 - it is called at once
        left &= present
        ended_s = now_s if not left and ended_s is None else ended_s
        is_gone = ended_s is not None and now_s - ended_s >= ttl_s + 5
        assert settling.settled_version == (plan.version if is_gone else 0)
        now_s += later_s


def test_nothing_is_looked_at_while_the_number_never_changed() -> None:
    def refuse() -> set[str]:
        raise AssertionError("it costs time")

    settling = Settling(1.0)
    settling.update(ShardPlan.first(3), refuse, 0.0)
    assert settling.settled_version == 0
