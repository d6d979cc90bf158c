"""ListRequests over the wire: who is listed, in which state, what it waits for, page by page."""

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from quire.errors import UnavailableError
from quire.v1 import cluster_pb2
from quire.v1 import inference_pb2 as pb
from scheduler_svc.core.preemption import PreemptionMode
from scheduler_svc.requests.live.engine import MAX_PENDING_RECORDS
from scheduler_svc.requests.request_list import RequestList
from tests.scheduler.gated_store import GatedStore
from tests.scheduler.journal_setup import until
from tests.scheduler.refusals import refusal_of
from tests.scheduler.scripted_worker import ScriptedWorker
from tests.scheduler.serving_site import Site, counting, running_site

BLOCK = 16  # tokens, of the scripted worker


@pytest.fixture
async def site() -> AsyncIterator[Site]:
    async with running_site() as made:
        yield made


async def page(site: Site, **request: Any) -> pb.ListRequestsResponse:
    return await site.inference.ListRequests(pb.ListRequestsRequest(**request))


async def listed(site: Site, **request: Any) -> dict[str, pb.RequestSummary]:
    return {each.request_id: each for each in (await page(site, **request)).requests}


async def submit(site: Site, *requests: pb.GenerateRequest) -> None:
    """Submit requests one after another, each once the last is accepted; read no output."""
    for request in requests:
        request.on_disconnect = pb.ON_DISCONNECT_CONTINUE
        call = site.inference.Generate(request)
        await anext(aiter(call))
        call.cancel()


async def held_worker(site: Site, **options: Any) -> ScriptedWorker:
    """A worker that answers no step."""
    worker = ScriptedWorker(**options)
    worker.may_answer.clear()
    await site.start_worker(worker)
    return worker


async def drain(site: Site, *, undo: bool = False) -> None:
    await site.cluster.DrainWorker(cluster_pb2.DrainWorkerRequest(worker_id="w1", undo=undo))


async def test_nothing_is_listed_where_nothing_lives(site: Site) -> None:
    await site.add_worker()
    await site.run(counting(10, 3, "done"))
    assert await page(site) == pb.ListRequestsResponse()
    assert not (await record(site, "done")).waiting_for


async def test_a_running_request_is_listed_with_all_that_is_known_of_it(site: Site) -> None:
    worker = await held_worker(site)
    asked = counting(10, 300, "mine", tenant="acme", priority=-2)
    asked.sampling.n = 3
    await submit(site, asked)
    await until(lambda: bool(worker.steps))
    mine = (await listed(site))["mine"]
    assert mine.age_ms < 60_000
    mine.ClearField("age_ms")
    assert mine == pb.RequestSummary(
        request_id="mine",
        tenant="acme",
        state=pb.LIVE_STATE_RUNNING,
        prompt_tokens=1,
        num_samples=3,
        priority=-2,
        worker_id="w1",
    )


async def test_output_and_beams_are_told(site: Site) -> None:
    worker = await site.add_worker()
    await submit(site, counting(10, 300, "drawn"))
    await until(lambda: site.engine.live["drawn"].stream.samples[0].num_released > 2)
    worker.may_answer.clear()
    search = pb.GenerateRequest(request_id="search", token_ids=pb.TokenIds(ids=[3]), beam=pb.BeamParams(beam_width=4))
    await submit(site, search)
    found = await listed(site)
    assert found["drawn"].output_tokens > 2 and not found["drawn"].beam_width
    assert (found["search"].beam_width, found["search"].num_samples) == (4, 1)


async def test_what_is_queued_says_what_it_waits_for(site: Site) -> None:
    await submit_without_worker(site)
    worker = await held_worker(site, num_seats=1)
    await until(lambda: bool(worker.steps))
    await submit(site, counting(30, 3, "second"), counting(40, 3, "third"))
    found = await listed(site)
    assert [found[name].state for name in ("first", "second", "third")] == [
        pb.LIVE_STATE_RUNNING,
        pb.LIVE_STATE_QUEUED,
        pb.LIVE_STATE_QUEUED,
    ]
    assert found["second"].waiting_for == "a free seat: as many requests run as may run at once"
    assert found["third"].waiting_for == "earlier requests"
    assert (await record(site, "third")).waiting_for == "earlier requests"
    assert not (await record(site, "first")).waiting_for


