"""Requests of a scheduler that leads one of several shards: by which numbers they came, what others learn of them."""

import asyncio

import pytest

from quire.errors import NotFoundError, ShardsChangedError, UnavailableError
from quire.v1 import inference_pb2 as pb
from scheduler_svc.journal.shard_plan import ShardPlan
from scheduler_svc.leadership.settling import Settling
from tests.scheduler.gated_store import GatedStore
from tests.scheduler.journal_setup import until
from tests.scheduler.mortal_sites import Lives
from tests.scheduler.serving_site import counting, running_site
from tests.scheduler.test_kept_records import GatedRecords
from tests.scheduler.test_shard_plan import Leader

PLAN = ShardPlan.first(1).with_wanted(2).with_ready()  # version 3
LONG_PROMPT = range(2, 202)  # 800 bytes: three beginnings


async def test_a_request_that_was_sent_here_by_other_numbers_is_refused_and_comes_in_by_ours() -> None:
    async with running_site(shards=Leader(ShardPlan.first(2))) as site:
        await site.add_worker()
        with pytest.raises(ShardsChangedError) as caught:
            await site.admission.submit(counting(10, request_id="r"), None, 2)
        assert caught.value.version == 1 and site.admission.num_refused == 1
        for version, is_attached in ((1, False), (2, True), (0, True)):  # it is here, whatever numbers say
            _, accepted = await site.admission.submit(counting(10, request_id="r"), None, version)
            assert accepted.attached is is_attached
            await site.idle()
        assert site.engine.num_admitted == 1


async def test_a_shard_without_workers_says_that_numbers_have_changed_too() -> None:
    """Regression: a removed shard gets no workers any more, and its next leader let clients wait for one for ever."""
    async with running_site(shards=Leader(ShardPlan.first(2))) as site:
        with pytest.raises(ShardsChangedError):
            await site.admission.submit(counting(10, request_id="r"), None, 2)
        with pytest.raises(UnavailableError, match="no worker has registered yet"):
            await site.admission.submit(counting(10, request_id="r"), None, 1)


async def test_who_looks_for_an_id_by_numbers_that_are_known_here_finds_deleted_records_too() -> None:
    """Ids of deleted records stay taken, in whichever shard a client would put the request now."""
    async with running_site(shards=Leader(PLAN)) as site:
        await site.add_worker()
        await site.run(counting(10, request_id="r"))
        await site.idle()
        await site.control.delete_record("r")
        with pytest.raises(NotFoundError):
            await site.control.response("r")
        for version in (1, PLAN.version):
            assert (await site.control.response("r", version)).state == pb.REQUEST_STATE_FINISHED
        with pytest.raises(ShardsChangedError) as caught:
            await site.control.response("r", PLAN.version + 1)
        assert caught.value.version == PLAN.version


@pytest.mark.parametrize("is_several", [True, False])
async def test_prompts_are_summarised_where_there_are_several_shards(is_several: bool) -> None:
    async with running_site(shards=Leader(PLAN, is_several=is_several)) as site:
        await site.add_worker()
        await site.run(pb.GenerateRequest(token_ids=pb.TokenIds(ids=LONG_PROMPT)))
        assert site.cached is not None
        assert len(site.cached.to_pb().hashes) == (3 * 4 if is_several else 0)


async def test_a_request_is_present_from_the_first_moment_to_its_end_under_every_leader() -> None:
    """A shard is not forgotten before, though its requests may wait for a model that nobody serves."""
    store = GatedStore()
    lives = Lives(store)
    try:
        site = await lives.begin()
        worker = await site.add_worker()
        worker.may_answer.clear()
        assert site.control.present_ids() == set()
        store.may_append.clear()
        request = counting(10, request_id="r", on_disconnect=pb.ON_DISCONNECT_CONTINUE)
        coming = asyncio.create_task(site.admission.submit(request, None))
        await until(lambda: store.num_waiting == 1)
        assert site.control.present_ids() == {"r"} and not site.engine.live
        store.may_append.set()
        await coming
        assert site.control.present_ids() == {"r"} and not site.control.submissions
        await lives.die()
        site = await lives.begin()
        assert site.control.present_ids() == {"r"} and not site.engine.live
        await site.add_worker()
        await site.idle()
        await until(lambda: not site.records.num_pending)
        assert site.control.present_ids() == set()
    finally:
        await lives.close()


async def test_a_former_number_of_shards_is_known_as_long_as_records_of_then_are_not_written_yet() -> None:
    """Regression: it was forgotten when the records would have expired, had they been written at once."""
    store, ttl_s = GatedRecords(), 60.0
    settling = Settling(ttl_s)
    async with running_site(store, shards=Leader(PLAN)) as site:
        await site.add_worker()
        store.may_put.clear()
        await site.run(counting(10, request_id="r"))
        await site.idle()
        settling.update(ShardPlan.first(1), site.control.present_ids, 0.0)
        for now_s in (1.0, ttl_s + 7.0):
            settling.update(PLAN, site.control.present_ids, now_s)
        store.may_put.set()
        await until(lambda: not site.records.num_pending)
        assert settling.settled_version == 0
        for later_s, version in ((0.0, 0), (ttl_s + 4.0, 0), (ttl_s + 6.0, PLAN.version)):
            settling.update(PLAN, site.control.present_ids, 100.0 + later_s)
            assert settling.settled_version == version
