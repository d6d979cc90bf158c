"""Session on the wire: handles, cancelling, detaching, slow readers, broken messages, what a client may do wrong."""

import asyncio
from collections.abc import AsyncIterator, Sequence

import grpc
import pytest
from google.rpc import status_pb2

from quire.errors import InvalidRequestError, from_status
from quire.v1 import inference_pb2 as pb
from scheduler_svc.api.session import MAX_OPEN_STARTS, MAX_RESPONSE_TOKENS, ServerSession
from scheduler_svc.requests.live.output_stream import OutputStream
from scheduler_svc.requests.params.request_params import request_digest
from tests.scheduler.gated_store import GatedStore
from tests.scheduler.journal_setup import until
from tests.scheduler.raw_session import RawSession
from tests.scheduler.refusals import refusal_of
from tests.scheduler.serving_site import Site, counting, record_of, running_site


@pytest.fixture
async def store() -> GatedStore:
    return GatedStore()


@pytest.fixture
async def site(store: GatedStore) -> AsyncIterator[Site]:
    async with running_site(store) as made:
        yield made
        store.may_append.set()


@pytest.fixture
async def session(site: Site) -> AsyncIterator[RawSession]:
    made = RawSession(site)
    yield made
    await made.close()


async def test_many_requests_share_a_stream_and_it_ends_when_all_are_done(site: Site, session: RawSession) -> None:
    await site.add_worker()
    for handle in range(20):
        await session.say(handle, submit=counting(100 * handle, 6))
    await session.call.done_writing()
    while await session.read():
        assert session.events
    for handle in range(20):
        assert session.tokens(handle) == list(range(100 * handle + 1, 100 * handle + 7))
    assert await session.call.code() is grpc.StatusCode.OK
    await site.idle()


async def test_a_handle_in_use_is_refused_and_free_after_the_end(site: Site, session: RawSession) -> None:
    worker = await site.add_worker()
    worker.may_answer.clear()
    await session.say(1, submit=counting(10, 3))
    await session.read_until("accepted", 1)
    await session.say(1, submit=counting(20, 3))
    error = (await session.read_until("error", 1)).error
    assert error.code == grpc.StatusCode.INVALID_ARGUMENT.value[0] and "in use" in error.message
    worker.may_answer.set()
    await session.read_until("finished", 1)
    assert session.tokens(1) == [11, 12, 13]
    session.events.clear()
    await session.say(1, submit=counting(20, 3))
    await session.read_until("finished", 1)
    assert session.tokens(1) == [21, 22, 23]


async def test_refusals_are_events_of_their_request_alone(site: Site, session: RawSession) -> None:
    await site.add_worker()
    await session.say(1)
    await session.say(2, submit=pb.GenerateRequest())
    await session.say(3, attach=pb.Attach(request_id="nobody"))
    await session.say(4, submit=counting(10, 3, "good"))
    codes = {handle: (await session.read_until("error", handle)).error.code for handle in (1, 2, 3)}
    assert codes == {1: 3, 2: 3, 3: 5}
    await session.read_until("finished", 4)
    await session.say(5, attach=pb.Attach(request_id="good", from_positions=[99]))
    assert (await session.read_until("error", 5)).error.code == 3
    await session.say(6, attach=pb.Attach(request_id="good", from_positions=[2]))
    await session.read_until("finished", 6)
    (chunk,) = [event.chunk for event in session.events if event.handle == 6 and event.HasField("chunk")]
    assert (chunk.position, list(chunk.token_ids)) == (2, [13])


async def test_an_impossible_position_in_a_sample_that_comes_at_the_end_is_refused_at_once(
    site: Site, session: RawSession
) -> None:
    worker = await site.add_worker()
    worker.may_answer.clear()
    request = counting(10, 3, "ranked")
    request.sampling.best_of = 2
    await session.say(1, submit=request)
    await session.read_until("accepted", 1)
    await session.say(2, attach=pb.Attach(request_id="ranked", from_positions=[99]))
    error = (await session.read_until("error", 2)).error
    assert error.code == grpc.StatusCode.INVALID_ARGUMENT.value[0]
    assert "from_positions[0]: is 99, but the request has at most 3 tokens" in error.message
    worker.may_answer.set()
    await session.read_until("finished", 1)


