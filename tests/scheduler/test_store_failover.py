"""Real servers behind one address: the primary becomes a replica, and connections to it stay open."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest

from scheduler_svc.journal.leases import Lease
from scheduler_svc.journal.redis_leases import RedisLeases
from scheduler_svc.journal.redis_tail import RedisTail
from scheduler_svc.journal.store import JOURNAL_START, StoreUnavailableError
from tests.scheduler.journal_setup import Writer, redis_store, running_journal, tokens_of, until
from tests.valkey import ValkeyProcess

JOURNAL = "{quire:default}:journal"


class Balancer:
    """Address that new connections reach the primary by, and that leaves the open ones where they are."""

    def __init__(self, path: Path, primary: ValkeyProcess) -> None:
        self.url = f"unix://{path}"
        self._path = path
        self._primary = primary
        self._carrying: set[asyncio.Task[None]] = set()

    def lead_to(self, primary: ValkeyProcess) -> None:
        self._primary = primary

    @asynccontextmanager
    async def listening(self) -> AsyncIterator[None]:
        server = await asyncio.start_unix_server(self._accept, self._path)
        try:
            yield
        finally:
            server.close()
            for task in self._carrying:
                task.cancel()
            await asyncio.gather(*self._carrying, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        near, far = (reader, writer), await asyncio.open_unix_connection(self._primary.socket_path)
        for (source, _), (_, target) in ((near, far), (far, near)):
            self._carrying.add(asyncio.create_task(_carry(source, target)))


async def _carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while data := await reader.read(1 << 16):
            writer.write(data)
    finally:
        writer.close()
        with suppress(OSError):
            await writer.wait_closed()


@pytest.fixture
async def balancer(valkey: ValkeyProcess, tmp_path: Path) -> AsyncIterator[Balancer]:
    each = Balancer(tmp_path / "b", valkey)
    async with each.listening():
        yield each


async def test_a_journal_goes_on_at_the_server_that_leads_now(valkey: ValkeyProcess, balancer: Balancer) -> None:
    with ValkeyProcess() as other:
        async with redis_store(balancer.url) as store, running_journal(store) as journal:
            writer = Writer(journal)
            writer.append()
            await writer.all_durable()
            balancer.lead_to(other)
            valkey.command("REPLICAOF", "127.0.0.1", "1")
            writer.append()
            await writer.all_durable()
            assert other.command("EXISTS", JOURNAL) == b":1\r\n"
            assert writer.durable == [0, 1]
            assert await tokens_of(store) == [1]  # all that is read is read there, too


async def test_what_only_reads_follows_to_the_server_that_leads_now(valkey: ValkeyProcess, balancer: Balancer) -> None:
    leases, tail = RedisLeases(balancer.url), RedisTail(balancer.url)
    us = Lease("us", "us:1")
    with ValkeyProcess() as other:
        assert await leases.hold(us, 60_000) is None
        assert await tail.first() is None
        balancer.lead_to(other)
        other.command("XADD", JOURNAL, "1-0", "e", "", "c", "00000000")
        valkey.command("REPLICAOF", "127.0.0.1", "1")
        with pytest.raises(StoreUnavailableError, match="read-only replica"):
            await leases.hold(us, 60_000)
        assert await leases.hold(us, 60_000) is None
        assert await tail.first() is not None
        await leases.close()
        await tail.close()


async def test_a_read_that_a_change_of_roles_ends_goes_on_at_the_server_that_leads_now(
    valkey: ValkeyProcess, balancer: Balancer
) -> None:
    tail = RedisTail(balancer.url)
    with ValkeyProcess() as other:
        assert await tail.first() is None
        balancer.lead_to(other)
        other.command("XADD", JOURNAL, "1-0", "e", "", "c", "00000000")
        ended = valkey.num_calls("xread")
        reading = asyncio.create_task(tail.read_after(JOURNAL_START, 1))
        await until(lambda: reading.done() or b"blocked_clients:1" in valkey.command("INFO", "clients"))
        valkey.command("REPLICAOF", "127.0.0.1", "1")
        with pytest.raises(StoreUnavailableError, match="UNBLOCKED"):
            await reading
        assert len(await tail.read_after(JOURNAL_START, 1)) == 1
        assert valkey.num_calls("xread") == ended + 1
        await tail.close()
