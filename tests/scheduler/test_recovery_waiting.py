"""Requests of an earlier scheduler before their model is known, and the moments at which a death is awkward."""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress

import grpc
import pytest

from quire.errors import FailedPreconditionError
from quire.v1 import inference_pb2 as pb
from quire.v1 import journal_pb2
from scheduler_svc.journal.memory_store import MemoryStore
from scheduler_svc.journal.store import EntryId, JournalDamagedError, Record, RecordLimits
from tests.patience import patient
from tests.scheduler.gated_store import GatedStore
from tests.scheduler.journal_setup import entries_of, until
from tests.scheduler.mortal_sites import Client, Lives, lives_on, speaking_worker
from tests.scheduler.raw_session import RawSession
from tests.scheduler.refusals import code_of, refusal_of
from tests.scheduler.sample_outputs import assert_recorded, record_of, sampled
from tests.scheduler.scripted_worker import ScriptedWorker
from tests.scheduler.serving_site import Site, counting, tokens_in


class ForgetfulStore(MemoryStore):
    """Takes no records while `forgets`."""

    def __init__(self) -> None:
        super().__init__()
        self.forgets = False

    async def put_records(self, records: Sequence[Record], limits: RecordLimits) -> int:
        if self.forgets:
            await asyncio.Event().wait()
        return await super().put_records(records, limits)


@pytest.fixture
async def lives() -> AsyncIterator[Lives]:
    async with lives_on(ForgetfulStore(), model_patience_s=0.3) as made:
        yield made


async def begun(lives: Lives, request: pb.GenerateRequest, num_steps: int = 4) -> tuple[Client, Site]:
    """Start a request that has run this many steps when its scheduler dies, and a new scheduler without workers."""
    await lives.begin()
    await lives.add_workers()
    client = Client(request)
    lives.workers[0].silence_after(num_steps)
    await client.come(lives.site)
    await until(lambda: bool(client.seen.samples) and len(client.seen.samples[0].token_ids) == num_steps)
    await lives.die()
    lives.workers[0].speak_again()
    return client, await lives.begin()


def lasting(request_id: str, max_tokens: int = 40) -> pb.GenerateRequest:
    return counting(10, max_tokens, request_id, on_disconnect=pb.ON_DISCONNECT_CONTINUE)


def _is_let_in(site: Site, worker: ScriptedWorker) -> bool:
    with suppress(FailedPreconditionError):
        site.workers.register(worker.registration())
        return True
    return False


async def test_a_request_without_its_model_waits_and_shows_no_output_until_it_has_text(lives: Lives) -> None:
    client, site = await begun(lives, lasting("early"))
    shown = await record_of(site, "early")
    assert (shown.state, list(shown.samples), shown.usage.prompt_tokens) == (pb.REQUEST_STATE_WAITING, [], 1)
    attaching = asyncio.create_task(client.come(site))
    assert await record_of(site, "early") == shown
    assert not attaching.done()
    await lives.add_workers()
    await attaching
    await until(lambda: client.is_done)
    assert client.seen.token_ids == [list(range(11, 51))]
    assert_recorded(await record_of(site, "early"), client.seen)
    await site.idle()


async def test_the_same_submission_attaches_and_another_body_is_refused_before_and_after_the_model_is_known(
    lives: Lives,
) -> None:
    _, site = await begun(lives, lasting("same"))
    attaching = asyncio.create_task(site.run(lasting("same")))
    error = await refusal_of(site.run(lasting("same", max_tokens=41)))
    assert error.code() is grpc.StatusCode.ALREADY_EXISTS
    await lives.add_workers()
    messages = await attaching
    assert messages[0].accepted.attached and tokens_in(messages) == list(range(11, 51))
    error = await refusal_of(site.run(lasting("same", max_tokens=41)))
    assert error.code() is grpc.StatusCode.ALREADY_EXISTS
    await site.idle()


async def after_another_death(lives: Lives) -> Site:
    """The next scheduler, once its workers have brought the model that requests waited for."""
    await lives.die()
    site = await lives.begin()
    await lives.add_workers()
    await until(lambda: not site.recovery.num_waiting)
    return site


async def with_cancelled_attachment(site: Site) -> RawSession:
    """A session that has attached to a request that waits, and cancelled it."""
    session = RawSession(site)
    await session.say(1, attach=pb.Attach(request_id="unwanted"))
    await session.say(1, cancel=pb.Cancellation())
    await session.say(2)
    await session.read_until("error", 2)  # all before it was read
    return session


