"""A scheduler that dies between the end of a request and its record: the next one says of that end what was said."""

import asyncio
import random
import time
from collections.abc import Sequence

import pytest

from quire.v1 import inference_pb2 as pb
from quire.v1 import journal_pb2
from scheduler_svc.journal.memory_store import MemoryStore
from scheduler_svc.journal.store import Record, RecordLimits
from tests.scheduler.journal_setup import put_records, until
from tests.scheduler.mortal_sites import Client, Lives, lives_on, speaking_worker
from tests.scheduler.sample_outputs import assert_recorded, record_of
from tests.scheduler.scripted_beams import of_kind
from tests.scheduler.serving_site import counting


class RecordlessStore(MemoryStore):
    """Takes entries, and records only once it `may_record`."""

    def __init__(self) -> None:
        super().__init__()
        self.may_record = asyncio.Event()

    async def put_records(self, records: Sequence[Record], limits: RecordLimits) -> int:
        await self.may_record.wait()
        return await super().put_records(records, limits)


@pytest.mark.parametrize("kind", range(5))
async def test_an_end_that_was_seen_is_recorded_as_it_was_seen(kind: int) -> None:
    store = RecordlessStore()
    clients = [Client(of_kind(kind, 10 * i, 30, f"r{i}", random.Random(i))) for i in range(4)]
    async with lives_on(store, preempt_every=3) as lives:
        site = await lives.begin()
        await lives.add_workers()
        await asyncio.gather(*(client.come(site) for client in clients))
        await until(lambda: all(client.is_done for client in clients))
        assert site.records.num_pending == len(clients)
        assert any(client.seen.end.usage.num_preemptions for client in clients)
        assert all(client.seen.end.timings.first_token_ns for client in clients)
        await lives.die()
        store.may_record.set()
        site = await lives.begin()
        assert site.recovery.num_waiting == len(clients)
        await lives.add_workers()
        for client in clients:
            again = Client(client.request)
            again.is_accepted = True
            await again.come(site)
            assert again.seen.end == client.seen.end
            record = await record_of(site, client.request.request_id)
            assert_recorded(record, client.seen)
            assert (record.timings, record.memory) == (client.seen.end.timings, client.seen.end.memory)
        assert not site.engine.live


async def test_an_end_without_its_text_keeps_what_was_said_of_it() -> None:
    store = RecordlessStore()
    client = Client(of_kind(0, 10, 30, "r", random.Random(1)))
    async with lives_on(store, model_patience_s=0.0) as lives:
        site = await lives.begin()
        await lives.add_workers()
        await client.come(site)
        await until(lambda: client.is_done)
        await lives.die()
        store.may_record.set()
        lives.workers[0].description.model.fingerprint = "another"
        site = await lives.begin()
        journaled = site.recovery.find("r")
        await lives.add_workers()
        await until(lambda: not site.recovery.num_waiting)
        record = await record_of(site, "r")
        assert (record.state, record.usage) == (pb.REQUEST_STATE_FINISHED, client.seen.end.usage)
        assert (record.timings, record.memory) == (client.seen.end.timings, client.seen.end.memory)
        assert "its text is lost" in record.error
        assert journaled is not None and journaled.finish is not None
        assert not journaled.finish.error  # said again, the end is what it was


async def test_what_is_said_of_a_request_that_goes_on_is_of_its_first_run_or_nothing() -> None:
    """Two equal requests die together: the second finds all that the first computes again, output included."""
    lives = Lives(MemoryStore())
    worker = speaking_worker(num_blocks=64)
    lives.workers.append(worker)
    clients = [Client(of_kind(0, 10, 30, f"r{i}", random.Random(1))) for i in range(2)]
    try:
        site = await lives.begin()
        await lives.add_workers()
        worker.silence_after(20)
        for client in clients:
            await client.come(site)
        await until(lambda: all(client.seen.samples and len(client.seen.token_ids[0]) > 12 for client in clients))
        await lives.die()
        worker.speak_again()
        site = await lives.begin()
        await lives.add_workers()
        for client in clients:
            await client.come(site)
        await until(lambda: all(client.is_done for client in clients))
        for client in clients:
            assert (client.seen.end.usage.prompt_tokens, client.seen.end.usage.cached_tokens) == (1, 0)
            timings = client.seen.end.timings
            assert timings.finished_ns and not timings.first_token_ns
        await site.idle()
        seen = site.engine.distributions
        times = ("queue_s", "prefill_s", "decode_s", "inference_s", "mean_token_s", "first_token_s")
        assert [sum(getattr(seen, name).counts) for name in times] == [0] * 6
        assert (sum(seen.total_s.counts), seen.computed_prompt_tokens.sum) == (2, 2.0)
        assert site.engine.latency.summary(time.monotonic()).num_requests == 0
    finally:
        await lives.close()


@pytest.mark.parametrize("goes_on", [True, False])
async def test_what_is_computed_again_since_its_record_was_damaged_replaces_that(goes_on: bool) -> None:
    store = MemoryStore()
    lives = Lives(store)
    lives.workers.append(worker := speaking_worker())
    worker.silence_after(4)
    client = Client(counting(10, 30, "r", on_disconnect=pb.ON_DISCONNECT_CONTINUE))
    try:
        site = await lives.begin()
        await lives.add_workers()
        await client.come(site)
        await until(lambda: bool(client.seen.samples) and len(client.seen.token_ids[0]) == 4)
        await lives.die()
        await put_records(store, {"r": b"\xff not a record"})
        site = await lives.begin()
        if goes_on:
            worker.speak_again()
        else:
            await site.control.cancel("r")
        await lives.add_workers()
        await until(lambda: not (site.recovery.num_waiting or site.engine.live or site.records.num_pending))
        ended = pb.REQUEST_STATE_FINISHED if goes_on else pb.REQUEST_STATE_CANCELLED
        assert (await record_of(site, "r")).state == ended
        assert journal_pb2.RequestRecord.FromString(await store.get_record("r") or b"").response.state == ended
    finally:
        await lives.close()
