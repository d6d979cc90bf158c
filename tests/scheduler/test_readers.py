"""Readers come and go: what their leaving means for a request, and what a slow one costs."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import grpc
import pytest

from quire.v1 import inference_pb2 as pb
from quire.v1 import inference_pb2_grpc, journal_pb2
from scheduler_svc.api.session import ServerSession
from scheduler_svc.requests.live.engine import Engine
from scheduler_svc.requests.live.output_stream import OutputStream, Subscription
from scheduler_svc.requests.live.readers import Readers
from scheduler_svc.requests.live.request_record import stream_of_record
from scheduler_svc.requests.params.request_params import request_digest
from tests.patience import patient
from tests.scheduler.journal_setup import until
from tests.scheduler.serving_site import FIXED_WINDOWS, Site, counting, record_of, running_site, tokens_in

GRACE_S = 0.05


@pytest.fixture
async def site() -> AsyncIterator[Site]:
    async with running_site(grace_s=GRACE_S) as made:
        yield made


async def left_alone(site: Site, request: pb.GenerateRequest) -> None:
    """Submits a request, and leaves once it is accepted."""
    call = site.inference.Generate(request)
    await anext(aiter(call))
    call.cancel()


async def state_of(site: Site, request_id: str) -> pb.RequestState.ValueType:
    return (await site.inference.GetRequest(pb.GetRequestRequest(request_id=request_id))).state


async def test_a_request_without_readers_is_cancelled_after_the_grace_period(site: Site) -> None:
    worker = await site.add_worker()
    worker.may_answer.clear()
    await left_alone(site, counting(10, 100, "left"))
    await until(lambda: site.engine.num_finished == 1)
    assert await state_of(site, "left") == pb.REQUEST_STATE_CANCELLED
    worker.may_answer.set()
    await site.idle()


async def test_who_still_reads_an_expired_record_is_no_reader_of_the_request_that_has_its_id_now(site: Site) -> None:
    """Regression: it kept that one from being cancelled, and its own cancellation ended it."""
    worker = await site.add_worker()
    worker.may_answer.clear()
    record = stream_of_record(journal_pb2.RequestRecord.FromString(record_of("same", 3)))
    session = ServerSession(site.admission, site.control)
    reader = site.readers.subscribe(record, (), lambda _: None)
    running = asyncio.create_task(site.run(counting(10, 3, "same")))
    await until(lambda: "same" in site.engine.live)
    live = site.engine.live["same"]
    session._subscriptions[1] = reader
    session._cancel(1)
    assert live.ended_state is None
    await until(lambda: bool(live.stream.subscriptions))
    running.cancel()
    await until(lambda: live.abandonment is not None)
    reader.close()
    site.readers.subscribe(record, (), lambda _: None)
    await until(lambda: site.engine.num_finished == 1)
    assert await state_of(site, "same") == pb.REQUEST_STATE_CANCELLED
    worker.may_answer.set()
    await site.idle()


async def test_a_request_that_shall_continue_does_so_without_readers(site: Site) -> None:
    await site.add_worker()
    await left_alone(site, counting(10, 300, "going", on_disconnect=pb.ON_DISCONNECT_CONTINUE))
    await until(lambda: site.engine.num_finished == 1)
    assert await state_of(site, "going") == pb.REQUEST_STATE_FINISHED
    assert tokens_in(await site.run(counting(10, 300, "going", on_disconnect=pb.ON_DISCONNECT_CONTINUE))) == list(
        range(11, 311)
    )


@pytest.fixture
async def patient_site() -> AsyncIterator[Site]:
    """Site that drops no reader for being slow."""
    async with running_site() as made:
        yield made


async def test_a_reader_that_comes_back_within_the_grace_period_keeps_the_request() -> None:
    async with running_site(grace_s=30.0) as site:
        worker = await site.add_worker()
        worker.may_answer.clear()
        await left_alone(site, counting(10, 6, "kept"))
        live = site.engine.live["kept"]
        await until(lambda: live.abandonment is not None)
        grace = live.abandonment
        assert grace is not None and not grace.cancelled()
        again = asyncio.create_task(site.run(counting(10, 6, "kept")))
        await until(lambda: live.abandonment is None)
        assert grace.cancelled(), "it would still end the request"
        worker.may_answer.set()
        assert tokens_in(await again) == [11, 12, 13, 14, 15, 16]
        await site.idle()


async def test_a_reader_that_came_back_while_our_own_loop_was_blocked_keeps_the_request() -> None:
    """The overdue end of the grace period would come before that reader is heard."""
    grace_s = patient(0.8)
    async with running_site(grace_s=grace_s) as site:
        worker = await site.add_worker()
        worker.may_answer.clear()
        await left_alone(site, counting(10, 6, "kept"))
        live = site.engine.live["kept"]
        await until(lambda: live.abandonment is not None)
        again = asyncio.create_task(site.run(counting(10, 6, "kept")))
        time.sleep(1.2 * grace_s)  # noqa: ASYNC251 - our own loop stands still
        await until(lambda: live.abandonment is None or live.ended_state is not None)
        assert live.ended_state is None
        worker.may_answer.set()
        assert tokens_in(await again) == [11, 12, 13, 14, 15, 16]
        await site.idle()


async def test_of_two_readers_the_last_one_counts(site: Site) -> None:
    worker = await site.add_worker()
    worker.may_answer.clear()
    staying = asyncio.create_task(site.run(counting(10, 6, "two")))
    await until(lambda: "two" in site.engine.live)
    live = site.engine.live["two"]
    await left_alone(site, counting(10, 6, "two"))
    await until(lambda: len(live.stream.subscriptions) == 1)
    assert live.abandonment is None
    worker.may_answer.set()
    assert tokens_in(await staying) == [11, 12, 13, 14, 15, 16]


async def test_our_own_shutdown_starts_no_grace_period_and_stops_those_that_run() -> None:
    grace_s = 0.5
    async with running_site(grace_s=grace_s) as site:
        worker = await site.add_worker()
        worker.may_answer.clear()
        await left_alone(site, counting(10, 6, "before"))
        await until(lambda: site.engine.live["before"].abandonment is not None)
        site.readers.closed = True
        await left_alone(site, counting(20, 6, "after"))
        await until(lambda: not site.engine.live["after"].stream.subscriptions)
        fired = asyncio.Event()
        asyncio.get_running_loop().call_later(2 * grace_s, fired.set)
        await fired.wait()  # later than both grace periods would have ended
        assert site.engine.num_finished == 0
        worker.may_answer.set()
        await site.idle()
        assert await state_of(site, "before") == await state_of(site, "after") == pb.REQUEST_STATE_FINISHED


@pytest.mark.parametrize("over_session", [False, True])
async def test_a_reader_that_stops_reading_and_goes_away_leaves_nothing_behind(site: Site, over_session: bool) -> None:
    """Output fills the connection, so the server waits to write when the client disappears."""
    await site.add_worker()
    readers = site.admission.readers = WatchedReaders(site.engine, grace_s=GRACE_S)
    request = counting(10, 4, "large")
    site.records.put("large", record_of("large", 3_000_000, request_digest(request)))
    async with grpc.aio.insecure_channel(site.address, options=[FIXED_WINDOWS]) as channel:
        stub: inference_pb2_grpc.InferenceAsyncStub = inference_pb2_grpc.InferenceStub(channel)
        call: Any = stub.Session() if over_session else stub.Generate(request)
        if over_session:
            await call.write(pb.SessionRequest(handle=1, submit=request))
        await call.read()
        (place,) = readers.places
        place_before = -1
        while place._open[0].position != place_before:  # until the server can write no more
            place_before = place._open[0].position
            for _ in range(50):
                await asyncio.sleep(0.002)
        assert place.has_news and place.stream.subscriptions
        call.cancel()
        await until(lambda: not place.stream.subscriptions)


class WatchedReaders(Readers):
    """Remembers every place."""

    def __init__(self, engine: Engine, *, grace_s: float) -> None:
        super().__init__(engine, grace_s=grace_s)
        self.places: list[Subscription] = []

    def subscribe(
        self, stream: OutputStream, from_positions: Sequence[int], notify: Callable[[Subscription], None]
    ) -> Subscription:
        self.places.append(super().subscribe(stream, from_positions, notify))
        return self.places[-1]


async def test_a_place_beyond_what_can_ever_be_sent_is_refused(patient_site: Site) -> None:
    worker = await patient_site.add_worker()
    worker.may_answer.clear()
    running = asyncio.create_task(patient_site.run(counting(10, 3, "early")))
    await until(lambda: "early" in patient_site.engine.live)
    stream = patient_site.engine.live["early"].stream
    with pytest.raises(Exception, match="but the request has at most 3 tokens"):
        patient_site.readers.subscribe(stream, [4], lambda _: None)
    worker.may_answer.set()
    await running
    with pytest.raises(Exception, match="of a sample that the request does not have: it returns 1"):
        patient_site.readers.subscribe(stream, [0, 1], lambda _: None)
    place = patient_site.readers.subscribe(stream, [3], lambda _: None)
    chunk = pb.Chunk()
    assert place.take_chunks(lambda: chunk, 10) == 0
    assert (chunk.position, chunk.num_tokens, chunk.finish.reason) == (3, 0, pb.FINISH_REASON_LENGTH)
    assert place.done
    place.close()
    assert not stream.subscriptions


async def test_a_slow_reader_gets_everything_in_one_piece(patient_site: Site) -> None:
    await patient_site.add_worker()
    news: list[Subscription] = []
    stream, _ = await patient_site.admission.submit(counting(10, 50, "slow"), None)
    place = patient_site.readers.subscribe(stream, (), news.append)
    await until(lambda: stream.finished is not None)
    chunk = pb.Chunk()
    assert place.take_chunks(lambda: chunk, 1000) == 50
    assert list(chunk.token_ids) == list(range(11, 61))
    assert place.done and len(news) > 1
    place.close()
