"""Readers that read nothing: their streams are cut, and they may resume from their positions.

Those that are processes of their own are frozen, or busy with something else than reading.
"""

import asyncio
import hashlib
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from common.arrays import pack_int32
from quire.v1 import inference_pb2 as pb
from quire.v1 import journal_pb2
from scheduler_svc.requests.live.output_stream import Subscription
from tests.patience import patient
from tests.scheduler.journal_setup import until
from tests.scheduler.serving_site import FIXED_WINDOWS, Site, counting, record_of, running_site
from tests.scheduler.test_readers import WatchedReaders

TIMEOUT_S = patient(0.3)
GRACE_S = 0.2
NUM_TOKENS = 100_000
TOKEN_CHARS = 400  # 40 MB of text in all: more than the windows of a connection hold if they do not grow
BUFFER_TOKENS = 1000  # of the SDK: fewer, so that it cannot have read all before the program sees the first
TEXT = "".join(f"{i:{TOKEN_CHARS}}" for i in range(NUM_TOKENS))
ROOT = Path(__file__).parent.parent.parent


@pytest.fixture
async def site() -> AsyncIterator[Site]:
    async with running_site(slow_reader_timeout_s=TIMEOUT_S, grace_s=GRACE_S) as made:
        made.admission.readers = WatchedReaders(made.engine, grace_s=GRACE_S)
        record = journal_pb2.RequestRecord.FromString(record_of("large", NUM_TOKENS))
        record.response.samples[0].text = TEXT
        record.samples[0].released_ends = pack_int32(range(TOKEN_CHARS, TOKEN_CHARS * NUM_TOKENS + 1, TOKEN_CHARS))
        made.records.put("large", record.SerializeToString())
        yield made


def places(site: Site) -> list[Subscription]:
    assert isinstance(site.admission.readers, WatchedReaders)
    return site.admission.readers.places


async def rest_of(call: Any) -> tuple[list[Any], grpc.aio.AioRpcError | None]:
    """Collect the remaining messages and the error after them."""
    messages = []
    try:
        while (message := await call.read()) is not grpc.aio.EOF:
            messages.append(message)
    except grpc.aio.AioRpcError as error:
        return messages, error
    return messages, None


def end_of(messages: list[Any], start: int = 0) -> int:
    """The position behind their chunks, which follow one another."""
    for message in messages:
        for each in message.events if isinstance(message, pb.SessionResponse) else [message]:
            if each.HasField("chunk"):
                assert each.chunk.position == start
                end = start + each.chunk.num_tokens
                assert each.chunk.text == TEXT[TOKEN_CHARS * start : TOKEN_CHARS * end]
                start = end
    return start


@pytest.mark.parametrize("over_session", [False, True])
async def test_a_stream_that_nobody_reads_is_cut_and_may_be_gone_on_with(site: Site, over_session: bool) -> None:
    call: Any
    if over_session:
        call = site.inference.Session()
        await call.write(pb.SessionRequest(handle=1, attach=pb.Attach(request_id="large")))
    else:
        call = site.inference.Attach(pb.AttachRequest(request_id="large"))
    first = await call.read()
    (place,) = places(site)
    await until(lambda: not place.stream.subscriptions)
    messages, error = await rest_of(call)
    assert error is not None and error.code() is grpc.StatusCode.UNAVAILABLE
    status: Any = rpc_status.from_call(error)
    info, retry = error_details_pb2.ErrorInfo(), error_details_pb2.RetryInfo()
    assert any(detail.Unpack(info) for detail in status.details) and info.reason == "SLOW_READER"
    assert any(detail.Unpack(retry) for detail in status.details) and retry.retry_delay.ToMilliseconds() > 0
    position = end_of([first, *messages])
    assert 0 < position < NUM_TOKENS
    again = site.inference.Attach(pb.AttachRequest(request_id="large", from_positions=[position]))
    messages, error = await rest_of(again)
    assert error is None and end_of(messages, position) == NUM_TOKENS
    assert messages[-1].finished.state == pb.REQUEST_STATE_FINISHED


