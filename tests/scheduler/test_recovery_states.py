"""Requests of an earlier scheduler while no worker is there: what is said of them, what ends them, and their way back.

The model comes to the recovery by itself, so nothing is computed here.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from structlog.testing import capture_logs

from common.arrays import pack_int32
from quire.errors import FailedPreconditionError
from quire.v1 import inference_pb2 as pb
from quire.v1 import journal_pb2
from scheduler_svc.journal.memory_store import MemoryStore
from scheduler_svc.journal.store import EntryId
from scheduler_svc.requests.recovery import recovery
from scheduler_svc.requests.recovery.journal_replay import BegunReplay, JournalReplay
from scheduler_svc.requests.recovery.rebuilding import rebuild_request
from scheduler_svc.requests.recovery.recovery import JournalContents
from tests.scheduler.gated_store import GatedStore
from tests.scheduler.journal_setup import entries_of, until
from tests.scheduler.sample_outputs import record_of
from tests.scheduler.serving_site import Site
from tests.scheduler.test_rebuilding import MODEL, asked

OTHER = replace(MODEL, fingerprint="other-1")
LEADER_START = journal_pb2.JournalEntry(leader_start=journal_pb2.LeaderStart())
LEADER_READY = journal_pb2.JournalEntry(leader_ready=journal_pb2.LeaderReady())
LONG_S = 1000.0


def admitted(
    number: int, request: pb.GenerateRequest | None = None, fingerprint: str = MODEL.fingerprint, **fields: Any
) -> journal_pb2.JournalEntry:
    """Admission of request r<number>."""
    entry = journal_pb2.JournalEntry()
    entry.admissions.add(
        sequence=number,
        request=request or asked(),
        prompt_token_ids=pack_int32([300, 301]),
        arrived_unix_ns=5,
        model_fingerprint=fingerprint,
        **fields,
    )
    entry.admissions[0].request.request_id = f"r{number}"
    return entry


def paused(number: int) -> journal_pb2.JournalEntry:
    return journal_pb2.JournalEntry(pauses=[journal_pb2.PauseChange(sequence=number, paused=True)])


def ended(number: int) -> journal_pb2.JournalEntry:
    finish = journal_pb2.Finish(sequence=number, state=pb.REQUEST_STATE_CANCELLED, finished_unix_ns=6)
    return journal_pb2.JournalEntry(finishes=[finish])


async def written(entries: Sequence[journal_pb2.JournalEntry], store: MemoryStore | None = None) -> MemoryStore:
    """A store with the journal of epoch 1."""
    store = store or MemoryStore()
    await store.raise_epoch(1)
    for seq, entry in enumerate(entries):
        await store.append(EntryId(1, seq), entry.SerializeToString(), create=True)
    return store


@asynccontextmanager
async def recovered(
    *entries: journal_pb2.JournalEntry,
    store: MemoryStore | None = None,
    patience_s: float = LONG_S,
    grace_s: float = LONG_S,
) -> AsyncIterator[Site]:
    """The scheduler that comes after these entries."""
    store = await written([LEADER_START, *entries], store)
    site = Site(store, epoch=2, model_patience_s=patience_s, grace_s=grace_s)
    try:
        await site.start()
        yield site
    finally:
        await site.close()


@pytest.mark.parametrize(
    ("entries", "contents"),
    [
        ([], JournalContents.EMPTY),
        ([LEADER_START], JournalContents.EMPTY),
        ([LEADER_START, LEADER_READY], JournalContents.SETTLED),
        ([LEADER_START, admitted(1)], JournalContents.SETTLED),
        ([LEADER_START, admitted(1), LEADER_START], JournalContents.UNSETTLED),
    ],
)
async def test_a_new_leader_is_told_whether_the_last_one_was_ready(
    entries: list[journal_pb2.JournalEntry], contents: JournalContents
) -> None:
    site = Site(await written(entries))
    await site.journal.open()
    assert await site.recovery.read(site.store) is contents
    await site.close()


@pytest.mark.parametrize("num_old", [0, 2])
async def test_an_operator_is_told_of_requests_of_an_older_version(num_old: int) -> None:
    site = Site(await written([LEADER_START, *(admitted(number, fingerprint="") for number in range(num_old))]))
    await site.journal.open()
    with capture_logs() as logs:
        await site.recovery.read(site.store)
    errors = [each for each in logs if each["log_level"] == "error"]
    assert [each["num_requests"] for each in errors] == ([num_old] if num_old else [])
    await site.close()


@pytest.mark.parametrize("kind", ["whole", "lost", "cut short"])
async def test_a_new_leader_restates_everything_if_the_journal_may_lack_what_was_followed(kind: str) -> None:
    replay = JournalReplay()
    replay.apply(EntryId(1, 1), admitted(1))
    if kind == "cut short":
        said_again = journal_pb2.JournalEntry(leader_start=journal_pb2.LeaderStart(says_all_again=True))
        replay.apply(EntryId(1, 2), said_again)
    site = Site(await written([LEADER_START]))
    await site.journal.open()
    await site.recovery.read(site.store, BegunReplay(replay, EntryId(1, 3), is_whole=kind != "lost"))
    site.writing = [asyncio.create_task(site.journal.run())]
    await until(lambda: site.journal.is_ready)
    restated = [each for _, entry in await entries_of(site.store) for each in entry.restatements]
    assert [each.admission.sequence for each in restated] == ([] if kind == "whole" else [1])
    await site.close()


async def test_a_waiting_request_is_shown_as_paused_waiting_or_on_its_way_to_its_end() -> None:
    request = asked()
    async with recovered(admitted(1, request), admitted(2), paused(2), admitted(3), paused(3), ended(3)) as site:
        shown = await record_of(site, "r1")
        assert (shown.state, shown.usage.prompt_tokens) == (pb.REQUEST_STATE_WAITING, 2)
        assert (shown.created_unix_ns, shown.seed, shown.tenant) == (5, request.sampling.seed, request.tenant)
        assert (await record_of(site, "r2")).state == pb.REQUEST_STATE_PAUSED
        assert (await record_of(site, "r3")).state == pb.REQUEST_STATE_RUNNING
        assert site.recovery.response("r4") is None and site.recovery.find("r4") is None
        assert (site.recovery.num_waiting, site.recovery.num_paused) == (3, 1)
        assert [(each.number, each.tenant, each.has_ended) for each in site.recovery.waiting] == [
            (1, "acme", False),
            (2, "acme", False),
            (3, "acme", True),
        ]
        await site.inference.Cancel(pb.CancelRequest(request_id="r2"))
        assert site.recovery.num_paused == 0


async def test_a_waiting_request_ends_once_and_its_end_is_written_once() -> None:
    async with recovered(admitted(1), admitted(2), ended(2)) as site:
        assert site.recovery.end("r1", pb.REQUEST_STATE_FAILED, "why") == pb.REQUEST_STATE_FAILED
        assert site.recovery.end("r1", pb.REQUEST_STATE_EXPIRED) == pb.REQUEST_STATE_FAILED
        assert await site.recovery.cancel("r1") == pb.REQUEST_STATE_FAILED
        assert site.recovery.end("r1", pb.REQUEST_STATE_EXPIRED) == pb.REQUEST_STATE_FAILED
        assert await site.recovery.cancel("r2") == pb.REQUEST_STATE_CANCELLED
        assert site.recovery.end("r3", pb.REQUEST_STATE_FAILED) is None
        assert await site.recovery.cancel("r3") is None
        finishes = [finish for _, entry in await entries_of(site.store) for finish in entry.finishes]
        assert [(each.sequence, each.state, each.error) for each in finishes[1:]] == [
            (1, pb.REQUEST_STATE_FAILED, "why")
        ]


async def test_a_pause_while_waiting_is_durable_and_lasts_when_the_model_comes() -> None:
    async with recovered(admitted(1), admitted(2), paused(2), admitted(3)) as site:
        assert await site.recovery.set_paused("r1", is_paused=True)
        assert await site.recovery.set_paused("r2", is_paused=False)
        assert not await site.recovery.set_paused("r4", is_paused=True)
        pauses = [each for _, entry in await entries_of(site.store) for each in entry.pauses]
        assert [(each.sequence, each.paused) for each in pauses[1:]] == [(1, True), (2, False)]
        site.recovery.end("r3", pb.REQUEST_STATE_CANCELLED)
        with pytest.raises(FailedPreconditionError, match=r"r3.* has ended"):
            await site.recovery.set_paused("r3", is_paused=True)
        site.recovery.model_known(MODEL)
        await until(lambda: not site.recovery.num_waiting)
        assert {each.request_id: each.group.is_paused for each in site.engine.live.values()} == {
            "r1": True,
            "r2": False,
        }


async def test_a_deadline_counts_while_nobody_serves_until_the_request_has_ended() -> None:
    now_ns = time.time_ns()
    later: dict[str, Any] = {"deadline_unix_ns": now_ns + int(LONG_S) * 1_000_000_000}
    async with recovered(
        admitted(1, deadline_unix_ns=now_ns - 1),
        admitted(2, **later),
        admitted(3, **later),
        admitted(4),
        admitted(5, **later),
        ended(5),
    ) as site:
        await until(lambda: site.recovery.end("r1", pb.REQUEST_STATE_FAILED) == pb.REQUEST_STATE_EXPIRED)
        _, second, third, fourth, fifth = site.recovery.waiting
        assert second.deadline is not None and third.deadline is not None
        left_s = second.deadline.when() - asyncio.get_running_loop().time()
        assert 0.5 * LONG_S < left_s <= LONG_S
        assert fourth.deadline is None and fifth.deadline is None
        site.recovery.end("r2", pb.REQUEST_STATE_CANCELLED)
        await until(lambda: not site.journal.stats.pending)
        site.recovery.model_known(replace(MODEL, fingerprint=MODEL.fingerprint))
        await until(lambda: not site.recovery.num_waiting)
        assert second.deadline.cancelled() and third.deadline.cancelled()


async def test_a_scheduler_that_ends_leaves_what_waits_to_the_next_one() -> None:
    deadline: dict[str, Any] = {"deadline_unix_ns": time.time_ns() + int(LONG_S) * 1_000_000_000}
    async with recovered(admitted(1, **deadline), admitted(2, fingerprint="other-1")) as site:
        first, _ = site.recovery.waiting
        site.recovery.model_known(replace(MODEL, fingerprint="third-1"))
        (rebuilding,) = [each for each in asyncio.all_tasks() if each.get_name() == "recovery"]
        await site.recovery.close()
        assert rebuilding.done()
        assert first.deadline is not None and first.deadline.cancelled()
        assert site.recovery.num_waiting == 2


async def test_a_first_worker_of_another_model_is_refused_as_long_as_requests_wait_for_theirs() -> None:
    async with recovered(admitted(1), admitted(2, fingerprint="second-1")) as site:
        with pytest.raises(
            FailedPreconditionError, match=r"'w' has another model than the 2 requests.* in (\d+) s"
        ) as it:
            site.recovery.check_model("w", "other-1")
        left_s = int(it.value.message.rsplit(" in ", 1)[1].split()[0])
        assert 0.5 * LONG_S < left_s <= LONG_S
        for fingerprint in (MODEL.fingerprint, "second-1"):
            site.recovery.check_model("w", fingerprint)
        assert site.recovery.is_rebuilding("second-1") and not site.recovery.is_rebuilding("other-1")
    async with recovered(admitted(1), patience_s=0.0) as site:
        site.recovery.check_model("w", "other-1")
    async with recovered() as site:
        site.recovery.check_model("w", "other-1")


async def test_requests_are_rebuilt_in_the_order_of_service_and_ended_ones_last(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rebuilt = []

    def noted(journaled: Any, model: Any) -> Any:
        rebuilt.append(journaled.request_id)
        return rebuild_request(journaled, model)

    monkeypatch.setattr(recovery, "rebuild_request", noted)
    low, high = asked(), asked()
    low.priority, high.priority = 2, -1
    entries = [admitted(1, high), ended(1), admitted(2, low), admitted(3), admitted(4, high), admitted(5)]
    async with recovered(*entries) as site:
        with capture_logs() as logs:
            site.recovery.model_known(MODEL)
            await until(lambda: not site.recovery.num_waiting)
        assert [each["num_requests"] for each in logs if each["event"] == "requests recovered"] == [5]
        assert rebuilt == ["r4", "r3", "r5", "r2", "r1"]
        assert list(site.engine.live) == ["r4", "r3", "r5", "r2"]
        assert site.recovery.num_recovered == 4
        site.recovery.model_known(MODEL)
        await site.recovery.settled("r4")  # at once
        await until(lambda: not site.records.num_pending)
        assert (await record_of(site, "r1")).state == pb.REQUEST_STATE_CANCELLED
        assert rebuilt == ["r4", "r3", "r5", "r2", "r1"]


async def test_requests_are_rebuilt_a_slice_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Others have their turn between the slices; a turn for each request takes longer than the rebuilding."""
    now_s = 0.0

    def monotonic() -> float:
        nonlocal now_s
        now_s += 1.0
        return now_s

    async with recovered(*(admitted(number) for number in range(1, 10))) as site:
        monkeypatch.setattr(recovery, "time", SimpleNamespace(monotonic=monotonic, time_ns=time.time_ns))
        monkeypatch.setattr(recovery, "SLICE_S", 2.5)
        site.recovery.model_known(MODEL)
        num_live = []
        while site.recovery.num_waiting:
            await asyncio.sleep(0)
            num_live.append(len(site.engine.live))
        assert sorted({*num_live}) == [3, 6, 9]


