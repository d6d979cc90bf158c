"""A written list of addresses stands for every server behind it, also while a resolver fails or is silent."""

import asyncio

import pytest

from quire.credentials import Credentials
from quire.errors import NotLeaderError
from quire.host_names import HostNames
from quire.servers import Servers
from tests.patience import patient

ADDRESSES_OF = {"scheduler": ["10.0.0.1", "10.0.0.2", "fd00::1"], "alone": ["10.0.0.9"]}


class ScriptedResolver:
    """Answers with `hosts`; raises them if they are an exception; is silent while it may not answer."""

    def __init__(self, *hosts: str) -> None:
        self.hosts: list[str] | Exception = list(hosts)
        self.may_answer = asyncio.Event()
        self.may_answer.set()
        self.num_looks = 0

    async def look_up(self, host: str, port: int) -> list[str]:
        self.num_looks += 1
        await self.may_answer.wait()
        if isinstance(self.hosts, Exception):
            raise self.hosts
        return self.hosts


async def look_up(host: str, port: int) -> list[str]:
    if host not in ADDRESSES_OF:
        raise OSError("no such name")
    return ADDRESSES_OF[host]


async def test_a_name_with_several_addresses_is_replaced_by_them() -> None:
    found = await HostNames(look_up).resolve(["scheduler:7847", "10.0.0.2:7847"], patient(10))
    assert found == ["10.0.0.1:7847", "10.0.0.2:7847", "[fd00::1]:7847"]


async def test_what_has_one_address_or_none_stays_as_it_was_written() -> None:
    written = ["alone:1", "unknown:2", "127.0.0.1:3", "[::1]:4", "localhost:5", "unix:/tmp/socket"]
    assert await HostNames(look_up).resolve(written, patient(10)) == written


@pytest.mark.parametrize("failure", [OSError("resolver down"), UnicodeError("no name"), OverflowError("too much")])
async def test_a_name_that_cannot_be_looked_up_stays_what_it_was_found_to_be(failure: Exception) -> None:
    resolver = ScriptedResolver("10.0.0.1", "10.0.0.2")
    names = HostNames(resolver.look_up)
    found = await names.resolve(["scheduler:1"], patient(10))
    resolver.hosts = failure
    assert await names.resolve(["scheduler:1", "other:1"], patient(10)) == [*found, "other:1"]
    assert names.failure is not None and str(failure) in names.failure
    resolver.hosts = ["10.0.0.2", "10.0.0.3"]
    assert await names.resolve(["scheduler:1"], patient(10)) == ["10.0.0.2:1", "10.0.0.3:1"]


async def test_a_silent_resolver_is_asked_once_and_what_it_says_later_counts() -> None:
    resolver = ScriptedResolver("10.0.0.1", "10.0.0.2")
    resolver.may_answer.clear()
    names = HostNames(resolver.look_up)
    for _ in range(3):
        assert await names.resolve(["scheduler:1"], 0.01) == ["scheduler:1"]
        assert names.failure == "no answer within 0.01 s"
    assert resolver.num_looks == 1
    resolver.may_answer.set()
    assert await names.resolve(["scheduler:1"], patient(10)) == ["10.0.0.1:1", "10.0.0.2:1"]
    assert names.failure is None


async def test_a_leader_that_was_named_is_followed_though_its_name_cannot_be_looked_up_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Regression: a failed look-up replaced every known address by the name, which any server may answer at."""
    resolver = ScriptedResolver("127.0.0.1", "127.0.0.2")
    servers = Servers("scheduler.invalid:1", Credentials(), names=HostNames(resolver.look_up))
    assert await servers.resolve_again() == ["127.0.0.1:1", "127.0.0.2:1"]
    resolver.hosts = OSError("resolver down")
    assert servers.record_failure(NotLeaderError("not me", "127.0.0.2:1"), was_reached=True)
    monkeypatch.setattr(servers, "_may_resolve_s", 0.0)
    assert await servers.resolve_again() == ["127.0.0.1:1", "127.0.0.2:1"]
    assert resolver.num_looks == 2 and servers.current == "127.0.0.2:1"
    await servers.close()


async def test_channels_to_addresses_that_a_name_has_no_longer_are_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: of pods that come and go, each left a channel for as long as the client lived."""
    resolver = ScriptedResolver("127.0.0.1", "127.0.0.2")
    servers = Servers("scheduler.invalid:1", Credentials(), names=HostNames(resolver.look_up))
    await servers.resolve_again()
    for number in range(3, 9):
        assert len(servers.all_channels) == 2
        resolver.hosts = [f"127.0.0.{number}", f"127.0.0.{number + 1}"]
        monkeypatch.setattr(servers, "_may_resolve_s", 0.0)
        await servers.resolve_again()
    assert set(servers._channels) == {"127.0.0.8:1"}  # which it had before, too
    await servers.close()


async def test_a_client_goes_on_while_the_resolver_is_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: every call waited for the resolver, however short its own limit was."""
    monkeypatch.setattr("quire.servers._RESOLVE_S", 0.01)
    resolver = ScriptedResolver()
    resolver.may_answer.clear()
    servers = Servers("scheduler.invalid:1", Credentials(), names=HostNames(resolver.look_up))
    async with asyncio.timeout(patient(10)):
        await servers.find_reachable()
    assert servers.current == "scheduler.invalid:1" and resolver.num_looks == 1
    await servers.close()


async def test_an_address_that_a_name_was_found_for_has_that_name() -> None:
    """Regression: certificates and proxies that go by names saw addresses alone."""
    resolver = ScriptedResolver("10.0.0.1", "10.0.0.2")
    names = HostNames(resolver.look_up)
    await names.resolve(["scheduler:7847", "10.0.0.9:7847"], patient(10))
    assert names.name_of("10.0.0.2:7847") == "scheduler:7847"
    assert names.name_of("10.0.0.9:7847") is None