async def test_a_stream_with_nothing_to_say_is_not_cut(site: Site) -> None:
    worker = await site.add_worker()
    worker.may_answer.clear()
    reading = asyncio.create_task(site.run(counting(10, 3, "quiet")))
    await until(lambda: "quiet" in site.engine.live)
    over = asyncio.Event()
    asyncio.get_running_loop().call_later(2 * TIMEOUT_S, over.set)
    await over.wait()
    worker.may_answer.set()
    assert (await reading)[-1].finished.state == pb.REQUEST_STATE_FINISHED


async def client_process(site: Site, body: str) -> asyncio.subprocess.Process:
    """A program that uses the SDK; `client` is there, and it may await."""
    lines = "\n".join(f"        {line}" for line in body.splitlines())
    program = f"""
import asyncio, hashlib, sys
import quire
from quire import servers
channel_options = servers.channel_options
servers.channel_options = lambda max_bytes: [*channel_options(max_bytes), {FIXED_WINDOWS!r}]
async def main():
    async with quire.AsyncClient({site.address!r}, buffer_tokens={BUFFER_TOKENS}) as client:
{lines}
asyncio.run(main())
"""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", program, cwd=ROOT, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
    )

    async def end() -> None:
        if process.returncode is None:
            process.kill()
        await process.wait()

    site.on_close(end)
    return process


async def said(process: asyncio.subprocess.Process) -> str:
    assert process.stdout is not None
    async with asyncio.timeout(patient(30)):
        return (await process.stdout.readline()).decode().strip()


async def test_the_sdk_goes_on_from_its_position_when_its_stream_was_cut(site: Site) -> None:
    """The SDK's event loop is busy with something else until then."""
    process = await client_process(
        site,
        """
digest = hashlib.sha256()
async for chunk in client.attach("large"):
    if not chunk.position:
        print("begun", flush=True)
        sys.stdin.readline()
    digest.update(chunk.text.encode())
print(digest.hexdigest(), flush=True)
""",
    )
    assert await said(process) == "begun"
    (place,) = places(site)
    await until(lambda: not place.stream.subscriptions)
    assert process.stdin is not None
    process.stdin.write(b"go on\n")
    assert await said(process) == hashlib.sha256(TEXT.encode()).hexdigest()
    assert len(places(site)) > 1
    assert await process.wait() == 0


async def test_the_requests_of_a_frozen_client_are_cancelled_after_the_grace_period(site: Site) -> None:
    worker = await site.add_worker()
    worker.may_answer.clear()
    process = await client_process(
        site,
        """
streams = [client.stream([10], max_tokens=900, request_id=f"r{i}") for i in range(3)]
async for chunk in streams[0]:
    print("begun", flush=True)
    await asyncio.Event().wait()
""",
    )
    await until(lambda: len(site.engine.live) == 3)
    first = site.engine.live["r0"].stream.samples[0]
    worker.silence_once(lambda: first.num_released > 0)
    worker.may_answer.set()
    assert await said(process) == "begun"
    await until(lambda: not worker.may_answer.is_set())
    os.kill(process.pid, signal.SIGSTOP)
    began_s = asyncio.get_running_loop().time()
    await until(lambda: all(each.ended_state is not None for each in site.engine.live.values()))
    seconds = asyncio.get_running_loop().time() - began_s
    num_steps = len(worker.steps)
    worker.may_answer.set()
    await site.idle()
    assert len(worker.steps) <= num_steps + 2, "the blocks are free within two steps"
    for i in range(3):
        response = await site.inference.GetRequest(pb.GetRequestRequest(request_id=f"r{i}"))
        assert response.state == pb.REQUEST_STATE_CANCELLED
    assert seconds < patient(20), "keepalive sees it within about 2 s, on an idle machine"
