"""Bits that flip between a client and the scheduler, in both directions: no output changes, and no stream ends.

The proxy flips a bit of the connection's bytes, whatever they are: headers, frames, lengths, messages and checksums.
"""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

import quire
from quire.checksum import is_intact, sealed, tag_of
from quire.errors import DataLossError
from quire.session_wire import ResponseReader
from quire.v1 import inference_pb2 as pb
from scheduler_svc.journal.memory_store import MemoryStore
from tests.chaos.proxy import Direction, Proxy
from tests.scheduler.raw_session import SESSION
from tests.scheduler.refusals import code_of
from tests.scheduler.serving_site import Site, running_site

NUM_FLIPS = 24  # in each direction; one in a frame's length costs the silence after which a client comes back
NUM_TOKENS = 40
TAG = tag_of(pb.SessionResponse.DESCRIPTOR)


@pytest.fixture
async def site() -> AsyncIterator[Site]:
    async with running_site(MemoryStore()) as made:
        yield made


@pytest.mark.parametrize("direction", ["up", "down"])
@pytest.mark.timeout(600)
async def test_no_flipped_bit_changes_an_output_or_ends_a_stream(site: Site, direction: Direction) -> None:
    await site.add_worker()
    async with (
        Proxy(site.address, seed=5) as proxy,
        quire.AsyncClient(proxy.address, retries=1000, reconnect_timeout_s=120, connect_timeout_s=60) as client,
    ):
        num_done = 0
        while proxy.num_flipped < NUM_FLIPS:
            proxy.flip(direction, 6)
            outputs = await asyncio.gather(*(ask(client, first) for first in range(10, 18)))
            for first, tokens in zip(range(10, 18), outputs, strict=True):
                assert tokens == list(range(first + 1, first + 1 + NUM_TOKENS))
            num_done += len(outputs)
        assert num_done >= 8


async def ask(client: quire.AsyncClient, first: int) -> list[int]:
    completion = await client.generate([first], max_tokens=NUM_TOKENS)
    return list(completion.samples[0].token_ids)


def test_every_flipped_bit_of_a_sealed_answer_is_found() -> None:
    chunk = pb.Chunk(position=7, num_tokens=1, token_ids=[9])
    answer = pb.SessionResponse(events=[pb.SessionEvent(handle=3, chunk=chunk)])
    data = sealed(answer, TAG)
    reader = ResponseReader()
    assert reader.read(data).events == answer.events
    for place in range(8 * len(data)):
        flipped = bytearray(data)
        flipped[place // 8] ^= 1 << place % 8
        assert not is_intact(bytes(flipped), TAG)
        with pytest.raises(DataLossError):
            reader.read(bytes(flipped))


def test_an_answer_of_a_server_that_seals_none_is_read_as_it_is() -> None:
    reader = ResponseReader()
    answer = pb.SessionResponse(events=[pb.SessionEvent(handle=1)])
    assert reader.read(answer.SerializeToString()) == answer
    with pytest.raises(DataLossError):
        reader.read(b"\xff")


async def test_every_answer_of_generate_and_attach_can_be_checked(site: Site) -> None:
    await site.add_worker()
    tag = tag_of(pb.GenerateResponse.DESCRIPTOR)
    async with grpc.aio.insecure_channel(site.address) as channel:
        request = pb.GenerateRequest(request_id="sealed", token_ids=pb.TokenIds(ids=[10]))
        request.stopping.max_tokens = 3
        for method, message in (("Generate", request), ("Attach", pb.AttachRequest(request_id="sealed"))):
            call: Any = channel.unary_stream(
                f"/quire.v1.Inference/{method}", request_serializer=type(message).SerializeToString
            )
            answers = [data async for data in call(message)]
            assert len(answers) >= 3
            assert all(is_intact(data, tag) for data in answers)
            assert pb.GenerateResponse.FromString(answers[-1]).HasField("finished")


async def test_a_damaged_request_is_not_acted_on_and_one_without_a_checksum_is(site: Site) -> None:
    await site.add_worker()
    request = pb.SessionRequest(handle=1, submit=pb.GenerateRequest(token_ids=pb.TokenIds(ids=[10])))
    request.submit.stopping.max_tokens = 2
    whole = sealed(request, tag_of(pb.SessionRequest.DESCRIPTOR))
    assert (await kinds_of_answers(site, request.SerializeToString()))[-1] == "finished"
    assert (await kinds_of_answers(site, whole))[-1] == "finished"
    for place in range(0, 8 * (len(whole) - 5), 3):
        damaged = bytearray(whole)
        damaged[place // 8] ^= 1 << place % 8
        assert await code_of(kinds_of_answers(site, bytes(damaged))) is grpc.StatusCode.DATA_LOSS
    assert site.engine.num_admitted == 2


async def test_a_large_damaged_request_is_said_to_be_damaged_whatever_its_bytes_say_by_now(site: Site) -> None:
    """Regression: it was scanned first, and refused for good for a text that a damaged length made thousands of fields.

    A large request beyond a bound is refused only if its checksum is that of its bytes.
    """
    tag = tag_of(pb.SessionRequest.DESCRIPTOR)
    long_text = pb.ChatPrompt(messages=[pb.ChatMessage(role="user", content="x" * 600_000)])
    many = pb.ChatPrompt(messages=[pb.ChatMessage()] * 70_000)
    for chat in (long_text, many):
        whole = sealed(pb.SessionRequest(handle=1, submit=pb.GenerateRequest(chat=chat)), tag)
        assert await kinds_of_answers(site, whole) == ["error"]
        for place in range(0, 8 * 28, 9):
            damaged = bytearray(whole)
            damaged[place // 8] ^= 1 << place % 8
            assert await code_of(kinds_of_answers(site, bytes(damaged))) is grpc.StatusCode.DATA_LOSS
    only_looks_sealed = pb.SessionRequest(handle=1, submit=pb.GenerateRequest(chat=many, annotation=b"}only"))
    data = only_looks_sealed.SerializeToString()
    assert data[-5] == tag and await kinds_of_answers(site, data) == ["error"]


async def kinds_of_answers(site: Site, data: bytes) -> list[str | None]:
    async with grpc.aio.insecure_channel(site.address) as channel:
        call: Any = channel.stream_stream(SESSION, response_deserializer=pb.SessionResponse.FromString)()
        await call.write(data)
        await call.done_writing()
        return [event.WhichOneof("event") async for response in call for event in response.events]