async def submit_without_worker(site: Site) -> None:
    """`first` is accepted, and then its worker is lost."""
    worker = await held_worker(site, worker_id="gone", num_seats=1)
    await submit(site, counting(10, 3, "first"))
    await worker.stop()
    await site.until_nobody_is_left()
    assert (await listed(site))["first"].waiting_for == "a worker: none is connected"


async def record(site: Site, request_id: str) -> pb.GetRequestResponse:
    return await site.inference.GetRequest(pb.GetRequestRequest(request_id=request_id))


async def test_where_all_workers_drain_a_request_says_that_it_waits_for_one(site: Site) -> None:
    await site.add_worker()
    await drain(site)
    await submit(site, counting(10, 3, "waits"))
    waits = (await listed(site))["waits"]
    assert (waits.state, waits.waiting_for) == (pb.LIVE_STATE_QUEUED, "a worker: all are draining")
    assert (await record(site, "waits")).waiting_for == "a worker: all are draining"
    await drain(site, undo=True)
    await until(lambda: not site.engine.live)


async def test_a_request_whose_prompt_has_no_room_waits_for_blocks(site: Site) -> None:
    worker = await held_worker(site, num_blocks=8)
    large = pb.GenerateRequest(request_id="large", token_ids=pb.TokenIds(ids=range(5 * BLOCK)))
    large.stopping.max_tokens = BLOCK
    await submit(site, large)
    await until(lambda: bool(worker.steps))
    other = pb.GenerateRequest(request_id="other", token_ids=pb.TokenIds(ids=range(9, 9 + 5 * BLOCK)))
    other.stopping.max_tokens = BLOCK
    await submit(site, other)
    assert (await listed(site))["other"].waiting_for == "KV blocks"


async def test_a_paused_request_waits_for_its_resumption(site: Site) -> None:
    await held_worker(site)
    await submit(site, counting(10, 300, "paused"))
    await site.inference.Pause(pb.PauseRequest(request_id="paused"))
    paused = (await listed(site))["paused"]
    assert (paused.state, paused.waiting_for) == (pb.LIVE_STATE_PAUSED, "Resume")


async def test_what_the_journal_does_not_have_yet_waits_for_it() -> None:
    store = GatedStore()
    async with running_site(store) as site:
        await site.add_worker()
        store.may_append.clear()
        entering = asyncio.create_task(site.run(counting(10, 3, "entering")))
        await until(lambda: bool(site.admission.entering))
        found = (await listed(site))["entering"]
        assert (found.state, found.waiting_for) == (pb.LIVE_STATE_ENTERING, "the journal")
        await until(lambda: store.num_waiting == 1)
        store.may_append.set()  # wakes the admission's append alone
        store.may_append.clear()
        await until(lambda: site.engine.output_tokens == 3)
        found = (await listed(site))["entering"]
        assert (found.state, found.waiting_for) == (pb.LIVE_STATE_ENDING, "the journal")
        store.may_append.set()
        await entering


async def test_while_no_step_is_computed_since_the_journal_is_behind_all_but_the_paused_wait_for_it() -> None:
    store = GatedStore()
    async with running_site(store) as site:
        worker = await held_worker(site, num_seats=1)
        await submit(site, counting(10, 300, "runs"), counting(20, 300, "queued"), counting(30, 300, "paused"))
        await until(lambda: bool(worker.steps))
        await site.inference.Pause(pb.PauseRequest(request_id="paused"))
        store.may_append.clear()
        many = [7] * MAX_PENDING_RECORDS
        site.journal.append(sequences=many, tokens=many, on_durable=lambda: None)
        told = {name: each.waiting_for for name, each in (await listed(site)).items()}
        assert told == {"runs": "the journal", "queued": "the journal", "paused": "Resume"}
        store.may_append.set()
        await until(lambda: site.journal.num_pending < MAX_PENDING_RECORDS)
        assert not (await listed(site))["runs"].waiting_for


