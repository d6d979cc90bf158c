"""Shards seen and their number changed by SDK and command line, on a server whose answers are scripted."""

import quire
from quire.shards import ShardNumbers, places_of_id, shard_of_id
from tests.quire.scripted_server import ScriptedServer
from tests.quire.test_cli import run


async def test_the_number_of_shards_is_changed_by_the_sdk(server: ScriptedServer, client: quire.AsyncClient) -> None:
    assert await client.set_shards(3) == 1 and server.num_shards_wanted == 3


async def test_shards_are_listed_and_their_number_changed_on_the_command_line(server: ScriptedServer) -> None:
    listed = await run("shards", "-a", server.address)
    assert listed.exit_code == 0
    assert listed.stdout.splitlines()[1].split() == ["0", server.address, "1", "2", "1", "yes"]  # by its statistics
    more = await run("shards", "3", "-a", server.address)
    assert (more.exit_code, server.num_shards_wanted) == (0, 3)
    assert more.stdout == "1 shard takes new requests; 3 will when each new one has a leader and a worker\n"
    same = await run("shards", "1", "-a", server.address)
    assert (same.stdout, server.num_shards_wanted) == ("1 shard takes new requests\n", 1)
    for number in ("0", "1000", "5000000000", "-1"):
        wrong = await run("shards", "-a", server.address, "--", number)
        assert wrong.exit_code == 2 and wrong.stderr == f"quire: N: is {number}: give 1 to 999\n"


def test_an_id_is_looked_for_where_it_was_by_earlier_numbers_and_where_shards_are_left() -> None:
    moved = next(name for name in (f"ours-{n}" for n in range(99)) if [shard_of_id(name, k) for k in (2, 3)] == [1, 2])
    assert places_of_id(moved, ShardNumbers(version=3, num_shards=3, num_kept=3)) == [2]
    assert places_of_id(moved, ShardNumbers(version=3, num_shards=3, num_kept=3, former=(2, 1))) == [2, 1, 0]
    assert places_of_id(moved, ShardNumbers(version=4, num_shards=1, num_kept=2, former=(3, 2))) == [0, 1]