async def test_cancelling_and_detaching_in_one_breath_cancels(site: Site, session: RawSession) -> None:
    worker = await site.add_worker()
    worker.may_answer.clear()
    await session.say(1, submit=counting(10, 500, "unwanted", on_disconnect=pb.ON_DISCONNECT_CONTINUE))
    await session.read_until("accepted", 1)
    await session.say(1, cancel=pb.Cancellation())
    await session.say(1, detach=pb.Detachment())
    await until(lambda: site.engine.num_finished == 1)
    record = await site.inference.GetRequest(pb.GetRequestRequest(request_id="unwanted"))
    assert record.state == pb.REQUEST_STATE_CANCELLED
    worker.may_answer.set()
    await site.idle()


@pytest.mark.parametrize("detach", [False, True])
async def test_cancelling_a_request_on_its_way_in_cancels_it(
    site: Site, session: RawSession, store: GatedStore, detach: bool
) -> None:
    worker = await site.add_worker()
    worker.may_answer.clear()
    store.may_append.clear()
    await session.say(1, submit=counting(10, 500, "unwanted", on_disconnect=pb.ON_DISCONNECT_CONTINUE))
    await until(lambda: store.num_waiting == 1)
    await session.say(1, cancel=pb.Cancellation())
    if detach:
        await session.say(1, detach=pb.Detachment())
    await session.say(2)
    await session.read_until("error", 2)  # all before it was read
    store.may_append.set()
    if detach:
        await until(lambda: site.engine.num_finished == 1)
        record = await site.inference.GetRequest(pb.GetRequestRequest(request_id="unwanted"))
        assert record.state == pb.REQUEST_STATE_CANCELLED
        await session.say(3)
        await session.read_until("error", 3)
        assert not [event for event in session.events if event.handle == 1]
    else:
        event = await session.read_until("finished", 1)
        assert event.finished.state == pb.REQUEST_STATE_CANCELLED
    worker.may_answer.set()
    await site.idle()


async def test_a_request_that_was_cancelled_on_its_way_in_is_cancelled_though_its_client_goes_at_once(
    site: Site, store: GatedStore
) -> None:
    """Regression: the end of the session took the wish along, and the request ran to its end."""
    worker = await site.add_worker()
    worker.may_answer.clear()
    store.may_append.clear()
    session = ServerSession(site.admission, site.control)

    async def messages() -> AsyncIterator[pb.SessionRequest]:
        for handle, name in ((1, "unwanted"), (2, "wanted")):
            request = counting(10 * handle, 5, name, on_disconnect=pb.ON_DISCONNECT_CONTINUE)
            yield pb.SessionRequest(handle=handle, submit=request)
        yield pb.SessionRequest(handle=1, cancel=pb.Cancellation())

    await session.read(messages())
    await until(lambda: len(site.control.submissions) == 2)
    session.close()
    store.may_append.set()
    await until(lambda: site.engine.num_admitted == 2)
    worker.may_answer.set()
    await until(lambda: site.engine.num_finished == 2)
    for request_id, state in (("unwanted", pb.REQUEST_STATE_CANCELLED), ("wanted", pb.REQUEST_STATE_FINISHED)):
        record = await site.inference.GetRequest(pb.GetRequestRequest(request_id=request_id))
        assert record.state == state
    await site.idle()


