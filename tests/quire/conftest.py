"""A scripted server and a client of it; the data folder of a deployment."""

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio

import quire
from quire.cli.supervisor.data_folder import DataFolder
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


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[DataFolder]:
    made = DataFolder(tmp_path / "data")
    yield made
    made.close()
