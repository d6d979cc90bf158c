"""A scripted server and a client of it."""

from collections.abc import AsyncIterator

import pytest_asyncio

import quire
from tests.quire.scripted_server import ScriptedServer


@pytest_asyncio.fixture
async def server() -> AsyncIterator[ScriptedServer]:
    scripted = ScriptedServer()
    await scripted.start()
    yield scripted
    await scripted.stop()


@pytest_asyncio.fixture
async def client(server: ScriptedServer) -> AsyncIterator[quire.AsyncClient]:
    async with quire.AsyncClient(server.address) as made:
        yield made