@pytest.mark.parametrize("cancel", [False, True])
async def test_a_handle_is_free_as_soon_as_its_request_was_detached_from_on_its_way_in(
    site: Site, session: RawSession, store: GatedStore, cancel: bool
) -> None:
    await site.add_worker()
    store.may_append.clear()
    await session.say(1, submit=counting(10, 5, "first"))
    await until(lambda: store.num_waiting == 1)
    if cancel:
        await session.say(1, cancel=pb.Cancellation())
    await session.say(1, detach=pb.Detachment())
    await session.say(1, submit=counting(20, 5, "second"))
    await session.say(2)
    await session.read_until("error", 2)  # all before it was read
    store.may_append.set()
    await session.read_until("finished", 1)
    assert session.tokens(1) == [21, 22, 23, 24, 25]
    (accepted,) = [event.accepted for event in session.events if event.HasField("accepted")]
    assert accepted.request_id == "second"
    if cancel:
        record = await site.inference.GetRequest(pb.GetRequestRequest(request_id="first"))
        assert record.state == pb.REQUEST_STATE_CANCELLED


async def test_detaching_from_a_request_on_its_way_in_leaves_it_alone(
    site: Site, session: RawSession, store: GatedStore
) -> None:
    await site.add_worker()
    store.may_append.clear()
    await session.say(1, submit=counting(10, 5, "alone", on_disconnect=pb.ON_DISCONNECT_CONTINUE))
    await until(lambda: store.num_waiting == 1)
    await session.say(1, detach=pb.Detachment())
    await session.say(1, cancel=pb.Cancellation())  # of a handle that is free again, or will be: of nobody
    await session.say(2)
    await session.read_until("error", 2)
    store.may_append.set()
    await until(lambda: site.engine.num_finished == 1)
    assert not [event for event in session.events if event.handle == 1]
    await session.say(1, attach=pb.Attach(request_id="alone"))
    await session.read_until("finished", 1)
    assert session.tokens(1) == [11, 12, 13, 14, 15]


async def test_no_event_of_a_detached_request_comes_under_its_handle_any_more(site: Site) -> None:
    """Regression: what was not sent yet of the former request came as the next one's."""
    put_record(site, "first", 3)
    put_record(site, "second", 3)
    session = ServerSession(site.admission, site.control)

    async def messages() -> AsyncIterator[pb.SessionRequest]:
        yield pb.SessionRequest(handle=1, attach=pb.Attach(request_id="first"))
        yield pb.SessionRequest(handle=2, attach=pb.Attach(request_id="nobody"))
        await until(lambda: 1 in session._subscriptions and not session._starts)
        yield pb.SessionRequest(handle=1, detach=pb.Detachment())
        yield pb.SessionRequest(handle=2, detach=pb.Detachment())
        for handle in (1, 2):
            yield pb.SessionRequest(handle=handle, attach=pb.Attach(request_id="second"))

    await session.read(messages())
    await until(lambda: not session._starts)
    seen = []
    while response := await session.next_response():
        seen += [(event.handle, event.WhichOneof("event"), event.accepted.request_id) for event in response.events]
    for handle in (1, 2):
        mine = [each[1:] for each in seen if each[0] == handle]
        assert mine == [("accepted", "second"), ("chunk", ""), ("finished", "")]
    session.close()


async def test_every_refusal_of_a_message_on_a_handle_in_use_says_that_it_concerns_the_message_alone(
    site: Site, session: RawSession, store: GatedStore
) -> None:
    """Regression: a client that went by the other violations took the handle for free."""
    worker = await site.add_worker()
    worker.may_answer.clear()
    await session.say(1, submit=counting(10, 3))
    await session.read_until("accepted", 1)
    store.may_append.clear()
    await session.say(2, submit=counting(20, 3))  # on its way in
    await until(lambda: store.num_waiting == 1)
    for handle in (1, 2, 3):
        await session.say(handle)
        await session.say(handle, submit=counting(30, 3, tenant="t" * 129))
    await session.say(1, submit=counting(30, 3))
    found: list[tuple[int, set[str]]] = []
    while len(found) < 7:
        assert await session.read()
        found = [(event.handle, fields_of(event)) for event in session.events if event.HasField("error")]
    wanted = [
        (handle, {*(["handle"] if handle < 3 else []), field}) for handle in (1, 2, 3) for field in ("action", "tenant")
    ]
    assert found == [*wanted, (1, {"handle"})]
    store.may_append.set()
    worker.may_answer.set()
    for handle in (1, 2):
        await session.read_until("finished", handle)
    assert session.tokens(1) == [11, 12, 13] and session.tokens(2) == [21, 22, 23]


