"""Clients of other languages, whose event loop stands still for seconds: the public port waits for them."""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path

import grpc
import pytest

from common.rpc import Keepalive
from quire.rpc import PUBLIC_MESSAGE_BYTES, channel_options
from quire.scheduler_settings import SchedulerSettings
from quire.v1 import inference_pb2_grpc
from tests.scheduler.serving_site import Site, counting, running_site, tokens_in

ROOT = Path(__file__).resolve().parent.parent.parent
ASLEEP_S = 4.0
NUM_TOKENS = 300
PLAIN_CLIENT = f"""
import sys
import grpc
from quire.v1 import inference_pb2 as pb, inference_pb2_grpc
channel = grpc.insecure_channel(sys.argv[1])  # no option: as a client of another language
request = pb.GenerateRequest(request_id="sleepy", token_ids=pb.TokenIds(ids=[10]))
request.stopping.max_tokens = {NUM_TOKENS}
request.output.token_ids = True
num_tokens = 0
for message in inference_pb2_grpc.InferenceStub(channel).Generate(request):
    num_tokens += message.chunk.num_tokens
    print(message.WhichOneof("event"), num_tokens, flush=True)
"""


@pytest.fixture
async def site() -> AsyncIterator[Site]:
    """Site with a scheduler's default keepalive."""
    settings = SchedulerSettings()
    keepalive = Keepalive(time_s=settings.keepalive_time_s, timeout_s=settings.keepalive_timeout_s)
    async with running_site(keepalive=keepalive) as made:
        yield made


async def test_a_client_that_sleeps_for_seconds_goes_on_with_its_stream(site: Site) -> None:
    worker = await site.add_worker()
    worker.may_answer.clear()
    client = await asyncio.create_subprocess_exec(
        sys.executable, "-c", PLAIN_CLIENT, site.address, cwd=ROOT, stdout=asyncio.subprocess.PIPE
    )
    assert client.stdout is not None
    try:
        assert await client.stdout.readline() == b"accepted 0\n"
        os.kill(client.pid, signal.SIGSTOP)
        await asyncio.sleep(ASLEEP_S)  # what it is about
        os.kill(client.pid, signal.SIGCONT)
        worker.may_answer.set()
        said = (await client.stdout.read()).decode().split("\n")
        assert said[-2] == f"finished {NUM_TOKENS}"
        assert await client.wait() == 0
    finally:
        with suppress(ProcessLookupError):
            client.kill()
        await client.wait()
    assert site.engine.num_finished == 1


async def test_a_client_that_asks_often_whether_the_server_is_there_is_answered(site: Site) -> None:
    """The SDK asks like this, every 0.8 s, on a port whose own keepalive is slow."""
    worker = await site.add_worker()
    async with grpc.aio.insecure_channel(site.address, options=channel_options(PUBLIC_MESSAGE_BYTES)) as channel:
        stub: inference_pb2_grpc.InferenceAsyncStub = inference_pb2_grpc.InferenceStub(channel)
        worker.may_answer.clear()
        messages = aiter(stub.Generate(counting(10, 3)))
        assert (await anext(messages)).HasField("accepted")
        await asyncio.sleep(ASLEEP_S)  # some pings without data
        worker.may_answer.set()
        assert tokens_in([message async for message in messages]) == [11, 12, 13]


def test_the_sdk_asks_quickly_and_the_scheduler_waits_for_tens_of_seconds() -> None:
    asked = dict(channel_options(PUBLIC_MESSAGE_BYTES))
    assert asked["grpc.keepalive_time_ms"] + asked["grpc.keepalive_timeout_ms"] < 2000
    settings = SchedulerSettings()
    assert min(settings.keepalive_time_s, settings.keepalive_timeout_s) >= 10
