"""Link to a cluster of scripted nodes: where commands go, what is sent again, and what a failure concerns."""

import asyncio
import time

import pytest

from scheduler_svc.journal.redis_link import pack
from scheduler_svc.journal.store import StoreConfigurationError, StoreUnavailableError
from tests.scheduler.journal_setup import until
from tests.scheduler.scripted_cluster import (
    CUT,
    K1,
    K2,
    K3,
    OTHER,
    OTHER_SLOT,
    PING,
    SLOT,
    THIRD,
    THIRD_SLOT,
    Refusal,
    get,
    link_to,
    owned,
    scripted_nodes,
)


async def test_commands_go_to_the_node_of_their_slot_which_is_asked_for_once() -> None:
    async with scripted_nodes(2) as (a, b), link_to(a) as link:
        owned([a, b], {SLOT: [b]})
        assert await link.call(pack("GET", K1)) == b"b:{x}1"
        assert await link.call_many(get(K1, K2), then=[PING]) == [b"b:{x}1", b"b:{x}2", b"b:PING"]
        assert a.commands == ["CLUSTER SLOTS"]
        await until(lambda: a.num_open == 0)  # it has none of our slots
        assert b.num_open == 1


async def test_a_slot_that_was_moved_is_where_it_was_told_to_be_from_then_on() -> None:
    async with scripted_nodes(2) as (a, b), link_to(a) as link:
        owned([a, b], {SLOT: [a]})
        a.refusals[K1] = [f"MOVED {SLOT} {b.address}"]
        assert await link.call_many(get(K1), then=[PING]) == [b"b:{x}1", b"b:PING"]
        await until(lambda: a.num_open == 0)
        assert await link.call(pack("GET", K2)) == b"b:{x}2"
        assert a.reads() == ["GET {x}1", "PING"] and a.num_asked_for_slots() == 1


async def test_who_writes_in_order_is_told_of_a_move_and_goes_there_next() -> None:
    async with scripted_nodes(2) as (a, b), link_to(a, reports_moves=True) as link:
        owned([a, b], {SLOT: [a]})
        a.refusals[K1] = [f"MOVED {SLOT} {b.address}"]
        with pytest.raises(StoreUnavailableError, match=f"{a.address}: slot {SLOT} was moved to {b.address}"):
            await link.call(pack("GET", K1))
        assert b.commands == []
        assert await link.call(pack("GET", K1)) == b"b:{x}1"
        assert a.num_asked_for_slots() == 1


async def test_while_a_slot_is_moved_each_command_is_done_where_its_key_is() -> None:
    async with scripted_nodes(2) as (a, b), link_to(a) as link:
        owned([a, b], {SLOT: [a]})
        a.refusals[K2], a.refusals[K3] = [[f"ASK {SLOT} {b.address}"] for _ in range(2)]
        b.asked_first = {K2, K3}
        assert await link.call_many(get(K1, K2, K3)) == [b"a:{x}1", b"b:{x}2", b"b:{x}3"]
        assert b.commands == ["ASKING", "GET {x}2", "ASKING", "GET {x}3"]
        assert await link.call(pack("GET", K1)) == b"a:{x}1"  # it is not moved yet


async def test_what_is_asked_behind_commands_is_asked_where_they_are_done() -> None:
    async with scripted_nodes(2) as (a, b), link_to(a) as link:
        owned([a, b], {SLOT: [a]})
        a.refusals[K1], a.refusals[K2] = [[f"ASK {SLOT} {b.address}"] for _ in range(2)]
        b.asked_first = {K1, K2}
        assert await link.call_many(get(K1, K2), then=[PING]) == [b"b:{x}1", b"b:{x}2", b"b:PING"]
        assert b.commands[-2:] == ["GET {x}2", "PING"]
        a.refusals[K2] = [f"ASK {SLOT} {b.address}"]
        with pytest.raises(StoreUnavailableError, match=f"slot {SLOT} is being moved to another node"):
            await link.call_many(get(K1, K2), then=[PING])


async def test_commands_that_were_sent_to_several_places_are_each_done_in_its_own() -> None:
    async with scripted_nodes(3) as (a, b, c), link_to(a) as link:
        owned([a, b, c], {SLOT: [a]})
        a.refusals[K1] = [f"ASK {SLOT} {b.address}"]
        a.refusals[K2] = [f"ASK {SLOT} {c.address}"]
        a.refusals[K3] = [f"MOVED {SLOT} {b.address}"]
        assert await link.call_many(get(K1, K2, K3)) == [b"b:{x}1", b"c:{x}2", b"b:{x}3"]
        assert b.commands == ["ASKING", "GET {x}1", "GET {x}3"] and c.commands == ["ASKING", "GET {x}2"]


