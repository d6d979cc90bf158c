"""Owner of a slot as the other nodes of a scripted cluster confirm it, or do not."""

import asyncio

import pytest

from scheduler_svc.journal.redis_link import pack
from scheduler_svc.journal.store import StoreUnavailableError
from tests.patience import patient
from tests.scheduler.journal_setup import until
from tests.scheduler.scripted_cluster import (
    K1,
    OTHER_SLOT,
    SLOT,
    THIRD_SLOT,
    Refusal,
    link_to,
    owned,
    scripted_nodes,
)


async def test_an_owner_is_confirmed_by_all_others_that_answer() -> None:
    async with scripted_nodes(4) as (a, b, c, d), link_to(a, b, c, d, repeatable=True) as link:
        owned([a, b, c, d], {SLOT: [a]})
        with pytest.raises(StoreUnavailableError, match=f"no node of the cluster has slot {SLOT}"):
            await link.confirm_owner()  # it is not known yet
        await link.call(pack("GET", K1))
        await link.confirm_owner()
        await until(lambda: b.num_open == c.num_open == d.num_open == 0)
        await b.stop()
        await link.confirm_owner()
        owned([c], {SLOT: [d]})
        with pytest.raises(StoreUnavailableError, match=f"{a.address}: other nodes do not say that it has slot {SLOT}"):
            await link.confirm_owner()
        owned([a, c, d], {SLOT: [d]})
        assert await link.call(pack("GET", K1)) == b"d:{x}1"  # others are asked for it


@pytest.mark.parametrize("said", [{}, {OTHER_SLOT: 0}, None])
async def test_an_owner_is_not_confirmed_where_others_give_the_slot_to_nobody_or_do_not_say(
    said: dict[int, int] | None,
) -> None:
    async with scripted_nodes(2) as (a, b), link_to(a, b) as link:
        owned([a, b], {SLOT: [a], OTHER_SLOT: [a], THIRD_SLOT: [b]})
        await link.call(pack("GET", K1))
        b.says = Refusal("ERR busy") if said is None else {slot: [a] for slot in said}
        with pytest.raises(StoreUnavailableError, match="other nodes do not say"):
            await link.confirm_owner()


async def test_an_owner_is_not_confirmed_by_itself_under_another_name_while_another_node_is_silent() -> None:
    async with scripted_nodes(3) as (a, b, c), link_to(a, b, c) as link:
        owned([a, b, c], {SLOT: [a], THIRD_SLOT: [c]})
        await link.call(pack("GET", K1))
        b.own_id = "a"
        await c.stop()
        with pytest.raises(StoreUnavailableError, match="other nodes do not say"):
            await link.confirm_owner()


async def test_an_owner_is_not_confirmed_where_another_node_says_that_the_slot_is_its_own() -> None:
    async with scripted_nodes(3) as (a, b, c), link_to(a, b, c) as link:
        owned([a, c], {SLOT: [a]})
        owned([b], {SLOT: [b]})
        await link.call(pack("GET", K1))
        with pytest.raises(StoreUnavailableError, match="other nodes do not say"):
            await link.confirm_owner()


async def test_the_only_node_of_a_cluster_confirms_itself_whatever_it_is_called() -> None:
    """Regression: where its URL had another name for it than it tells, the journal took no entry for ever."""
    async with scripted_nodes(2) as (a, b), link_to(a, b) as link:
        owned([a, b], {SLOT: [a]})
        await link.call(pack("GET", K1))
        b.own_id = "a"
        await link.confirm_owner()


async def test_the_only_node_of_a_cluster_needs_no_other_to_confirm_it() -> None:
    async with scripted_nodes(1) as (a,), link_to(a) as link:
        owned([a], {SLOT: [a]})
        await link.call(pack("GET", K1))
        await link.confirm_owner()


async def test_the_only_primary_of_a_cluster_goes_on_though_its_replica_is_gone_and_not_where_that_took_over() -> None:
    """Regression: entries waited for a dead replica for ever, since there was no other node to confirm the primary."""
    async with scripted_nodes(2) as (a, b), link_to(a, b) as link:
        owned([a, b], {SLOT: [a, b], OTHER_SLOT: [a, b]})
        await link.call(pack("GET", K1))
        b.says = {SLOT: [b, a], OTHER_SLOT: [b, a]}  # an administrator's doing
        with pytest.raises(StoreUnavailableError, match="other nodes do not say"):
            await link.confirm_owner()
        owned([a, b], {SLOT: [a, b], OTHER_SLOT: [a, b]})
        await link.call(pack("GET", K1))
        await b.stop()
        await link.confirm_owner()


async def test_silent_nodes_are_not_waited_for_once_most_have_confirmed_the_owner() -> None:
    async with scripted_nodes(5) as (a, b, c, d, e), link_to(a, b, c, d, e, timeout_s=1000.0) as link:
        owned([a, b, c, d, e], {SLOT: [a]})
        await link.call(pack("GET", K1))
        e.may_answer.clear()
        async with asyncio.timeout(patient(10.0)):
            await link.confirm_owner()
        e.may_answer.set()
        await until(lambda: e.num_open == 0)  # nor is its answer read later
        e.may_answer.clear()
        d.may_answer.clear()
        confirming = asyncio.create_task(link.confirm_owner())
        await until(lambda: b.num_asked_for_slots() == c.num_asked_for_slots() == 2)
        await asyncio.sleep(0.05)
        assert not confirming.done()  # two of four are not most
        confirming.cancel()
