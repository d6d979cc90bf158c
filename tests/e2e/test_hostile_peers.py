"""Hostile peers of a real scheduler: what they send is bounded, what they go on with is cut, and others are served."""

import asyncio
from functools import partial

import pytest

from tests.hostile.attacks import (
    GENERATE,
    GET_REQUEST,
    SESSION,
    Outcome,
    compressed_bomb,
    connection_flood,
    idle_calls,
    rapid_reset,
    unfinished_bodies,
)
from tests.hostile.besieged import MIB, Besieged, besieged_scheduler
from tests.hostile.raw_connection import RawConnection, message
from tests.patience import patient

UNIMPLEMENTED, RESOURCE_EXHAUSTED = "12", "8"


async def _settled(site: Besieged, before: int) -> None:
    """Wait until the attack has left nothing: the neighbour had all its answers, and memory is back within a tenth."""
    await site.neighbour.until_answered(20)
    assert site.neighbour.failures == []
    assert await site.until_resident_below(1.1 * before) <= 1.1 * before


@pytest.mark.long
async def test_a_compressed_message_is_refused_before_it_is_unpacked() -> None:
    async with besieged_scheduler() as site:
        before = site.peak_bytes = site.resident_bytes
        trailers = await asyncio.to_thread(compressed_bomb, site.address, GET_REQUEST, num_bytes=1000 * MIB)
        assert trailers["grpc-status"] == UNIMPLEMENTED
        assert site.peak_bytes < before + 64 * MIB
        await _settled(site, before)


@pytest.mark.long
@pytest.mark.parametrize("method", [GENERATE, SESSION, GET_REQUEST])
async def test_a_connection_with_many_unfinished_messages_is_cut(method: str) -> None:
    async with besieged_scheduler() as site:
        before = site.peak_bytes = site.resident_bytes
        attack = partial(unfinished_bodies, site.address, method, num_calls=60, num_bytes=15 * MIB, hold_s=30.0)
        outcome: Outcome = await asyncio.to_thread(attack)
        assert outcome.was_cut
        await _settled(site, before)
        # It is looked at ten times a second; meanwhile a neighbour on this machine can send much.
        assert site.peak_bytes < before + 512 * MIB
        assert "no whole message" in site.log_lines("connection cut")[0]


@pytest.mark.long
async def test_unfinished_messages_of_many_connections_together_are_bounded() -> None:
    """12 connections hold 45 MiB each, less than one may have; all may have 128."""
    async with besieged_scheduler("--max-unread-mb", "128") as site:
        before = site.peak_bytes = site.resident_bytes
        attack = partial(unfinished_bodies, site.address, SESSION, num_calls=3, num_bytes=15 * MIB, hold_s=patient(5.0))
        outcomes = await asyncio.gather(*(asyncio.to_thread(attack) for _ in range(12)))
        assert sum(each.was_cut for each in outcomes) >= 12 - 128 // 45 - 1
        await _settled(site, before)


async def test_a_message_that_is_never_finished_is_given_up() -> None:
    async with besieged_scheduler("--body-timeout-s", "0.5") as site:

        def attack() -> str:
            with RawConnection(site.address) as connection:
                call = connection.open_call(GENERATE)
                connection.send(call, message(b"x", length=1000))
                return connection.until_ended(call)["grpc-message"]

        assert "did not arrive completely within 0.5 s" in await asyncio.to_thread(attack)
        assert site.neighbour.failures == []


@pytest.mark.long
@pytest.mark.parametrize("method", [GENERATE, SESSION, GET_REQUEST])
@pytest.mark.parametrize("body", [None, b""])
async def test_a_connection_that_resets_its_calls_again_and_again_is_cut(method: str, body: bytes | None) -> None:
    async with besieged_scheduler("--max-cancel-rate", "20") as site:
        before = site.resident_bytes
        attack = partial(rapid_reset, site.address, method, num_calls=20_000, body=body)
        outcome: Outcome = await asyncio.to_thread(attack)
        assert outcome.was_cut
        again: Outcome = await asyncio.to_thread(attack)
        assert again.was_cut
        assert again.num_calls < 20_000
        await _settled(site, before)


async def test_idle_sessions_beyond_what_a_host_may_have_are_refused_and_say_so() -> None:
    async with besieged_scheduler("--max-sessions-per-host", "50") as site:

        def attack() -> tuple[RawConnection, list[dict[str, str]]]:
            connection, calls = idle_calls(site.address, SESSION, num_calls=80)
            return connection, [connection.until_ended(call) for call in calls[50:]]

        connection, refused = await asyncio.to_thread(attack)
        with connection:
            assert {each["grpc-status"] for each in refused} == {RESOURCE_EXHAUSTED}
            assert "50 calls of Session open" in refused[-1]["grpc-message"]
            assert "grpc-status-details-bin" in refused[-1]
            await site.neighbour.until_answered(20)
        assert site.neighbour.failures == []


async def test_calls_that_come_faster_than_a_connection_may_begin_them_are_refused() -> None:
    """20 may come at once; as many again are refused before the connection is cut."""
    async with besieged_scheduler("--max-call-rate", "10") as site:

        def attack() -> list[dict[str, str]]:
            with RawConnection(site.address) as connection:
                calls = [connection.open_call(GET_REQUEST) for _ in range(38)]
                for call in calls:
                    connection.send(call, message(b"\x0a\x01a"), ends=True)
                return [connection.until_ended(call) for call in calls]

        refused = [each for each in await asyncio.to_thread(attack) if each["grpc-status"] == RESOURCE_EXHAUSTED]
        assert "begins more than 10 calls per second" in refused[0]["grpc-message"]
        await site.neighbour.until_answered(20)
        assert site.neighbour.failures == []


async def test_connections_beyond_the_limit_are_closed_and_those_within_it_go_on() -> None:
    async with besieged_scheduler("--max-connections", "100") as site:
        before = site.resident_bytes
        num_before = site.neighbour.num_answered
        for _ in range(3):
            flood = connection_flood(site.address, num_connections=1000)
            opened = await asyncio.to_thread(flood.__enter__)
            assert opened
            await site.neighbour.until_answered(10)
            flood.__exit__(None, None, None)
        assert site.neighbour.num_answered > num_before
        await _settled(site, before)


async def test_a_peer_of_ipv6_is_cut_too() -> None:
    async with besieged_scheduler("--max-cancel-rate", "5", listen="[::]:0") as site:
        port = site.address.rpartition(":")[2]
        for host in ("::1", "127.0.0.1"):
            outcome = await asyncio.to_thread(rapid_reset, f"{host}:{port}", SESSION, num_calls=20_000)
            assert outcome.was_cut
        await site.neighbour.until_answered(5)
        assert site.neighbour.failures == []
