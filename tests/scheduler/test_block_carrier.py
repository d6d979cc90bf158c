"""The carrier's end of a fetch: the call stays open as long as plans place what has come, and no longer."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any, cast

import grpc
import pytest

from quire.v1 import worker_pb2
from scheduler_svc.core.group_state import GroupState
from scheduler_svc.workers import block_carrier
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


class StallingWorker:
    """Worker to which some blocks come, and no more. It answers fetches alone."""

    def __init__(self, num_come: int) -> None:
        self._num_come = num_come
        self.ended = asyncio.Event()  # the call: nothing of it is kept any more

    async def fetch(
        self, request: worker_pb2.FetchBlocksRequest, context: Any
    ) -> AsyncIterator[worker_pb2.FetchBlocksResponse]:
        try:
            yield worker_pb2.FetchBlocksResponse(num_blocks=self._num_come)
            await asyncio.Event().wait()
        finally:
            self.ended.set()


def carrier_of(cluster: Cluster, call: EndlessCall, **options: Any) -> BlockCarrier:
    return carrier_over(cluster, cast(WorkerLink, Link(call)), **options)


def carrier_over(cluster: Cluster, link: WorkerLink, **options: Any) -> BlockCarrier:
    peer = Peer(link, "10.0.0.1:1", "i1", "key")
    return BlockCarrier(
        cluster.scheduler.fetches, find_peer=lambda _: peer, current_epoch=lambda: 1, on_end=lambda *_: None, **options
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


async def test_workers_are_woken_when_a_destination_has_placed_nothing_for_too_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A hung destination: nobody else asks another worker to start the group."""
    monkeypatch.setattr(block_carrier, "KEPT_FOR_S", 0.0)
    cluster, call = make_cluster(a={}), EndlessCall()
    group, fetch = coming_beside(cluster, 2)
    states: list[GroupState] = []
    carrier = carrier_of(cluster, call, wake_workers=lambda: states.append(group.state))
    await asyncio.wait_for(carrier._carry(fetch), patient(20))
    assert states == [GroupState.WAITING] and call.is_cancelled


async def test_what_came_before_a_fetch_stalled_is_kept_until_a_step_has_placed_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(block_carrier, "STALLED_AFTER_S", 1.0)
    server, worker = grpc.aio.server(), StallingWorker(num_come=5)
    fetching = grpc.unary_stream_rpc_method_handler(
        worker.fetch, worker_pb2.FetchBlocksRequest.FromString, worker_pb2.FetchBlocksResponse.SerializeToString
    )
    server.add_generic_rpc_handlers(
        [grpc.method_handlers_generic_handler("quire.v1.Worker", {"FetchBlocks": fetching})]
    )
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    link = WorkerLink(f"127.0.0.1:{port}")
    await link._channel.channel_ready()
    cluster = make_cluster(a={})
    _, fetch = coming_beside(cluster, NUM_BLOCKS)
    carried = asyncio.create_task(carrier_over(cluster, link)._carry(fetch))
    try:
        async with asyncio.timeout(patient(20)):
            while not fetch.num_come:  # noqa: ASYNC110 - nobody tells
                await asyncio.sleep(0.001)
        await asyncio.sleep(0.2)
        assert fetch.num_come == 5 and not worker.ended.is_set(), "the next step is to place them"
        cluster.fetches.remove(fetch)
        contents = [cluster.workers["a"].block_kv(block) for block in fetch.blocks[:5]]
        cluster.workers["b"].fetches.deliver(fetch.fetch_id, contents, NUM_BLOCKS)
        run(cluster, "b", 2)
        await asyncio.wait_for(carried, patient(20))
        await asyncio.wait_for(worker.ended.wait(), patient(20))
    finally:
        carried.cancel()
        await link.close()
        await server.stop(None)