async def test_a_cancellation_counts_at_once_and_survives_another_death(lives: Lives) -> None:
    _, site = await begun(lives, lasting("unwanted"))
    answer = await site.inference.Cancel(pb.CancelRequest(request_id="unwanted"))
    assert answer.state == pb.REQUEST_STATE_CANCELLED
    await until(lambda: not site.journal.stats.pending)
    assert (await record_of(site, "unwanted")).state == pb.REQUEST_STATE_RUNNING  # its text is yet to be made
    site = await after_another_death(lives)
    record = await record_of(site, "unwanted")
    assert record.state == pb.REQUEST_STATE_CANCELLED
    assert list(record.samples[0].token_ids) == [11, 12, 13, 14] and record.samples[0].text
    await site.idle()


async def test_a_cancellation_in_a_session_counts_at_once_too_though_the_output_cannot_be_shown_yet(
    lives: Lives,
) -> None:
    """Regression: it waited for the model with the attachment, and was lost with the scheduler."""
    _, site = await begun(lives, lasting("unwanted"))
    session = await with_cancelled_attachment(site)
    await until(lambda: not site.journal.stats.pending)
    await session.close()
    site = await after_another_death(lives)
    record = await record_of(site, "unwanted")
    assert record.state == pb.REQUEST_STATE_CANCELLED
    assert list(record.samples[0].token_ids) == [11, 12, 13, 14]
    await site.idle()


async def test_who_has_cancelled_an_attachment_that_waits_is_told_of_the_end_once_there_is_text(lives: Lives) -> None:
    _, site = await begun(lives, lasting("unwanted"))
    session = await with_cancelled_attachment(site)
    await lives.add_workers()
    event = await session.read_until("finished", 1)
    assert event.finished.state == pb.REQUEST_STATE_CANCELLED and session.tokens(1) == [11, 12, 13, 14]
    await session.close()
    await site.idle()


async def test_a_deadline_passes_while_nobody_serves(lives: Lives) -> None:
    request = lasting("late")
    request.timeout_ms = round(1000 * patient(1.5))  # it has output first
    _, site = await begun(lives, request)
    await until(lambda: bool(site.journal.stats.entries > 2))
    await lives.add_workers()
    await until(lambda: not site.recovery.num_waiting)
    record = await record_of(site, "late")
    assert record.state == pb.REQUEST_STATE_EXPIRED
    assert list(record.samples[0].token_ids) == [11, 12, 13, 14]
    await site.idle()


@pytest.mark.parametrize("hours", [0, -5, 5])
async def test_a_request_that_ended_without_its_record_gets_it_whatever_the_clocks_of_the_leaders(
    lives: Lives, monkeypatch: pytest.MonkeyPatch, hours: int
) -> None:
    store = lives.store
    assert isinstance(store, ForgetfulStore)
    store.forgets = True
    site = await lives.begin()
    await lives.add_workers()
    client = Client(sampled(10, 9, 2, "ended", best_of=4))
    await client.come(site)
    await until(lambda: client.is_done)
    await lives.die()
    store.forgets = False
    now_ns = time.time_ns
    monkeypatch.setattr(time, "time_ns", lambda: now_ns() + hours * 3_600_000_000_000)
    site = await lives.begin()
    assert site.recovery.num_waiting == 1
    await lives.add_workers()
    await until(lambda: not site.recovery.num_waiting)
    record = await record_of(site, "ended")
    assert [list(sample.token_ids) for sample in record.samples] == client.seen.token_ids
    assert [sample.finish for sample in record.samples] == [sample.finish for sample in client.seen.samples]
    assert [sample.text for sample in record.samples] == [sample.text for sample in client.seen.samples]
    await until(lambda: not site.records.num_pending)
    assert await store.known_records(["ended"]) == {"ended"}
    await site.idle()


async def test_a_worker_of_another_model_is_kept_away_for_a_while_and_then_what_waits_for_the_other_fails(
    lives: Lives,
) -> None:
    client, site = await begun(lives, lasting("orphan"))
    other = speaking_worker("other")
    other.description.model.fingerprint = "other-1"
    await other.start()
    site.on_close(other.stop)
    with pytest.raises(FailedPreconditionError, match="another model than the 1 requests"):
        site.workers.register(other.registration())
    attaching = asyncio.create_task(client.come(site))
    await until(lambda: _is_let_in(site, other))
    await site.register(other)
    await attaching
    assert client.seen.end.state == pb.REQUEST_STATE_FAILED
    assert "not served any more" in client.seen.end.error
    assert client.seen.token_ids == [[11, 12, 13, 14]]
    await site.idle()


