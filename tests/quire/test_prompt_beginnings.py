"""Beginnings of prompts: equal exactly where prompts begin alike, for clients and schedulers, in a bounded number."""

from collections.abc import Sequence
from hashlib import blake2b
from itertools import takewhile

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.params import Chat
from quire.prompt_beginnings import (
    LENGTHS,
    PIECE_BYTES,
    Prompt,
    beginnings_of,
    num_bytes_of,
    pack_hashes,
    unpack_hashes,
)
from quire.v1 import inference_pb2 as pb
from quire.wire_chat import chat_to_pb


def num_common_bytes(first: Prompt, second: Prompt) -> int:
    """Bytes of the longest beginning that two prompts have in common."""
    pairs = zip(beginnings_of(first, None, None), beginnings_of(second, None, None), strict=False)
    return max((one.num_bytes for one, _ in takewhile(lambda pair: pair[0] == pair[1], pairs)), default=0)


@pytest.mark.long
@given(st.integers(0, 70_000), st.text(max_size=5), st.text(max_size=5))
def test_texts_share_the_beginnings_within_their_common_part(num_common: int, first: str, second: str) -> None:
    common = "c" * num_common
    found = num_common_bytes(common + "1" + first, common + "2" + second)
    assert found == max((length for length in LENGTHS if length <= num_common), default=0)
    if PIECE_BYTES <= num_common <= LENGTHS[-1]:
        assert found > num_common * 8 / 9 - PIECE_BYTES  # at most a ninth is lost, or less than a piece


@given(st.integers(0, 20_000), st.integers(1, 400))
def test_token_ids_share_the_beginnings_within_their_common_part(num_common: int, num_more: int) -> None:
    common = [7] * num_common
    found = num_common_bytes(common + [8] * num_more, common + [9] * num_more)
    assert found == max((length for length in LENGTHS if length <= 4 * num_common), default=0)


def test_a_conversation_begins_like_its_earlier_turns() -> None:
    turns = [{"role": "user", "content": "What is a page table? " * 200}]
    before = chat_to_pb(Chat(messages=turns))
    turns += [{"role": "assistant", "content": "A map."}, {"role": "user", "content": "Of what?"}]
    assert num_common_bytes(before, chat_to_pb(Chat(messages=turns))) > 3 * 1024


@pytest.mark.parametrize(
    "prompt",
    [
        "A story about a horse. " * 400,
        "Grüße, 日本語の文章。" * 300,
        list(range(5000)),
        chat_to_pb(Chat(messages=[{"role": "user", "content": "Wer da? " * 400}])),
    ],
)
def test_a_scheduler_makes_the_same_of_what_it_receives(prompt: Prompt) -> None:
    """Text, ids and chats go through the wire's form and back."""
    request = pb.GenerateRequest()
    if isinstance(prompt, str):
        request.text = prompt
    elif isinstance(prompt, pb.ChatPrompt):
        request.chat.CopyFrom(prompt)
    else:
        request.token_ids.ids.extend(prompt)
    received = pb.GenerateRequest.FromString(request.SerializeToString())
    there: Sequence[Prompt] = [received.text, received.chat, received.token_ids.ids]
    own = beginnings_of(prompt, "salt", "tenant")
    assert own and own in [beginnings_of(each, received.cache_salt or "salt", "tenant") for each in there]
    assert num_bytes_of(prompt) in [num_bytes_of(each) for each in there]


@given(st.tuples(*[st.text(max_size=3) for _ in range(4)]))
def test_other_tenants_and_salts_share_nothing(names: tuple[str, str, str, str]) -> None:
    tenant, salt, other_tenant, other_salt = (each.replace("\0", "") for each in names)
    mine = beginnings_of("x" * 600, salt, tenant)
    others = beginnings_of("x" * 600, other_salt, other_tenant)
    assert (mine == others) == ((salt, tenant) == (other_salt, other_tenant))
    assert beginnings_of("x" * 600, "", "") == beginnings_of("x" * 600, None, None)


@pytest.mark.parametrize("prompt", ["", "short", [], [1, 2], pb.ChatPrompt(), ["no", "tokens"] * 99, [2**70] * 99])
def test_what_is_short_or_no_prompt_has_none(prompt: object) -> None:
    assert beginnings_of(prompt, None, None) == []  # type: ignore[arg-type]


@pytest.mark.parametrize("prompt", ["x" * 10_000_000, "日" * 1_000_000, [3] * 1_000_000])
def test_a_long_prompt_has_as_many_as_there_are_lengths(prompt: Prompt) -> None:
    assert [each.num_bytes for each in beginnings_of(prompt, None, None)] == LENGTHS
    assert sorted(set(LENGTHS)) == LENGTHS and len(LENGTHS) == 48


def test_the_hash_is_the_one_that_the_wire_describes() -> None:
    (only,) = beginnings_of("a" * 300, "salt", "me")
    digest = blake2b(b"me\0salt\0" + b"a" * 256, digest_size=8).digest()
    assert only.short_hash == int.from_bytes(digest[:4], "little")


@given(st.sets(st.integers(0, 2**32 - 1), max_size=50))
def test_hashes_travel_packed(hashes: set[int]) -> None:
    packed = pack_hashes(hashes)
    assert len(packed) == 4 * len(hashes) and unpack_hashes(packed) == hashes
    assert not unpack_hashes(packed + b"x")
