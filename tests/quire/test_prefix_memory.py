"""Memory of prompts by their beginnings: the longest one counts, of text, tokens and chats alike."""

import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.params import Chat
from quire.prefix_memory import PrefixMemory, pieces_of
from quire.shards import Shard, shard_of_new_request
from quire.v1 import inference_pb2 as pb
from quire.wire_chat import chat_to_pb

Prompt = str | list[int] | pb.ChatPrompt
PROMPTS: dict[str, tuple[Prompt, Prompt]] = {
    "text": ("A long story about a horse, told at night. " * 40, "Another one, about a cart. " * 40),
    "tokens": (list(range(3, 600)), [7] * 400),
    "chat": (
        chat_to_pb(Chat(messages=[{"role": "system", "content": "Be brief. " * 60}])),
        chat_to_pb(Chat(messages=[{"role": "system", "content": "Be verbose. " * 60}])),
    ),
}


@pytest.mark.parametrize("kind", PROMPTS)
def test_a_prompt_is_known_where_it_went_and_another_is_not(kind: str) -> None:
    first, second = PROMPTS[kind]
    memory = PrefixMemory()
    memory.record(pieces_of(first, None), 2)
    assert memory.find(pieces_of(first, None)) == 2
    assert memory.find(pieces_of(second, None)) is None
    assert memory.find(pieces_of(first, "salt")) is None


def test_a_conversation_goes_on_where_it_began() -> None:
    turns = [{"role": "user", "content": "What is a page table? " * 20}]
    memory = PrefixMemory()
    memory.record(pieces_of(chat_to_pb(Chat(messages=turns)), None), 1)
    turns += [{"role": "assistant", "content": "A map."}, {"role": "user", "content": "Of what?"}]
    assert memory.find(pieces_of(chat_to_pb(Chat(messages=turns)), None)) == 1


@given(st.integers(1, 12), st.integers(0, 12))
def test_the_longest_beginning_counts(num_common: int, num_more: int) -> None:
    """Third prompts go where the longer common part of two earlier ones went."""
    common, more = "c" * 256 * num_common, "m" * 256 * num_more
    memory = PrefixMemory()
    memory.record(pieces_of(common + more, None), 1)
    memory.record(pieces_of(common, None), 3)
    assert memory.find(pieces_of(common + more + "x" * 300, None)) == (1 if num_more else 3)


@pytest.mark.parametrize("prompt", ["", "short", [], [1, 2], pb.ChatPrompt(), ["no", "tokens"], [2**70]])
def test_what_has_no_whole_piece_goes_anywhere(prompt: object) -> None:
    assert pieces_of(prompt, None) == []  # type: ignore[arg-type]


def test_a_long_prompt_is_known_by_its_beginning() -> None:
    assert len(pieces_of("x" * 10_000_000, None)) == 512


def test_old_prompts_are_forgotten() -> None:
    memory = PrefixMemory()
    for number in range(300):
        memory.record(pieces_of(f"{number:08d}" * 32 * 512, None), 0)
    assert len(memory._shard_of) == 1 << 16
    assert memory.find(pieces_of("00000000" * 32, None)) is None
    assert memory.find(pieces_of("00000299" * 32, None)) == 0


def test_a_known_prefix_wins_until_its_shard_is_much_busier() -> None:
    def chosen(num_running: int) -> int:
        shards = [Shard(number=0, leader="x", num_workers=1, num_running=3)]
        shards.append(Shard(number=1, leader="y", num_workers=1, num_running=num_running))
        return shard_of_new_request(shards, [0, 0], 1)

    assert [chosen(number) for number in (0, 9, 10, 11, 200)] == [1, 1, 1, 0, 0]


def test_nearly_all_prefixes_are_found_again_where_they_were_computed() -> None:
    """Hits of 50 prefixes over four shards, against those of one endless cache, under a load that comes and goes."""
    rng = random.Random(7)
    prompts = [f"Prefix {number}: " + rng.choice("abcdefgh") * 2048 for number in range(50)]
    memory = PrefixMemory()
    shards = [Shard(number=number, leader="x", num_workers=1) for number in range(4)]
    seen: set[str] = set()
    computed: list[set[str]] = [set() for _ in shards]
    live: list[int] = []  # the shards of the requests that run
    hits = endless_hits = 0
    for _ in range(4000):
        prompt = rng.choice(prompts)
        running = [replace(shard, num_running=live.count(shard.number)) for shard in shards]
        pieces = pieces_of(prompt + f" question {rng.random()}", None)
        chosen = shard_of_new_request(running, [0] * 4, memory.find(pieces))
        memory.record(pieces, chosen)
        hits += prompt in computed[chosen]
        endless_hits += prompt in seen
        computed[chosen].add(prompt)
        seen.add(prompt)
        live.append(chosen)
        if len(live) > 60:
            live.pop(rng.randrange(len(live)))
    assert hits >= 0.95 * endless_hits
