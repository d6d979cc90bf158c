"""Memory of prompts by their beginnings: the longest one counts, of what was sent and of what shards have cached."""

import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.params import Chat
from quire.prefix_memory import PrefixMemory
from quire.prompt_beginnings import LENGTHS, Beginning, Prompt, beginnings_of, num_bytes_of
from quire.shards import Shard, load_of_request
from quire.wire_chat import chat_to_pb
from tests.quire.new_requests import shard_of_new_request

PROMPTS: dict[str, tuple[Prompt, Prompt]] = {
    "text": ("A long story about a horse, told at night. " * 40, "Another one, about a cart. " * 40),
    "tokens": (list(range(3, 600)), [7] * 400),
    "chat": (
        chat_to_pb(Chat(messages=[{"role": "system", "content": "Be brief. " * 60}])),
        chat_to_pb(Chat(messages=[{"role": "system", "content": "Be verbose. " * 60}])),
    ),
}
CHAINS = st.lists(st.sampled_from("abc"), max_size=12)  # each stands for a piece of a prompt


def chain(pieces: list[str]) -> list[Beginning]:
    return beginnings_of("".join(256 * piece for piece in pieces), None, None)


def short(beginnings: list[Beginning]) -> frozenset[int]:
    return frozenset(each.short_hash for each in beginnings)


@pytest.mark.parametrize("kind", PROMPTS)
@pytest.mark.parametrize("is_cached", [False, True])
def test_a_prompt_is_known_where_it_went_or_is_and_another_is_not(kind: str, is_cached: bool) -> None:
    first, second = PROMPTS[kind]
    own = beginnings_of(first, None, None)
    memory = PrefixMemory()
    if is_cached:
        memory.record_cached(2, short(own))
    else:
        memory.record_sent(own, 2)
    assert memory.find(own) == {2: own[-1].num_bytes}
    assert memory.find(beginnings_of(second, None, None)) == {}
    assert memory.find(beginnings_of(first, "salt", None)) == {}


@given(
    st.lists(st.tuples(st.integers(0, 4), CHAINS), max_size=6),
    st.lists(st.tuples(st.integers(0, 4), st.lists(CHAINS, max_size=3)), max_size=6),
    CHAINS,
)
def test_the_longest_known_beginning_of_each_shard_is_found(
    sent: list[tuple[int, list[str]]], said: list[tuple[int, list[list[str]]]], asked: list[str]
) -> None:
    """Against a search in everything that was said; of sent ones the last shard counts, of summaries the last one."""
    memory = PrefixMemory()
    got: dict[int, int] = {}
    for shard, pieces in sent:
        memory.record_sent(chain(pieces), shard)
        got.update(dict.fromkeys((each.hash for each in chain(pieces)), shard))
    has: dict[int, frozenset[int]] = {}
    for shard, prompts in said:
        has[shard] = frozenset().union(*(short(chain(pieces)) for pieces in prompts))
        memory.record_cached(shard, has[shard])
    wanted: dict[int, int] = {}
    for each in chain(asked):
        if each.hash in got:
            wanted[got[each.hash]] = each.num_bytes
        wanted.update({shard: each.num_bytes for shard, hashes in has.items() if each.short_hash in hashes})
    assert memory.find(chain(asked)) == wanted


def test_what_a_shard_has_no_more_is_forgotten() -> None:
    memory = PrefixMemory()
    own = chain(["a"] * 5)
    memory.record_cached(0, short(own))
    memory.record_cached(1, short(own[:2]))
    memory.record_cached(0, frozenset())
    assert memory.find(own) == {1: 512}
    memory.record_cached(1, frozenset())
    assert memory.find(own) == {} and not memory._cached_in


def test_old_prompts_are_forgotten_from_their_ends() -> None:
    memory = PrefixMemory()
    for number in range(1500):
        memory.record_sent(beginnings_of(f"{number:08d}" * 8192, None, None), 0)
    assert len(memory._sent) == 1 << 16
    assert memory.find(beginnings_of("00000000" * 32, None, None)) == {}
    assert memory.find(beginnings_of("00001499" * 8192, None, None)) == {0: LENGTHS[-1]}
    known = [len(memory.find(beginnings_of(f"{number:08d}" * 32, None, None))) for number in range(1500)]
    assert known == sorted(known)


def one_each(num_running: int, num_uncomputed_tokens: int = 0) -> list[Shard]:
    first = Shard(number=0, leader="x", num_workers=1, num_running=3)
    return [first, replace(first, number=1, num_running=num_running, num_uncomputed_tokens=num_uncomputed_tokens)]


