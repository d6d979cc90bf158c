"""Pin of one prefix by itself: its blocks, what begins with it, its forms for the journal and for clients."""

import asyncio
from typing import Any

from quire.errors import UnavailableError
from quire.v1 import inference_pb2 as pb
from quire.v1 import journal_pb2
from scheduler_svc.core.block_hash import extend_block_hashes
from scheduler_svc.core.sequence import Sequence
from scheduler_svc.requests.live.new_request import prefix_hash_seed
from scheduler_svc.requests.prefixes.prefix_pin import PrefixPin, restored_pin

BLOCK = 4
TOKENS = list(range(100, 110))  # two full blocks and a half one


def pin_of(token_ids: list[int], block_size: int = BLOCK, **fields: Any) -> PrefixPin:
    prefix = PrefixPin(
        name="system", tenant="acme", cache_salt="pepper", token_ids=token_ids, fingerprint="m-1", **fields
    )
    if block_size:
        prefix.cut_into_blocks(block_size)
    return prefix


def sequence_of(token_ids: list[int], num_hashed: int, salt: str = "pepper") -> Sequence:
    """A sequence of the same tenant whose first blocks are hashed."""
    seed = prefix_hash_seed("acme", salt)
    sequence = Sequence(
        seq_id=1,
        token_ids=token_ids,
        num_prompt_tokens=len(token_ids),
        max_tokens=9,
        stop_token_ids=frozenset(),
        hash_seed=seed,
    )
    extend_block_hashes(sequence.block_hashes, seed, token_ids, BLOCK, num_hashed)
    return sequence


def test_only_full_blocks_of_a_prefix_are_kept() -> None:
    prefix = pin_of(TOKENS)
    assert (prefix.num_blocks, prefix.num_tokens) == (2, 8)
    prefix.cut_into_blocks(5)
    assert (prefix.num_blocks, prefix.num_tokens, prefix.block_size) == (2, 10, 5)
    prefix.cut_into_blocks(16)
    assert (prefix.num_blocks, prefix.num_tokens) == (0, 0)


def test_a_prefix_is_that_of_sequences_that_have_all_its_blocks() -> None:
    prefix = pin_of(TOKENS)
    assert prefix.is_prefix_of(sequence_of(TOKENS, 2))
    assert prefix.is_prefix_of(sequence_of([*TOKENS[:8], *range(8)], 4))
    assert not prefix.is_prefix_of(sequence_of(TOKENS, 1))  # the second block is not computed yet
    assert not prefix.is_prefix_of(sequence_of([*TOKENS[:7], 7, *TOKENS], 4))
    assert not prefix.is_prefix_of(sequence_of(TOKENS, 2, salt="salt"))
    assert pin_of(TOKENS[:4]).is_prefix_of(sequence_of(TOKENS, 2))
    unknown = pin_of(TOKENS, block_size=0)  # restored, and no worker of its model came yet
    assert not unknown.is_prefix_of(sequence_of(TOKENS, 2)) and not unknown.is_prefix_of(sequence_of(TOKENS, 0))


def test_a_prefix_is_computed_by_a_sequence_of_its_full_blocks_that_generates_nothing_more() -> None:
    prefix = pin_of(TOKENS)
    group = prefix.new_group(7)
    (sequence,) = group.sequences
    assert (sequence.token_ids, sequence.num_prompt_tokens, sequence.max_tokens) == (TOKENS[:8], 8, 1)
    assert (sequence.seq_id, group.arrival) == (7, 7)
    extend_block_hashes(sequence.block_hashes, sequence.hash_seed, sequence.token_ids, BLOCK, 2)
    assert prefix.is_prefix_of(sequence)


async def test_each_waiter_is_told_once() -> None:
    prefix = pin_of(TOKENS)
    loop = asyncio.get_running_loop()
    first, second = loop.create_future(), loop.create_future()
    first.set_result(None)
    prefix.waiters |= {first, second}
    prefix.resolve_waiters(error := UnavailableError("not now", 1.0))
    prefix.resolve_waiters(None)
    assert (first.result(), second.result()) == (None, error)


def test_clients_see_what_is_kept_and_where() -> None:
    prefix = pin_of(TOKENS, worker_ids={"w2", "w1", "w3"})
    assert prefix.to_pb() == pb.PinnedPrefix(
        name="system", tenant="acme", cache_salt="pepper", num_tokens=8, num_blocks=2, worker_ids=["w1", "w2", "w3"]
    )


def test_a_restated_pin_is_restored_with_all_its_tokens_and_without_a_worker() -> None:
    entry = journal_pb2.JournalEntry()
    prefix = pin_of(TOKENS, worker_ids={"w1"})
    prefix.restate(entry)
    (change,) = entry.pins
    restored = restored_pin(change)
    assert restored.to_change() == prefix.to_change() == change
    assert (restored.token_ids, restored.fingerprint, restored.worker_ids) == (TOKENS, "m-1", set())
    assert restored.is_kept and restored.durable.is_set() and not restored.block_size
    restored.cut_into_blocks(BLOCK)
    assert restored.block_hashes == prefix.block_hashes
