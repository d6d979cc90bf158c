"""Limits of one tenant on the queue, paused requests and pins; and limits of a session.

Each refusal is RESOURCE_EXHAUSTED with a delay and says which limit it was.
"""

import asyncio
from collections.abc import Awaitable
from typing import Any

import grpc
import pytest

from quire.v1 import inference_pb2 as pb
from scheduler_svc.requests.prefixes.prefix_requests import PinLimits
from tests.scheduler.journal_setup import until
from tests.scheduler.pinning import blocks_of, pin, pin_request, unpin
from tests.scheduler.refusals import code_of, refusal_of, retry_delay_s
from tests.scheduler.scripted_worker import ScriptedWorker
from tests.scheduler.serving_site import Site, counting, running_site, tokens_in


async def refused(call: Awaitable[Any], *words: str) -> None:
    error = await refusal_of(call)
    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert (retry_delay_s(error) or 0) > 0
    for each in words:
        assert each in (error.details() or "")


async def busy_worker(site: Site) -> tuple[ScriptedWorker, "asyncio.Task[Any]"]:
    """A worker with one seat, which a request has, and does not answer until it may."""
    worker = await site.add_worker(num_seats=1)
    worker.may_answer.clear()
    running = asyncio.create_task(site.run(counting(10, 2, "running", tenant="first")))
    await until(lambda: len(worker.steps) > 0)
    return worker, running


async def waiting(site: Site, number: int, tenant: str) -> "list[asyncio.Task[Any]]":
    """Queue requests of a tenant, named by it and their number."""
    before = site.engine.scheduler.waiting.num_groups
    tasks = [
        asyncio.create_task(site.run(counting(20, 2, f"{tenant}-{index}", tenant=tenant))) for index in range(number)
    ]
    await until(lambda: site.engine.scheduler.waiting.num_groups == before + number)
    return tasks


async def pause(site: Site, request_id: str) -> pb.PauseResponse:
    response: pb.PauseResponse = await site.inference.Pause(pb.PauseRequest(request_id=request_id))
    return response


async def finished(worker: ScriptedWorker, *tasks: "asyncio.Task[Any]") -> None:
    worker.may_answer.set()
    for task in tasks:
        assert len(tokens_in(await task)) == 2


async def test_a_tenant_that_fills_its_share_of_the_queue_leaves_the_rest_to_others() -> None:
    async with running_site(max_queue_requests=10, limits={"max_queue_share": 0.8}) as site:
        worker, running = await busy_worker(site)
        greedy = await waiting(site, 8, "greedy")
        await refused(site.run(counting(20, 2, tenant="greedy")), "8 requests of this tenant wait", "its share of the")
        others = await waiting(site, 2, "other")
        await refused(site.run(counting(20, 2, tenant="third")), "the queue is full: 10 requests wait")
        await finished(worker, running, *greedy, *others)


async def test_a_tenants_share_of_the_tokens_that_may_wait_is_bounded_too() -> None:
    prompt = pb.TokenIds(ids=[7] * 40)
    async with running_site(max_queue_tokens=100, limits={"max_queue_share": 0.5}) as site:
        worker, running = await busy_worker(site)
        greedy = await waiting(site, 2, "greedy")
        long = counting(20, 2, tenant="greedy")
        long.token_ids.CopyFrom(prompt)
        greedy.append(asyncio.create_task(site.run(long)))
        await until(lambda: site.engine.scheduler.waiting.num_groups == 3)
        await refused(site.run(long), "prompt tokens of this tenant wait")
        long.tenant = "other"
        other = asyncio.create_task(site.run(long))
        await until(lambda: site.engine.scheduler.waiting.num_groups == 4)
        await finished(worker, running, *greedy, other)


async def test_paused_requests_have_a_limit_of_their_own() -> None:
    """3,000 of them once passed a queue that takes 1,000."""
    async with running_site(limits={"max_paused_requests": 3}) as site:
        worker, running = await busy_worker(site)
        tasks = await waiting(site, 4, "a")
        for index in range(3):
            await pause(site, f"a-{index}")
        await refused(pause(site, "a-3"), "3 requests with", "tokens are paused")
        await pause(site, "a-0")  # again is harmless
        await site.inference.Resume(pb.ResumeRequest(request_id="a-0"))
        await pause(site, "a-3")
        await site.inference.Cancel(pb.CancelRequest(request_id="a-1"))
        await pause(site, "a-0")
        for index in (0, 2, 3):
            await site.inference.Resume(pb.ResumeRequest(request_id=f"a-{index}"))
        await finished(worker, running, tasks[0], tasks[2], tasks[3])
        with pytest.raises(grpc.aio.AioRpcError):
            await tasks[1]
        assert site.engine.paused.size() == (0, 0)
        await site.idle()