async def test_requests_of_an_earlier_scheduler_wait_for_a_worker_of_their_model() -> None:
    store = GatedStore()
    drawn = counting(10, 300, "old", tenant="acme", priority=-2)
    drawn.sampling.n = 3
    search = pb.GenerateRequest(
        request_id="search", token_ids=pb.TokenIds(ids=[3, 4]), beam=pb.BeamParams(beam_width=4)
    )
    async with running_site(store) as site:
        await held_worker(site)
        await submit(site, drawn, search)
    accepted_s = time.monotonic()
    async with running_site(store, epoch=2) as site:
        assert (await listed(site, tenant="acme")).keys() == {"old"}
        await until(lambda: time.monotonic() > accepted_s + 0.01)
        pages = [await page(site, page_size=1)]
        pages.append(await page(site, page_size=1, page_token=pages[0].next_page_token))
        assert not pages[1].next_page_token
        summaries = [each for one in pages for each in one.requests]
        for each in summaries:
            assert 10 <= each.age_ms < 60_000
            each.ClearField("age_ms")
        waiting: dict[str, Any] = {
            "state": pb.LIVE_STATE_RECOVERING,
            "waiting_for": "a worker of the model that it was accepted for",
        }
        assert summaries == [
            pb.RequestSummary(request_id="old", tenant="acme", prompt_tokens=1, num_samples=3, priority=-2, **waiting),
            pb.RequestSummary(request_id="search", prompt_tokens=2, num_samples=1, beam_width=4, **waiting),
        ]
        assert (await record(site, "old")).waiting_for == waiting["waiting_for"]
        store.may_append.clear()
        cancelling = asyncio.create_task(cancel(site, "old"))
        await until(lambda: store.num_waiting == 1)
        found = await listed(site)
        assert (found["old"].state, found["search"].state) == (pb.LIVE_STATE_ENDING, pb.LIVE_STATE_RECOVERING)
        store.may_append.set()
        await cancelling


async def cancel(site: Site, request_id: str) -> None:
    await site.inference.Cancel(pb.CancelRequest(request_id=request_id))


async def test_who_ends_or_is_refused_while_a_listing_is_made_is_left_out_of_it() -> None:
    """A long listing is made in slices, between which everybody else has a turn."""
    store = GatedStore()
    async with running_site(store, admission_timeout_s=0.05) as site:
        await held_worker(site)
        names = [f"r{number}" for number in range(240)]
        for name in names:
            await site.admission.submit(counting(10, 300, name), None)
        store.may_append.clear()
        entering = asyncio.create_task(site.admission.submit(counting(10, 300, "entering"), None))
        await until(lambda: bool(site.admission.entering))
        making = RequestList(site.engine, site.admission).page(pb.ListRequestsRequest(page_size=1000))
        making.send(None)  # the first slice
        with pytest.raises(UnavailableError):
            await entering
        store.may_append.set()
        for name in (names[0], names[-1]):
            await cancel(site, name)
        await until(lambda: names[-1] not in site.engine.live)
        num_pauses = 1
        with pytest.raises(StopIteration) as made:
            while num_pauses < 20:
                making.send(None)
                num_pauses += 1
        assert [each.request_id for each in made.value.value.requests] == names[:-1]  # the first was listed before


@pytest.mark.parametrize(
    ("preemption", "num_host_blocks", "state"),
    [("recompute", 0, pb.LIVE_STATE_PREEMPTED), ("swap", 8, pb.LIVE_STATE_SWAPPED)],
)
async def test_a_request_that_gave_way_says_how_and_waits_for_blocks(
    preemption: PreemptionMode, num_host_blocks: int, state: pb.LiveState.ValueType
) -> None:
    """Both have 4 of the 8 blocks until they have 64 tokens."""
    async with running_site(preemption=preemption) as site:
        worker = ScriptedWorker(num_blocks=8)
        worker.description.pool.num_host_blocks = num_host_blocks
        worker.silence_after(70)
        await site.start_worker(worker)
        await submit(site, counting(10, 100, "first"), counting(20, 100, "second"))
        await until(lambda: not worker.may_answer.is_set())
        found = await listed(site)
        assert (found["first"].state, found["first"].waiting_for) == (pb.LIVE_STATE_RUNNING, "")
        assert (found["second"].state, found["second"].waiting_for) == (state, "KV blocks")