async def test_a_request_that_cannot_be_rebuilt_fails_and_the_others_go_on() -> None:
    bad = asked()
    bad.stopping.ClearField("max_tokens")
    async with recovered(admitted(1, bad), admitted(2)) as site:
        site.recovery.model_known(MODEL)
        await until(lambda: not site.recovery.num_waiting and not site.records.num_pending)
        record = await record_of(site, "r1")
        assert record.state == pb.REQUEST_STATE_FAILED
        assert "could not be read back from the journal" in record.error and "send it again" in record.error
        assert list(site.engine.live) == ["r2"] and site.recovery.num_recovered == 1
        finishes = [finish for _, entry in await entries_of(site.store) for finish in entry.finishes]
        assert [(each.sequence, each.error) for each in finishes] == [(1, record.error)]


async def test_requests_of_another_model_fail_when_patience_is_over_and_not_before() -> None:
    async with recovered(admitted(1), admitted(2, fingerprint="other-1")) as site:
        site.recovery.model_known(MODEL)
        await until(lambda: site.recovery.num_waiting == 1)
        for _ in range(20):
            await asyncio.sleep(0)
        assert site.recovery.find("r2") is not None and not site.recovery.is_rebuilding(MODEL.fingerprint)
        site.recovery.model_known(OTHER)  # its worker comes after all
        await until(lambda: not site.recovery.num_waiting)
        assert sorted(site.engine.live) == ["r1", "r2"]
    async with recovered(admitted(1), admitted(2, fingerprint="other-1"), patience_s=0.0) as site:
        site.recovery.model_known(MODEL)
        await until(lambda: not site.recovery.num_waiting and not site.records.num_pending)
        assert "not served any more" in (await record_of(site, "r2")).error
        assert list(site.engine.live) == ["r1"]


