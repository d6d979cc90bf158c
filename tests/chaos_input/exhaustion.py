"""Too many connections and streams (F33): a scheduler that may open 256 files, under thousands that say nothing.

    python -m tests.chaos_input.exhaustion

starts the demo model and prints what it saw. Whoever was there before must go on; whoever comes then is refused; and
when the crowd has gone, newcomers are served again.
"""

import asyncio
import json
import os
import resource
import socket
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass
from typing import Any

import grpc

import quire
from quire.rpc import PUBLIC_MESSAGE_BYTES, channel_options
from quire.v1 import inference_pb2 as pb
from quire.v1 import inference_pb2_grpc
from tests.chaos_input.overload import demo_services
from tests.patience import patient
from tests.services import Service

MAX_FILES = 256
NUM_CONNECTIONS = 400
NUM_STREAMS = 5000
# Those of the scheduler's port would refuse most of the crowd: see tests/e2e/test_hostile_peers.py.
NO_LIMITS = (
    "--max-calls-per-connection=0",
    "--max-calls-per-host=0",
    "--max-sessions-per-host=0",
    "--max-call-rate=0",
    "--max-cancel-rate=0",
)
_PROMPT = "The fox"
_RECOVERY_LIMIT_S = 30.0
_GREETING = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\x00\x00\x00\x04\x00\x00\x00\x00\x00"  # and no settings


@dataclass(frozen=True, slots=True, kw_only=True)
class ExhaustionReport:
    """Report of the attack; times in seconds."""

    num_connections: int
    files_at_most: int
    num_streams: int
    went_on: bool  # who was connected got its answers all the time
    newcomer_refused: bool  # while no file was left
    recovery_s: float  # from the crowd's end to a newcomer's first answer
    alive: bool
    rss_growth: float  # of the scheduler, from the first crowd's end on


async def exhaust(service: Service, address: str) -> ExhaustionReport:
    """Crowd a running scheduler. Its limit of open files is lowered, and stays so."""
    pid = service.process.pid
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (MAX_FILES, MAX_FILES))
    async with quire.AsyncClient(address) as client:
        expected = await _ask(client)
        went_on = [await _among_idle_streams(client, address, expected)]
        rss = rss_bytes(pid)
        went_on.append(await _among_idle_streams(client, address, expected))
        crowd = [_silent_connection(address) for _ in range(NUM_CONNECTIONS)]
        try:
            files = await until_full(pid)
            went_on.append(await _ask(client) == expected)
            newcomer_refused = await _is_refused(address)
            went_on.append(await _ask(client) == expected)
        finally:
            for each in crowd:
                each.close()
        clock = asyncio.get_running_loop().time
        gone_s = clock()
        while await _is_refused(address):
            assert clock() - gone_s < _RECOVERY_LIMIT_S, "nobody new is served after the crowd has gone"
        recovery_s = clock() - gone_s
        went_on.append(await _ask(client) == expected)
    return ExhaustionReport(
        num_connections=NUM_CONNECTIONS,
        files_at_most=files,
        num_streams=NUM_STREAMS,
        went_on=all(went_on),
        newcomer_refused=newcomer_refused,
        recovery_s=recovery_s,
        alive=service.process.poll() is None,
        rss_growth=rss_bytes(pid) / rss - 1,
    )


async def _among_idle_streams(client: quire.AsyncClient, address: str, expected: str) -> bool:
    """True if a client is served while thousands of sessions are idle, and while they end."""
    async with AsyncExitStack() as stack:
        channel = await stack.enter_async_context(
            grpc.aio.insecure_channel(address, options=channel_options(PUBLIC_MESSAGE_BYTES))
        )
        open_session: Any = channel.stream_stream("/quire.v1.Inference/Session")
        sessions = [open_session() for _ in range(NUM_STREAMS)]
        await asyncio.gather(*(each.wait_for_connection() for each in sessions))
        served = await _ask(client) == expected
        for each in sessions:
            each.cancel()
    return served and await _ask(client) == expected


async def _ask(client: quire.AsyncClient) -> str:
    return (await client.generate(_PROMPT, max_tokens=16, temperature=0)).text


async def _is_refused(address: str) -> bool:
    """True if a new client, on a connection of its own, gets no answer."""
    options = [*channel_options(PUBLIC_MESSAGE_BYTES), ("grpc.use_local_subchannel_pool", 1)]
    async with grpc.aio.insecure_channel(address, options=options) as channel:
        stub: inference_pb2_grpc.InferenceAsyncStub = inference_pb2_grpc.InferenceStub(channel)
        try:
            await stub.GetModel(pb.GetModelRequest(), timeout=2)
        except grpc.aio.AioRpcError:
            return True
    return False


async def until_full(pid: int, max_files: int = MAX_FILES) -> int:
    """Wait until files run out; return the number of open files. Raises TimeoutError."""
    async with asyncio.timeout(patient(30)):
        while (files := num_files(pid)) < max_files:  # noqa: ASYNC110 - it is another process's
            await asyncio.sleep(0.05)
    return files


def _silent_connection(address: str) -> socket.socket:
    """Open a connection that begins like HTTP/2, so that the server keeps it for a while."""
    host, _, port = address.rpartition(":")
    connection = socket.create_connection((host, int(port)), timeout=10)
    connection.sendall(_GREETING)
    return connection


def num_files(pid: int) -> int:
    """Count the open files of a process."""
    return len(os.listdir(f"/proc/{pid}/fd"))


def rss_bytes(pid: int) -> int:
    """Resident memory of a process."""
    with open(f"/proc/{pid}/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


async def _main() -> None:
    async with demo_services(*NO_LIMITS) as (service, address):
        report = await exhaust(service, address)
    print(json.dumps(asdict(report), indent=2))  # noqa: T201


if __name__ == "__main__":
    asyncio.run(_main())