async def test_keys_that_are_on_two_nodes_are_asked_for_again_a_while() -> None:
    async with scripted_nodes(1) as (a,), link_to(a) as link:
        owned([a], {SLOT: [a]})
        a.refusals[K1] = ["TRYAGAIN"] * 3
        began_s = time.monotonic()
        assert await link.call(pack("GET", K1)) == b"a:{x}1"
        assert time.monotonic() - began_s > 0.05  # not as fast as it can
        assert a.reads() == ["GET {x}1"] * 4
        a.refusals[K1] = ["TRYAGAIN"] * 1000
        with pytest.raises(StoreUnavailableError, match=f"{a.address}: the keys of slot {SLOT} are not at one node"):
            await link.call(pack("GET", K1))
        assert len(a.reads()) == 4 + 17
        assert a.num_asked_for_slots() == 1


async def test_after_a_node_says_that_the_cluster_is_down_another_is_asked_for_the_slot() -> None:
    async with scripted_nodes(2) as (a, b), link_to(b, a) as link:
        a.says, b.says = {SLOT: [b]}, {SLOT: [a]}
        a.refusals[K1] = ["CLUSTERDOWN Hash slot not served"]
        with pytest.raises(StoreUnavailableError, match=f"{a.address}: the cluster is down"):
            await link.call(pack("GET", K1))
        assert (a.num_asked_for_slots(), b.num_asked_for_slots()) == (0, 1)
        b.says = {SLOT: [b]}
        assert await link.call(pack("GET", K1)) == b"b:{x}1"
        assert b.num_asked_for_slots() == 2


@pytest.mark.parametrize("repeatable", [False, True])
async def test_after_a_node_died_another_is_asked_for_its_slot_in_the_same_call_only_if_that_is_harmless(
    repeatable: bool,
) -> None:
    async with scripted_nodes(2) as (a, b), link_to(a, b, repeatable=repeatable) as link:
        owned([a, b], {SLOT: [a, b]})
        await link.call(pack("GET", K1))
        await a.stop()
        b.says = {SLOT: [b]}
        if not repeatable:
            with pytest.raises(StoreUnavailableError, match=a.address):
                await link.call(pack("GET", K1))
        assert await link.call(pack("GET", K1)) == b"b:{x}1"
        await b.stop()
        with pytest.raises(StoreUnavailableError):
            await link.call(pack("GET", K1))


async def test_a_command_is_sent_once_though_the_connection_is_cut_meanwhile() -> None:
    async with scripted_nodes(1) as (a,), link_to(a) as link:
        owned([a], {SLOT: [a]})
        a.refusals[K1] = [CUT]
        with pytest.raises(StoreUnavailableError, match=a.address):
            await link.call(pack("GET", K1))
        assert a.reads() == ["GET {x}1"]


async def test_what_may_be_repeated_is_sent_once_more_and_only_after_a_failure() -> None:
    async with scripted_nodes(1) as (a,), link_to(a, repeatable=True) as link:
        owned([a], {SLOT: [a]})
        assert await link.call(pack("GET", K1)) == b"a:{x}1"
        assert a.reads() == ["GET {x}1"]
        a.refusals[K2] = ["CLUSTERDOWN"] * 1000
        with pytest.raises(StoreUnavailableError, match="the cluster is down"):
            await link.call(pack("GET", K2))
        assert a.reads() == ["GET {x}1", "GET {x}2", "GET {x}2"]


async def test_one_server_is_no_cluster_and_is_not_asked_again() -> None:
    async with scripted_nodes(1) as (a,), link_to(a, repeatable=True) as link:
        a.says = Refusal("ERR This instance has cluster support disabled")
        with pytest.raises(StoreConfigurationError, match=f"{a.address} is no cluster: write redis://"):
            await link.call(pack("GET", K1))
        assert a.num_asked_for_slots() == 1
        a.says = Refusal("ERR busy")
        with pytest.raises(StoreUnavailableError, match="busy"):
            await link.call(pack("GET", K1))


async def test_a_refusal_of_the_command_itself_is_raised_after_all_replies_were_read() -> None:
    async with scripted_nodes(1) as (a,), link_to(a) as link:
        owned([a], {SLOT: [a]})
        a.refusals[K1] = ["OOM no memory"]
        with pytest.raises(StoreUnavailableError, match="it is full"):
            await link.call_many(get(K1, K2))
        assert await link.call(pack("GET", K3)) == b"a:{x}3"
        assert a.num_asked_for_slots() == 1