async def test_an_end_that_is_not_durable_when_the_model_comes_is_recorded_once_it_is() -> None:
    store = GatedStore()
    async with recovered(admitted(1), admitted(2), store=store) as site:
        await until(lambda: not site.journal.stats.pending)
        store.may_append.clear()
        site.recovery.end("r1", pb.REQUEST_STATE_CANCELLED)
        site.recovery.model_known(MODEL)
        await until(lambda: "r2" in site.engine.live)
        assert site.recovery.num_waiting == 1 and "r1" not in site.engine.live
        settling = asyncio.create_task(site.recovery.settled("r1"))
        await asyncio.sleep(0)
        assert not settling.done()
        store.may_append.set()
        await settling
        await until(lambda: not site.records.num_pending)
        record = await record_of(site, "r1")
        assert (record.state, len(record.samples)) == (pb.REQUEST_STATE_CANCELLED, 1)
        assert "r1" not in site.engine.live


async def test_what_ends_while_another_model_is_served_waits_for_the_words_of_its_own() -> None:
    async with recovered(admitted(1, fingerprint="other-1")) as site:
        site.recovery.model_known(MODEL)
        assert await site.recovery.cancel("r1") == pb.REQUEST_STATE_CANCELLED
        await until(lambda: not site.journal.stats.pending)
        assert site.recovery.find("r1") is not None
        site.recovery.model_known(OTHER)
        await until(lambda: not site.recovery.num_waiting and not site.records.num_pending)
        assert (await record_of(site, "r1")).state == pb.REQUEST_STATE_CANCELLED


async def test_clients_have_time_to_come_back_to_what_was_rebuilt() -> None:
    async with recovered(admitted(1), grace_s=0.001) as site:
        site.recovery.model_known(MODEL)
        await until(lambda: "r1" in site.engine.live)
        live = site.engine.live["r1"]
        assert live.abandonment is not None
        for _ in range(20):  # in which the usual time would be over
            await asyncio.sleep(0.01)
        assert site.engine.live["r1"] is live


async def test_what_was_rebuilt_is_restated_and_forgotten_by_itself() -> None:
    async with recovered(admitted(1), admitted(2), ended(2)) as site:
        assert site.journal.stats.num_needed == 2
        site.recovery.model_known(MODEL)
        await until(lambda: site.journal.stats.num_needed == 1)  # the record of the second is written
        site.engine.end(site.engine.live["r1"], pb.REQUEST_STATE_CANCELLED)
        await until(lambda: site.journal.stats.num_needed == 0)
