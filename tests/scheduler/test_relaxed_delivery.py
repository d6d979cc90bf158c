"""Relaxed delivery: tokens reach readers before the journal has them, ends do not; who is ahead gets nothing twice."""

import asyncio
import random

import pytest

from quire.v1 import inference_pb2 as pb
from tests.scheduler.gated_store import GatedStore
from tests.scheduler.journal_setup import until
from tests.scheduler.mortal_sites import Client, Lives, speaking_worker
from tests.scheduler.sample_outputs import assert_recorded, record_of, sampled
from tests.scheduler.scripted_beams import of_kind
from tests.scheduler.serving_site import counting


class MortalGate(GatedStore):
    """Gate at which writes are lost when their scheduler dies."""


@pytest.mark.parametrize("kind", [0, 1])
async def test_who_was_ahead_of_the_journal_sees_each_position_once_and_the_same_output(kind: int) -> None:
    store = MortalGate()
    lives = Lives(store, delivery="relaxed")
    lives.workers.append(speaking_worker(num_blocks=64))
    request = of_kind(kind, 10, 300, "r", random.Random(3))
    request.on_disconnect = pb.ON_DISCONNECT_CONTINUE
    client, undisturbed = Client(request), Client(of_kind(kind, 10, 300, "r2", random.Random(3)))
    undisturbed.request.sampling.CopyFrom(request.sampling)
    try:
        site = await lives.begin()
        await lives.add_workers()
        stats = await site.inference.GetStats(pb.GetStatsRequest())
        assert stats.journal.delivery == "relaxed"
        await client.come(site)
        await until(lambda: any(len(each.token_ids) > 3 for each in client.seen.samples) or client.is_done)
        store.may_append.clear()
        at_gate = sum(map(len, client.seen.token_ids))
        await until(lambda: sum(map(len, client.seen.token_ids)) > at_gate + 20)
        assert not client.is_done
        await lives.die()
        store.may_append.set()

        site = await lives.begin()
        ahead = sum(map(len, client.seen.token_ids))
        coming = asyncio.create_task(client.come(site))
        await until(lambda: site.recovery.num_waiting == 1)
        journaled = site.recovery.find("r")
        assert journaled is not None and sum(len(each.token_ids) for each in journaled.samples) < ahead
        await lives.add_workers()
        await coming
        await undisturbed.come(site)
        await until(lambda: client.is_done and undisturbed.is_done)
        assert client.seen.token_ids == undisturbed.seen.token_ids
        assert [each.text for each in client.seen.samples] == [each.text for each in undisturbed.seen.samples]
        assert_recorded(await record_of(site, "r"), client.seen)
    finally:
        store.may_append.set()
        await lives.close()


async def test_an_end_waits_for_the_journal_and_so_does_an_admission() -> None:
    store = MortalGate()
    lives = Lives(store, delivery="relaxed", admission_timeout_s=60.0)
    lives.workers.append(speaking_worker(num_blocks=64))
    client = Client(sampled(10, 30, 2, "r"))
    try:
        site = await lives.begin()
        await lives.add_workers()
        await client.come(site)
        store.may_append.clear()
        await until(lambda: [len(each) for each in client.seen.token_ids] == [30, 30])
        await until(lambda: site.engine.live["r"].ended_state is not None)
        assert not client.is_done and all(each.finish is None for each in client.seen.samples)
        late = Client(counting(10, 3, "late"))
        num_pending = site.journal.stats.pending
        coming = asyncio.create_task(late.come(site))
        await until(lambda: site.journal.stats.pending > num_pending)  # its admission waits there
        assert not late.is_accepted and not client.is_done
        store.may_append.set()
        await coming
        assert late.is_accepted
        await until(lambda: client.is_done and late.is_done)
    finally:
        store.may_append.set()
        await lives.close()


async def test_who_is_ahead_of_an_output_that_ended_shorter_is_told_of_the_end() -> None:
    store = MortalGate()
    lives = Lives(store, delivery="relaxed")
    lives.workers.append(speaking_worker(num_blocks=64))
    client = Client(counting(10, 300, "r", on_disconnect=pb.ON_DISCONNECT_CONTINUE))
    try:
        site = await lives.begin()
        await lives.add_workers()
        await client.come(site)
        store.may_append.clear()
        await until(lambda: bool(client.seen.samples) and len(client.seen.token_ids[0]) > 50)
        await lives.die()
        store.may_append.set()
        site = await lives.begin()
        assert await site.control.cancel("r") == pb.REQUEST_STATE_CANCELLED
        seen = list(client.seen.token_ids[0])
        coming = asyncio.create_task(client.come(site))
        await lives.add_workers()
        await coming
        assert client.is_done and client.seen.end.state == pb.REQUEST_STATE_CANCELLED
        assert client.seen.token_ids == [seen]
    finally:
        store.may_append.set()
        await lives.close()
