"""The carrier's end of a fetch: the call stays open as long as plans place what has come, and no longer."""

import asyncio
from typing import cast

from quire.v1 import worker_pb2
from scheduler_svc.workers.block_carrier import BlockCarrier, Peer
from scheduler_svc.workers.worker_link import FetchCall, WorkerLink
from tests.patience import patient
from tests.scheduler.core_cluster import Cluster
from tests.scheduler.test_scheduler_fetching import make_cluster, run
from tests.scheduler.test_scheduler_placing import coming_beside

NUM_BLOCKS = 12


class EndlessCall:
    """Call of a worker to which all blocks come, and that does not end it by itself."""

    def __init__(self) -> None:
        self.is_cancelled = False
        self._has_said = False

    async def read(self) -> object:
        if self._has_said:
            await asyncio.Event().wait()
        self._has_said = True
        return worker_pb2.FetchBlocksResponse(num_blocks=NUM_BLOCKS)

    def cancel(self) -> None:
        self.is_cancelled = True


class Link:
    """Link to a worker that answers each fetch with one call."""

    def __init__(self, call: EndlessCall) -> None:
        self.call = call

    def fetch_blocks(self, request: worker_pb2.FetchBlocksRequest, step_key: str) -> FetchCall:
        return cast(FetchCall, self.call)


def carrier_of(cluster: Cluster, call: EndlessCall) -> BlockCarrier:
    peer = Peer(cast(WorkerLink, Link(call)), "10.0.0.1:1", "i1", "key")
    return BlockCarrier(
        cluster.scheduler.fetches, find_peer=lambda _: peer, current_epoch=lambda: 1, on_end=lambda *_: None
    )


async def test_a_call_is_ended_when_no_step_is_to_place_what_it_keeps() -> None:
    cluster, call = make_cluster(a={}), EndlessCall()
    group, fetch = coming_beside(cluster, 2)
    carried = asyncio.create_task(carrier_of(cluster, call)._carry(fetch))
    cluster.fetches.remove(fetch)
    source = cluster.workers["a"]
    contents = [source.block_kv(block) for block in fetch.blocks]
    cluster.workers["b"].fetches.deliver(fetch.fetch_id, contents, NUM_BLOCKS)
    async with asyncio.timeout(patient(20)):
        while not cluster.scheduler.fetches.is_needed(fetch):  # noqa: ASYNC110 - nobody tells
            await asyncio.sleep(0.001)
    plan = cluster.start("b")
    assert plan is not None and plan.placed
    cluster.scheduler.finish_group(group)
    await asyncio.sleep(0.3)
    assert not call.is_cancelled, "a step in flight places blocks of it"
    run(cluster, "b", 2)
    await asyncio.wait_for(carried, patient(20))
    assert call.is_cancelled