def test_a_known_prefix_wins_until_its_shard_is_much_busier() -> None:
    chosen = [shard_of_new_request(one_each(number), [0, 0], {1: 256}) for number in (0, 9, 10, 11, 200)]
    assert chosen == [1, 1, 1, 0, 0]


def test_a_long_prefix_is_waited_for_longer_and_a_shorter_one_beside_it_counts_less() -> None:
    """2,048 bytes are as much work as a request: 20 more may be before a prefix of 40,960."""
    long = 20 * 2048
    assert [shard_of_new_request(one_each(n), [0, 0], {1: long}) for n in (10, 30, 31)] == [1, 1, 0]
    assert [shard_of_new_request(one_each(n), [0, 0], {0: long // 2, 1: long}) for n in (20, 21)] == [1, 0]


def test_tokens_that_are_yet_to_be_computed_are_load() -> None:
    assert shard_of_new_request(one_each(2), [0, 0]) == 1
    assert shard_of_new_request(one_each(2, num_uncomputed_tokens=1024), [0, 0]) == 0
    assert load_of_request(2048) == 2 and load_of_request(4096, 4096) == 1


@given(
    st.lists(st.tuples(st.integers(0, 9), st.integers(0, 4096), st.integers(0, 65_536)), min_size=1, max_size=5),
    st.data(),
)
def test_a_wrong_guess_costs_a_bounded_wait(loads: list[tuple[int, int, int]], data: st.DataObject) -> None:
    """The one chosen, by whatever is said to be known, has at most twice the least load, 4 more, and what it saves."""
    shards = [
        Shard(number=number, leader="x", num_workers=1, num_running=running, num_uncomputed_tokens=tokens)
        for number, (running, tokens, _) in enumerate(loads)
    ]
    known = data.draw(st.dictionaries(st.integers(0, 6), st.integers(256, 65_536), max_size=4))
    chosen = shard_of_new_request(shards, [0] * len(shards), known)
    load = [each.num_running + each.num_uncomputed_tokens / 512 for each in shards]
    assert load[chosen] <= 2 * min(load) + 4 + known.get(chosen, 0) / 2048
    if chosen not in known:
        assert load[chosen] == min(load)


def hits_of(num_clients: int, *, are_told: bool) -> tuple[int, int]:
    """Hits of 50 prefixes over four shards, and those of one endless cache, under a load that comes and goes.

    The requests come from so many clients, which are told what is cached after every 40 requests, or never.
    """
    rng = random.Random(7)
    prompts = [f"Prefix {number}: " + rng.choice("abcdefgh") * 2048 for number in range(50)]
    clients = [PrefixMemory() for _ in range(num_clients)]
    shards = [Shard(number=number, leader="x", num_workers=1) for number in range(4)]
    seen: set[str] = set()
    computed: list[set[str]] = [set() for _ in shards]
    live: list[int] = []  # the shards of the requests that run
    hits = endless_hits = 0
    for number in range(1000):
        prompt, memory = rng.choice(prompts), rng.choice(clients)
        running = [replace(shard, num_running=live.count(shard.number)) for shard in shards]
        whole = prompt + f" question {rng.random()}"
        beginnings = beginnings_of(whole, None, None)
        chosen = shard_of_new_request(running, [0] * 4, memory.find(beginnings))
        memory.record_sent(beginnings, chosen)
        hits += prompt in computed[chosen]
        endless_hits += prompt in seen
        computed[chosen].add(prompt)
        seen.add(prompt)
        live.append(chosen)
        if len(live) > 60:
            live.pop(rng.randrange(len(live)))
        if are_told and number % 40 == 0:
            for shard, found in enumerate(computed):
                hashes = frozenset().union(*(short(beginnings_of(each, None, None)) for each in found))
                for client in clients:
                    client.record_cached(shard, hashes)
    assert num_bytes_of(whole) > 2048
    return hits, endless_hits


@pytest.mark.parametrize("num_clients", [1, 8])
def test_nearly_all_prefixes_are_found_again_where_they_were_computed(num_clients: int) -> None:
    hits, endless_hits = hits_of(num_clients, are_told=True)
    assert hits >= 0.95 * endless_hits


def test_several_clients_that_are_not_told_compute_prefixes_again() -> None:
    hits, endless_hits = hits_of(8, are_told=False)
    assert hits < 0.95 * endless_hits
