"""A written list of addresses is taken apart."""

from quire.address import split_addresses


def test_a_list_has_commas() -> None:
    assert split_addresses(" a:1, b:2,,") == ["a:1", "b:2"]
