"""Injected faults, against processes of its own: a time of day that is set, and connections that stay half-open."""

import asyncio
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

from tests.chaos.proxy import Proxy
from tests.chaos.wall_clocks import WallClocks
from tests.patience import patient
from tests.scheduler.journal_setup import until

TELL = """
import sys, threading, time
for _ in sys.stdin:
    began_s = time.perf_counter()
    threading.Event().wait(0.05)
    waited_s = time.perf_counter() - began_s
    print(time.time(), time.time_ns() / 1e9, time.monotonic(), waited_s, flush=True)
"""
HOUR_S = 3600.0
WITHIN_S = 600.0  # on any machine


def test_the_time_of_day_of_a_process_is_set_while_it_runs_and_nothing_else(tmp_path: Path) -> None:
    clock = WallClocks(tmp_path).make("one")
    with subprocess.Popen(
        [sys.executable, "-c", TELL], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=clock.env
    ) as process:
        assert process.stdin is not None and process.stdout is not None
        told = []
        for hours in (0.0, 5.0, -4.0):
            clock.set_ahead(hours)
            process.stdin.write("\n")
            process.stdin.flush()
            told.append([float(each) for each in process.stdout.readline().split()])
        process.stdin.close()
    start, ahead, behind = told
    for index in (0, 1):
        assert abs(ahead[index] - start[index] - 5 * HOUR_S) < WITHIN_S
        assert abs(behind[index] - start[index] + 4 * HOUR_S) < WITHIN_S
    assert 0 <= ahead[2] - start[2] < WITHIN_S and 0 <= behind[2] - ahead[2] < WITHIN_S
    assert all(0.04 < each[3] < WITHIN_S for each in told)


async def test_a_connection_that_lost_something_stays_half_open_and_a_new_one_passes() -> None:
    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while line := await reader.readline():
            writer.write(line)
        writer.close()

    async with await asyncio.start_server(echo, "127.0.0.1", 0) as server:
        host, port = server.sockets[0].getsockname()
        async with Proxy(f"{host}:{port}") as proxy, asyncio.timeout(patient(20.0)):
            reader, writer = await _dialled(proxy)
            writer.write(b"one\n")
            assert await reader.readline() == b"one\n"
            proxy.swallow("down")
            writer.write(b"two\n")
            await until(lambda: proxy.num_half_open == 1)
            proxy.heal()
            writer.write(b"three\n")
            other_reader, other_writer = await _dialled(proxy)
            other_writer.write(b"four\n")
            assert await other_reader.readline() == b"four\n"
            writer.write_eof()
            proxy.cut()  # until then not even the server's end arrives
            with suppress(ConnectionError):
                assert await reader.read() == b""  # what the server said since is gone
            other_writer.close()
            writer.close()
    assert (proxy.num_connections, proxy.num_half_open) == (2, 1)


async def _dialled(proxy: Proxy) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, _, port = proxy.address.rpartition(":")
    return await asyncio.open_connection(host, int(port))
