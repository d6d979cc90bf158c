"""A written list of addresses stands for every server behind it."""

from quire.address import resolve, split_addresses

ADDRESSES_OF = {"scheduler": ["10.0.0.1", "10.0.0.2", "fd00::1"], "alone": ["10.0.0.9"]}


async def look_up(host: str, port: int) -> list[str]:
    if host not in ADDRESSES_OF:
        raise OSError("no such name")
    return ADDRESSES_OF[host]


async def test_a_name_with_several_addresses_is_replaced_by_them() -> None:
    found = await resolve(["scheduler:7847", "10.0.0.2:7847"], look_up)
    assert found == ["10.0.0.1:7847", "10.0.0.2:7847", "[fd00::1]:7847"]


async def test_what_has_one_address_or_none_stays_as_it_was_written() -> None:
    written = ["alone:1", "unknown:2", "127.0.0.1:3", "[::1]:4", "localhost:5", "unix:/tmp/socket"]
    assert await resolve(written, look_up) == written


def test_a_list_has_commas() -> None:
    assert split_addresses(" a:1, b:2,,") == ["a:1", "b:2"]
