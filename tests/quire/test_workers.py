"""Workers seen and taken out of service by SDK and command line."""

import pytest

import quire
from tests.quire.scripted_server import ScriptedServer
from tests.quire.test_cli import run


async def test_a_worker_is_drained_and_taken_back(server: ScriptedServer, client: quire.AsyncClient) -> None:
    assert await client.drain_worker("w0") == 2
    assert [worker.draining for worker in (await client.stats()).workers] == [True]
    assert await client.drain_worker("w0", undo=True) == 2
    assert [worker.draining for worker in (await client.stats()).workers] == [False]


async def test_a_worker_that_is_not_here_cannot_be_drained(client: quire.AsyncClient) -> None:
    with pytest.raises(quire.NotFoundError, match="no worker 'w7' is connected"):
        await client.drain_worker("w7")


async def test_workers_are_listed_drained_and_taken_back_on_the_command_line(server: ScriptedServer) -> None:
    listed = await run("workers", "-a", server.address)
    assert listed.exit_code == 0
    assert listed.stdout.splitlines()[1].split() == ["w0", "127.0.0.1:1", "2", "30/100", "no"]
    drained = await run("workers", "drain", "w0", "-a", server.address)
    assert (drained.exit_code, drained.stdout) == (0, "w0: draining, 2 sequences still run there\n")
    assert (await run("workers", "-a", server.address)).stdout.splitlines()[1].split()[-1] == "yes"
    undone = await run("workers", "drain", "w0", "--undo", "-a", server.address)
    assert (undone.exit_code, undone.stdout, server.is_draining) == (0, "w0: in service\n", False)
    missing = await run("workers", "drain", "w7", "-a", server.address)
    assert missing.exit_code == 1 and "no worker 'w7' is connected" in missing.stderr