async def test_batches_of_several_slots_go_to_their_nodes_together() -> None:
    async with scripted_nodes(2) as (a, b), link_to(a) as link:
        owned([a, b], {SLOT: [b], OTHER_SLOT: [a], THIRD_SLOT: [b]})
        for _ in range(2):
            batches = [get(K1, K2), [], get(THIRD)]
            assert await link.call_each(batches) == [[b"b:{x}1", b"b:{x}2"], [], [b"b:{z}1"]]
        assert (a.num_asked_for_slots(), b.num_asked_for_slots()) == (1, 0)
        b.refusals[THIRD] = [f"MOVED {THIRD_SLOT} {a.address}"]
        b.refusals[K2] = ["OOM no memory"]
        refused, other, moved = await link.call_each([get(K1, K2), get(OTHER), get(THIRD)])
        assert isinstance(refused, StoreUnavailableError) and "it is full" in refused.message
        assert (other, moved) == ([b"a:{y}1"], [b"a:{z}1"])
        num_read = len(b.reads())
        assert await link.call_each([[], [], get(THIRD)]) == [[], [], [b"a:{z}1"]]
        assert len(b.reads()) == num_read  # where it was moved to is known


async def test_a_batch_has_no_answer_where_its_node_fails_or_nobody_has_its_slot_and_the_others_have_theirs() -> None:
    async with scripted_nodes(2) as (a, b), link_to(a) as link:
        owned([a, b], {SLOT: [a], OTHER_SLOT: [b]})
        first, other, nobodys = await link.call_each([get(K1), get(OTHER), get(THIRD)])
        assert (first, other) == ([b"a:{x}1"], [b"b:{y}1"])
        assert isinstance(nobodys, StoreUnavailableError)
        assert nobodys.message == f"no node of the cluster has slot {THIRD_SLOT}"
        await b.stop()
        first, failed, _ = await link.call_each([get(K1), get(OTHER), []])
        assert first == [b"a:{x}1"] and isinstance(failed, StoreUnavailableError) and b.address in failed.message
        a.says = Refusal("ERR busy")
        first, failed, _ = await link.call_each([get(K1), get(OTHER), []])
        assert first == [b"a:{x}1"] and isinstance(failed, StoreUnavailableError)


async def test_a_batch_whose_keys_stay_on_two_nodes_fails_alone() -> None:
    async with scripted_nodes(1) as (a,), link_to(a) as link:
        owned([a], {SLOT: [a], OTHER_SLOT: [a]})
        a.refusals[K1] = ["TRYAGAIN"] * 1000
        failed, other, _ = await link.call_each([get(K1), get(OTHER), []])
        assert isinstance(failed, StoreUnavailableError) and other == [b"a:{y}1"]


async def test_all_nodes_that_keep_a_slot_answer_by_their_addresses() -> None:
    async with scripted_nodes(4) as (a, b, c, d), link_to(a) as link:
        owned([a], {SLOT: [b, c, d]})
        c.refusals["PING"] = ["NOPERM no"]
        await d.stop()
        answers = await link.call_nodes([PING, *get(K1)])
        assert list(answers) == [b.address, c.address, d.address]
        assert answers[b.address] == [b"b:PING", b"b:{x}1"]
        assert isinstance(answers[c.address], StoreConfigurationError)
        failed = answers[d.address]
        assert isinstance(failed, StoreUnavailableError) and d.address in failed.message
        await until(lambda: c.num_open == 0)  # replicas are not asked for anything else
        await link.call_nodes([PING])
        assert a.num_asked_for_slots() == 1


async def test_the_connection_of_a_call_under_way_is_not_closed() -> None:
    async with scripted_nodes(2) as (a, b), link_to(b, a) as link:
        owned([a, b], {SLOT: [a]})
        await link.call(pack("GET", K1))
        a.may_answer.clear()
        waiting = asyncio.create_task(link.call(pack("GET", K2)))
        await until(lambda: a.reads() == ["GET {x}1", "GET {x}2"])
        b.says = {SLOT: [b]}
        with pytest.raises(StoreUnavailableError, match="other nodes do not say"):
            await link.confirm_owner()
        assert await link.call(pack("GET", K1)) == b"b:{x}1"
        a.may_answer.set()
        assert await waiting == b"a:{x}2"


async def test_a_link_that_was_closed_connects_again() -> None:
    async with scripted_nodes(1) as (a,), link_to(a) as link:
        owned([a], {SLOT: [a]})
        await link.call(pack("GET", K1))
        await link.close()
        await until(lambda: a.num_open == 0)
        assert await link.call(pack("GET", K1)) == b"a:{x}1"