async def test_a_handle_is_free_after_a_fault_of_ours_in_one_of_its_messages(
    site: Site, session: RawSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: the request went on under it, and the next one was refused."""
    worker = await site.add_worker()
    worker.may_answer.clear()
    await session.say(1, submit=counting(10, 3, "former", on_disconnect=pb.ON_DISCONNECT_CONTINUE))
    await session.read_until("accepted", 1)

    def fail(request_id: str) -> None:
        raise KeyError("a fault of ours")

    with monkeypatch.context() as faulty:
        faulty.setattr(site.control, "cancel_live", fail)
        await session.say(1, cancel=pb.Cancellation())
        assert (await session.read_until("error", 1)).error.code == grpc.StatusCode.INTERNAL.value[0]
    session.events.clear()
    await session.say(1, submit=counting(20, 3))
    await session.read_until("accepted", 1)
    worker.may_answer.set()
    await session.read_until("finished", 1)
    assert session.tokens(1) == [21, 22, 23]


def fields_of(event: pb.SessionEvent) -> set[str]:
    error = from_status(status_pb2.Status.FromString(event.error.status))
    assert isinstance(error, InvalidRequestError)
    return {each.field for each in error.violations}


async def test_actions_on_handles_of_nobody_do_nothing(site: Site, session: RawSession) -> None:
    await site.add_worker()
    await session.say(7, cancel=pb.Cancellation())
    await session.say(8, detach=pb.Detachment())
    await session.say(9, submit=counting(10, 3))
    await session.read_until("finished", 9)
    assert {event.handle for event in session.events} == {9}


async def test_undecodable_bytes_end_the_stream_at_once_though_requests_run(site: Site, session: RawSession) -> None:
    worker = await site.add_worker()
    worker.may_answer.clear()
    await session.say(1, submit=counting(10, 6, "going-on"))
    await session.read_until("accepted", 1)
    await session.call.write(b"\xff\xff\xff")
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        while await session.read():
            pass
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    worker.may_answer.set()
    again = RawSession(site)
    await again.say(1, attach=pb.Attach(request_id="going-on"))
    await again.read_until("finished", 1)
    assert again.tokens(1) == [11, 12, 13, 14, 15, 16]
    await again.close()


async def test_a_fault_of_ours_is_an_error_of_one_request(site: Site, session: RawSession) -> None:
    await site.add_worker()
    await session.say(1, submit=counting(10, 4))
    await session.read_until("finished", 1)

    class Faulty:
        def subscribe(self, *arguments: object) -> None:
            raise KeyError("a fault of ours")

    whole, site.admission.readers = site.admission.readers, Faulty()  # type: ignore[assignment]
    await session.say(2, submit=counting(10, 4))
    assert (await session.read_until("error", 2)).error.code == grpc.StatusCode.INTERNAL.value[0]
    error = await refusal_of(site.run(counting(10, 4)))
    assert error.code() is grpc.StatusCode.INTERNAL
    assert "fault of ours" not in (error.details() or "")
    site.admission.readers = whole
    await session.say(2, submit=counting(10, 4))
    await session.read_until("finished", 2)


async def test_what_a_reader_missed_comes_in_pieces_and_nobody_waits_behind_it(site: Site, session: RawSession) -> None:
    """With all logprobs that can be asked for, a long output at once would be larger than a message may be."""
    num_tokens = 3 * MAX_RESPONSE_TOKENS + 5
    assert MAX_RESPONSE_TOKENS * 20 * (4 + 3) < 16 * 1024 * 1024 / 2
    for name, length in (("long", num_tokens), ("short", 3)):
        put_record(site, name, length)
    await session.say(1, attach=pb.Attach(request_id="long"))
    await session.say(2, attach=pb.Attach(request_id="short"))
    await session.read_until("finished", 1)
    assert session.tokens(1) == list(range(num_tokens))
    assert session.tokens(2) == [0, 1, 2]
    sizes = [event.chunk.num_tokens for event in session.events if event.handle == 1 and event.HasField("chunk")]
    assert max(sizes) <= MAX_RESPONSE_TOKENS and len(sizes) >= 4
    kinds = [(event.handle, event.WhichOneof("event")) for event in session.events]
    assert kinds.index((2, "finished")) < kinds.index((1, "finished"))

    await site.add_worker()
    request = counting(0, 4, "again")
    site.records.put("again", record_of("again", num_tokens, request_digest(request)))
    chunks = [message.chunk for message in await site.run(request) if message.HasField("chunk")]
    assert [token for chunk in chunks for token in chunk.token_ids] == list(range(num_tokens))
    assert max(chunk.num_tokens for chunk in chunks) <= MAX_RESPONSE_TOKENS


def put_record(site: Site, request_id: str, num_tokens: int) -> None:
    site.records.put(request_id, record_of(request_id, num_tokens))


async def test_a_client_that_does_not_read_is_not_read_either(site: Site) -> None:
    num_said = 0

    async def nonsense() -> AsyncIterator[pb.SessionRequest]:
        nonlocal num_said
        while True:
            num_said += 1
            yield pb.SessionRequest(handle=1)

    session = ServerSession(site.admission, site.control)
    reading = asyncio.create_task(session.read(nonsense()))
    for turn in (1, 2):
        await until(lambda: num_said > 0)
        for _ in range(100):
            await asyncio.sleep(0)
        assert num_said == turn * MAX_OPEN_STARTS
        response = await session.next_response()
        assert response is not None and len(response.events) == MAX_OPEN_STARTS
    reading.cancel()
    session.close()


async def test_who_has_more_than_a_message_holds_waits_behind_the_others(site: Site) -> None:
    put_record(site, "long", 3 * MAX_RESPONSE_TOKENS)
    put_record(site, "short", 3)
    session = ServerSession(site.admission, site.control)

    async def attachments() -> AsyncIterator[pb.SessionRequest]:
        for handle, request_id in enumerate(["long", "short"]):
            yield pb.SessionRequest(handle=handle, attach=pb.Attach(request_id=request_id))

    await session.read(attachments())
    await until(lambda: len(session._subscriptions) == 2)
    order = []
    while response := await session.next_response():
        order += [event.handle for event in response.events if event.HasField("chunk")]
    assert order == [0, 1, 0, 0, 0]  # the second message has 3 of the short one and room for the long one
    session.close()


async def test_a_request_counts_once_from_the_moment_it_is_open() -> None:
    """The next message may come before the loop has told the session that its start is done."""
    async with running_site(limits={"max_requests_per_session": 2}) as site:
        session = ServerSession(site.admission, site.control)

        async def attach(request_id: str, positions: Sequence[int]) -> tuple[OutputStream, pb.Accepted]:
            accepted = pb.Accepted(request_id=request_id, num_samples=1)
            return OutputStream(accepted, pb.OutputParams(), []), accepted

        site.control.attach = attach  # type: ignore[assignment, method-assign]

        async def attachments() -> AsyncIterator[pb.SessionRequest]:
            for handle in (1, 2, 3):
                yield pb.SessionRequest(handle=handle, attach=pb.Attach(request_id=str(handle)))
                await asyncio.sleep(0)  # exactly one turn of the loop: the start has run, its callback has not

        await session.read(attachments())
        response = await session.next_response()
        assert response is not None
        kinds = [(event.handle, event.WhichOneof("event")) for event in response.events]
        assert kinds == [(1, "accepted"), (2, "accepted"), (3, "error")]
        session.close()