async def test_a_submission_that_was_told_to_come_back_leaves_its_id_to_the_one_that_came() -> None:
    """Both are durable when the scheduler dies; the first was never started."""
    store = GatedStore()
    async with lives_on(store, admission_timeout_s=0.1) as lives:
        site = await lives.begin()
        await lives.add_workers()
        store.may_append.clear()
        first, second = lasting("twice", 8), lasting("twice", 9)
        assert await code_of(site.run(first)) is grpc.StatusCode.UNAVAILABLE
        assert await code_of(site.run(second)) is grpc.StatusCode.UNAVAILABLE
        pending = [entry.encode() for entry in [site.journal._in_flight, *site.journal._pending] if entry]
        await lives.die()
        store.may_append.set()
        for seq, payload in enumerate(pending, start=2):
            await store.append(EntryId(site.journal.stats.epoch, seq), payload)
        site = await lives.begin()
        assert site.recovery.num_waiting == 1
        messages = asyncio.create_task(site.run(second))
        await lives.add_workers()
        assert tokens_in(await messages) == list(range(11, 20))
        await site.idle()
        finishes = [finish for _, entry in await entries_of(store) for finish in entry.finishes]
        assert {(each.sequence, each.withdrawn) for each in finishes} == {(1, True), (2, False)}


async def test_numbers_go_on_from_the_highest_and_trimming_keeps_what_was_recovered(lives: Lives) -> None:
    _, site = await begun(lives, sampled(10, 30, 3, "wide"))
    assert site.engine.number_sequences(1) == 4
    stats = site.journal.stats
    assert stats.num_needed == 1 and stats.oldest_needed is not None
    await lives.store.trim(stats.oldest_needed)
    admissions = [each for _, entry in await entries_of(lives.store) for each in entry.admissions]
    assert [each.request.request_id for each in admissions] == ["wide"]
    assert admissions[0].model_fingerprint == "counting-1"
    await lives.add_workers()
    await until(lambda: not site.engine.live and not site.recovery.num_waiting)
    await until(lambda: not site.records.num_pending)
    assert not site.journal.stats.num_needed


async def test_a_rebuilt_request_shows_at_once_what_had_been_delivered(lives: Lives) -> None:
    client, site = await begun(lives, lasting("rebuilt"))
    lives.workers[0].may_answer.clear()
    await lives.add_workers()
    await until(lambda: "rebuilt" in site.engine.live)
    (sample,) = (await record_of(site, "rebuilt")).samples
    assert (list(sample.token_ids), sample.text) == (client.seen.token_ids[0], client.seen.samples[0].text)
    lives.workers[0].may_answer.set()
    await client.come(site)
    await until(lambda: client.is_done)
    await site.idle()


async def test_an_end_that_has_no_record_yet_is_restated(lives: Lives) -> None:
    assert isinstance(lives.store, ForgetfulStore)
    lives.store.forgets = True
    site = await lives.begin()
    await lives.add_workers()
    client = Client(lasting("ended", 5))
    lives.workers[0].silence_after(2)
    await client.come(site)
    await until(lambda: "ended" in site.engine.live)
    live = site.engine.live["ended"]
    lives.workers[0].speak_again()
    await until(lambda: client.is_done)
    entry = journal_pb2.JournalEntry()
    live.restate(entry)
    assert [(each.sequence, each.state) for each in entry.finishes] == [(live.number, pb.REQUEST_STATE_FINISHED)]
    await lives.die()


async def test_a_damaged_entry_keeps_the_scheduler_from_starting_and_says_what_to_do(lives: Lives) -> None:
    _, site = await begun(lives, lasting("whole"))
    epoch = site.journal.stats.epoch
    await lives.die()
    bad = journal_pb2.JournalEntry(delta_sequences=bytes(8), delta_tokens=bytes(8)).SerializeToString()
    await lives.store.append(EntryId(epoch, 9), bad)
    with pytest.raises(JournalDamagedError, match=rf"journal entry {epoch}-9 contradicts itself.*restore the store"):
        await lives.begin()
