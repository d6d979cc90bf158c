"""Damage after which a connection stands, and answers every ping, but carries no call any more or has lost a message.

Each is one bit, at a place of the test's choice, on the way between the SDK and the scheduler.
"""

import asyncio
from collections.abc import AsyncIterator
from functools import partial

import grpc
import pytest

import quire
from quire.errors import DataLossError
from quire.session_wire import ResponseReader
from quire.silence import ANSWER_S, ASK_AFTER_S, LONGEST_S, Silence
from quire.v1 import inference_pb2 as pb
from scheduler_svc.journal.memory_store import MemoryStore
from tests.chaos.proxy import Direction, Edit, Proxy
from tests.frames import with_flip_in, with_lost_message, with_no_streams_allowed
from tests.patience import patient
from tests.scheduler.raw_session import RawSession
from tests.scheduler.serving_site import Site, running_site


@pytest.fixture
async def site() -> AsyncIterator[Site]:
    async with running_site(MemoryStore()) as made:
        await made.add_worker()
        yield made


@pytest.fixture
async def proxy(site: Site) -> AsyncIterator[Proxy]:
    async with Proxy(site.address) as made:
        yield made


@pytest.fixture
async def client(proxy: Proxy) -> AsyncIterator[quire.AsyncClient]:
    async with quire.AsyncClient(proxy.address, reconnect_timeout_s=120, connect_timeout_s=60) as made:
        yield made


@pytest.mark.parametrize(
    ("direction", "edit"),
    [
        pytest.param("down", with_no_streams_allowed, id="settings"),
        pytest.param("up", partial(with_flip_in, words=b"/quire.v1.Inference/Session"), id="path"),
        pytest.param("down", partial(with_flip_in, words=b"application/grpc"), id="content type"),
        pytest.param("down", with_lost_message, id="first answer"),
        pytest.param("up", with_lost_message, id="submission"),
    ],
)
async def test_a_connection_that_one_bit_has_spoilt_for_good_is_left(
    proxy: Proxy, client: quire.AsyncClient, direction: Direction, edit: Edit
) -> None:
    proxy.edit(direction, edit)
    async with asyncio.timeout(patient(ANSWER_S + ASK_AFTER_S + 10)):
        for first in (10, 20):
            assert (await client.generate([first], max_tokens=3)).token_ids == tuple(range(first + 1, first + 4))
    assert proxy.num_edited == 1


async def test_a_call_that_a_spoilt_connection_never_answers_is_answered_by_another(
    proxy: Proxy, client: quire.AsyncClient
) -> None:
    proxy.edit("down", with_no_streams_allowed)
    async with quire.AsyncClient(proxy.address, call_timeout_s=1, connect_timeout_s=60) as impatient:
        async with asyncio.timeout(patient(20)):
            await impatient.stats()
    assert proxy.num_edited == 1


async def test_a_submission_lost_on_a_stream_that_others_keep_busy_is_made_again(
    site: Site, proxy: Proxy, client: quire.AsyncClient
) -> None:
    """Other requests keep the stream busy, so no silence of the whole stream would ever show the loss."""
    await client.generate([10], max_tokens=3)
    proxy.edit("up", partial(with_lost_message, holding=b"lost-one"))
    busy = asyncio.create_task(_ask_again_and_again(client))
    async with asyncio.timeout(patient(ANSWER_S + 20)):
        completion = await client.generate([20], max_tokens=3, request_id="lost-one")
    busy.cancel()
    await asyncio.wait({busy})
    assert completion.token_ids == (21, 22, 23)
    assert proxy.num_edited == 1


async def _ask_again_and_again(client: quire.AsyncClient) -> None:
    while True:
        await client.generate([100], max_tokens=20)


def test_silence_asks_with_growing_patience_and_leaves_a_connection_that_does_not_answer() -> None:
    silence = Silence()
    silence.record_request(0.0)
    assert silence.next_action(ANSWER_S - 0.1) == "wait"
    silence.record_answer(1.0)
    now_s, pauses = 1.0, []
    for _ in range(8):
        asked_s = now_s
        while silence.next_action(now_s) == "wait":
            now_s += 0.5
        pauses.append(now_s - asked_s)
        silence.record_request(now_s)
        silence.record_answer(now_s)
    assert pauses == [4, 8, 16, 32, 64, LONGEST_S, LONGEST_S, LONGEST_S]
    silence.record_output(now_s)
    silence.record_request(now_s)
    assert silence.next_action(now_s + ANSWER_S) == "renew"
    silence.record_request(now_s)
    assert silence.next_action(now_s + ANSWER_S) == "wait"  # a server that is slow gets longer
    silence.record_answer(now_s)
    assert silence.next_action(now_s + ASK_AFTER_S) == "ask"


def test_an_answer_that_is_not_the_next_one_shows_that_one_was_lost() -> None:
    reader = ResponseReader()
    for number in (1, 2):
        reader.read(pb.SessionResponse(number=number).SerializeToString())
    with pytest.raises(DataLossError, match="message 3 was due and 4 came"):
        reader.read(pb.SessionResponse(number=4).SerializeToString())


async def test_answers_are_numbered_and_a_request_that_is_not_the_next_one_ends_the_stream(site: Site) -> None:
    session = RawSession(site)
    await session.call.write(pb.SessionRequest(number=1, handle=1, attach=pb.Attach(request_id="no")))
    assert (await session.call.read()).number == 1
    await session.call.write(pb.SessionRequest(handle=2, attach=pb.Attach(request_id="no")))  # one that is not counted
    assert (await session.call.read()).number == 2
    await session.call.write(pb.SessionRequest(number=4, handle=3, attach=pb.Attach(request_id="no")))
    with pytest.raises(grpc.aio.AioRpcError, match="message 3 was due and 4 came") as raised:
        while await session.call.read() is not grpc.aio.EOF:
            pass
    assert raised.value.code() is grpc.StatusCode.DATA_LOSS
    await session.close()