async def test_while_the_store_does_not_answer_who_runs_waits_for_the_journal_and_others_for_what_they_did() -> None:
    store = GatedStore()
    async with running_site(store) as site:
        worker = await held_worker(site, num_seats=1)
        await submit(site, counting(10, 300, "runs"), counting(20, 300, "queued"), counting(30, 300, "paused"))
        await until(lambda: bool(worker.steps))
        await site.inference.Pause(pb.PauseRequest(request_id="paused"))
        reasons = {name: each.waiting_for for name, each in (await listed(site)).items()}
        assert not reasons["runs"]
        store.unavailable = True
        worker.silence_after(20)  # of 300 tokens, whatever time the store takes to come back
        worker.may_answer.set()  # and its tokens are for the journal
        await until(lambda: site.engine.journal.health.is_degraded)
        told = {name: each.waiting_for for name, each in (await listed(site)).items()}
        assert told == {**reasons, "runs": "the journal"}
        store.unavailable = False
        await until(lambda: not site.engine.journal.health.is_degraded)
        assert not (await listed(site))["runs"].waiting_for


async def test_pages_give_each_request_once_in_the_order_of_arrival(site: Site) -> None:
    await held_worker(site, num_seats=3)
    names = [f"r{number}" for number in range(7)]
    await submit(site, *(counting(10 + number, 300, name) for number, name in enumerate(names)))
    seen: list[str] = []
    sizes: list[int] = []
    token = ""
    while token or not sizes:
        answer = await page(site, page_size=3, page_token=token)
        sizes.append(len(answer.requests))
        seen += [each.request_id for each in answer.requests]
        token = answer.next_page_token
    assert (seen, sizes) == (names, [3, 3, 1])


async def test_a_last_page_that_is_full_says_that_it_is_the_last(site: Site) -> None:
    await held_worker(site)
    await submit(site, counting(10, 300, "a"), counting(20, 300, "b"))
    assert not (await page(site, page_size=2)).next_page_token


async def test_pages_are_100_requests_unless_asked_for_and_never_more_than_1000(site: Site) -> None:
    await held_worker(site, num_blocks=2048, num_seats=4)
    submitting = [asyncio.create_task(site.run(counting(10, 3, f"r{number}"))) for number in range(1001)]
    await until(lambda: len(site.engine.live) == 1001, 60)
    assert len((await page(site)).requests) == 100
    assert len((await page(site, page_size=2_000_000)).requests) == 1000
    for each in submitting:
        each.cancel()
    await asyncio.gather(*submitting, return_exceptions=True)


async def test_a_listing_can_be_of_one_tenant_and_of_some_states(site: Site) -> None:
    worker = await held_worker(site, num_seats=1)
    await submit(site, counting(10, 300, "runs", tenant="a"))
    await until(lambda: bool(worker.steps))
    await submit(
        site, counting(20, 300, "waits", tenant="a"), counting(30, 300, "other", tenant="b"), counting(40, 300, "none")
    )
    assert set(await listed(site, tenant="a")) == {"runs", "waits"}
    assert set(await listed(site, tenant="")) == {"none"}
    assert set(await listed(site, states=[pb.LIVE_STATE_QUEUED], tenant="a")) == {"waits"}
    assert set(await listed(site, states=[pb.LIVE_STATE_PAUSED, pb.LIVE_STATE_RUNNING])) == {"runs"}


@pytest.mark.parametrize(
    ("asked", "field"),
    [
        ({"tenant": "x" * 129}, "tenant"),
        ({"states": [1] * 17}, "states"),
        ({"states": [1, 0]}, "states[1]"),
        ({"states": [99]}, "states[0]"),
        ({"page_token": "next"}, "page_token"),
        ({"page_token": "9" * 20}, "page_token"),
    ],
)
async def test_what_cannot_be_listed_is_refused_by_its_field(site: Site, asked: dict[str, Any], field: str) -> None:
    error = await refusal_of(page(site, **asked))
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert (error.details() or "").startswith(f"{field}: ")