async def test_a_tenants_share_of_what_may_be_paused_leaves_the_rest_to_others() -> None:
    async with running_site(limits={"max_paused_requests": 4, "max_paused_share": 0.5}) as site:
        worker, running = await busy_worker(site)
        greedy, others = await waiting(site, 3, "greedy"), await waiting(site, 2, "other")
        for request_id in ("greedy-0", "greedy-1"):
            await pause(site, request_id)
        await refused(pause(site, "greedy-2"), "2 requests of this tenant with")
        for request_id in ("other-0", "other-1"):
            await pause(site, request_id)
        for request_id in ("greedy-0", "greedy-1", "other-0", "other-1"):
            await site.inference.Resume(pb.ResumeRequest(request_id=request_id))
        await finished(worker, running, *greedy, *others)


async def test_tokens_of_paused_requests_are_bounded() -> None:
    async with running_site(limits={"max_paused_tokens": 4}) as site:
        worker, running = await busy_worker(site)
        tasks = await waiting(site, 1, "a")
        num_tokens = site.engine.live["a-0"].num_tokens
        more = await waiting(site, 1 + 4 // num_tokens, "b")
        for index in range(4 // num_tokens):
            await pause(site, f"b-{index}")
        await refused(pause(site, "a-0"), "tokens are paused")
        for index in range(4 // num_tokens):
            await site.inference.Resume(pb.ResumeRequest(request_id=f"b-{index}"))
        await finished(worker, running, *tasks, *more)


async def test_a_tenant_pins_no_more_than_its_share_and_all_no_more_than_theirs() -> None:
    limits = PinLimits(max_share=0.5, max_share_per_tenant=0.3)
    async with running_site(pin_limits=limits) as site:
        await site.add_worker(num_blocks=40)
        num_blocks = site.keeper.num_blocks()
        mine, all_of_them = int(num_blocks * 0.3), int(num_blocks * 0.5)
        await pin(site, blocks_of(mine - 2), "most", tenant="greedy")
        await refused(
            site.inference.PinPrefix(pin_request(blocks_of(3, 9000), "more", tenant="greedy")),
            f"the tenant's pins hold {mine - 2} blocks, this one needs 3, and they may have {mine} together",
        )
        await pin(site, blocks_of(2, 9000), "rest", tenant="greedy")
        await pin(site, blocks_of(all_of_them - mine, 20_000), "theirs", tenant="other")
        await refused(site.inference.PinPrefix(pin_request(blocks_of(1, 40_000), tenant="third")), "the pins hold")
        await unpin(site, "most", "greedy")
        await pin(site, blocks_of(1, 40_000), tenant="third")


async def test_a_prefix_beyond_the_share_by_itself_is_refused_for_good() -> None:
    async with running_site(pin_limits=PinLimits(max_share_per_tenant=0.1)) as site:
        await site.add_worker(num_blocks=40)
        with pytest.raises(
            grpc.aio.AioRpcError, match=r"pins may hold 10% of the memory: shorten it to at most"
        ) as error:
            await pin(site, blocks_of(8))
        assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        most = int(site.keeper.num_blocks() * 0.1)
        assert f"at most {most * 16:,}" in (error.value.details() or "")
        assert (await pin(site, blocks_of(most))).prefix.num_blocks == most


async def test_the_number_of_a_tenants_pins_is_bounded() -> None:
    async with running_site(pin_limits=PinLimits(max_per_tenant=2)) as site:
        await site.add_worker(num_blocks=40)
        for index in range(2):
            await pin(site, blocks_of(1, 1000 * index), f"p{index}", tenant="a")
        await refused(
            site.inference.PinPrefix(pin_request(blocks_of(1, 9000), "more", tenant="a")), "has 2 pins, which is the"
        )
        await pin(site, blocks_of(1, 9000), tenant="b")


async def test_a_request_that_does_not_fit_beside_anothers_pins_is_told_to_come_back() -> None:
    async with running_site() as site:
        await site.add_worker(num_blocks=40)
        await pin(site, blocks_of(15), tenant="greedy")
        tokens = 16 * 30
        await refused(
            site.run(counting(10, tokens, tenant="other")), "beside 15 blocks of pinned prefixes", "unpin some"
        )
        await unpin(site, tenant="greedy")
        assert len(tokens_in(await site.run(counting(10, tokens, tenant="other")))) == tokens
        assert await code_of(site.run(counting(10, 16 * 50))) is grpc.StatusCode.INVALID_ARGUMENT


async def test_a_session_has_no_more_requests_open_than_it_may() -> None:
    async with running_site(limits={"max_requests_per_session": 2}) as site:
        worker, running = await busy_worker(site)
        call = site.inference.Session()
        for handle in (1, 2, 3):
            await call.write(pb.SessionRequest(handle=handle, submit=counting(20, 2, tenant="a")))
        events: list[pb.SessionEvent] = []
        while len(events) < 3:
            response = await call.read()
            assert isinstance(response, pb.SessionResponse)
            events += response.events
        (error,) = [each for each in events if each.WhichOneof("event") == "error"]
        assert error.handle == 3
        assert error.error.code == grpc.StatusCode.RESOURCE_EXHAUSTED.value[0]
        assert "the session has 2 requests open, which is the limit" in error.error.message
        worker.may_answer.set()
        await finished(worker, running)
        call.cancel()
