"""Garbage of an ended request: nothing is left to the garbage collector.

A full collection walks over every live request, and takes longer than a lease where many wait.
"""

import asyncio
import gc
from collections import Counter
from collections.abc import AsyncIterator, Iterator

import grpc
import pytest

from quire.v1 import inference_pb2 as pb
from scheduler_svc.core.sequence import Sequence, SequenceGroup
from scheduler_svc.requests.live.beam_decoding import BeamDecoding
from scheduler_svc.requests.live.live_request import LiveRequest, RequestTimes
from scheduler_svc.requests.live.live_sample import LiveSample
from scheduler_svc.requests.live.output_stream import OutputStream, SampleStream, Subscription
from scheduler_svc.requests.params.request_params import ValidatedParams
from scheduler_svc.text.incremental_decoder import IncrementalDecoder
from scheduler_svc.text.output_text import OutputText
from tests.scheduler.gated_store import GatedStore
from tests.scheduler.journal_setup import until
from tests.scheduler.pinning import pin, unpin
from tests.scheduler.raw_session import RawSession
from tests.scheduler.sample_outputs import sampled, see
from tests.scheduler.scripted_beams import searching
from tests.scheduler.scripted_worker import ScriptedWorker
from tests.scheduler.serving_site import Site, counting, running_site
from tests.scheduler.speaking_site import BAD_TOKEN, make_speaking, make_stumbling

PARTS = (
    *(Sequence, SequenceGroup, LiveRequest, LiveSample, BeamDecoding, ValidatedParams, RequestTimes),
    *(OutputStream, SampleStream, Subscription, OutputText, IncrementalDecoder),
)


class Leftovers:
    """Parts of requests that came into being since this did. There is no garbage collection meanwhile."""

    def __init__(self) -> None:
        gc.collect()
        gc.disable()
        self._known = {id(each): each for each in _parts()}
        self._most: Counter[str] = Counter()

    def count(self) -> Counter[str]:
        found = Counter(type(each).__name__ for each in _parts() if id(each) not in self._known)
        self._most |= found
        return found

    async def assert_gone(self) -> None:
        """Assert that requests are freed soon, once handlers have returned."""
        assert self._most, "nothing was ever seen of any request"
        try:
            await until(lambda: not self.count())
        except TimeoutError:
            pytest.fail(f"left: {dict(self.count())}")


def _parts() -> list[object]:
    return [each for each in gc.get_objects() if type(each) in PARTS]


@pytest.fixture
async def site() -> AsyncIterator[Site]:
    async with running_site(grace_s=0.05, preempt_every=5) as made:
        yield made


@pytest.fixture
def leftovers() -> Iterator[Leftovers]:
    yield Leftovers()
    gc.enable()


async def run_all(site: Site, worker: ScriptedWorker, leftovers: Leftovers, *requests: pb.GenerateRequest) -> None:
    """Run requests to their end; the worker begins once all of them are there."""
    worker.may_answer.clear()
    running = asyncio.gather(*(see(site, each) for each in requests))
    await until(lambda: len(site.engine.live) == len(requests))
    leftovers.count()
    worker.may_answer.set()
    await running
    await site.idle()


@pytest.mark.parametrize(
    "request_",
    [
        counting(10, 20),
        sampled(10, 20, 4),
        sampled(10, 20, 2, best_of=4),
        searching(10, 20, 4),
        searching(10, 20, 4, n=2, early_stopping=pb.EARLY_STOPPING_NEVER),
    ],
    ids=["greedy", "samples", "ranked", "beams", "some of the beams"],
)
async def test_a_request_that_has_ended_is_gone_at_once(
    site: Site, leftovers: Leftovers, request_: pb.GenerateRequest
) -> None:
    worker = await site.add_worker()
    await run_all(site, worker, leftovers, *[request_] * 3)
    await leftovers.assert_gone()


async def test_texts_stop_strings_and_logprobs_go_with_their_request(site: Site, leftovers: Leftovers) -> None:
    worker = await site.add_worker()
    tokenizer = make_speaking(site)
    requests = [sampled(30, 30, 2), counting(40, 30), searching(50, 8, 3)]
    for request in requests[:2]:
        request.stopping.stop.append(tokenizer.decode([45, 46], True))
    for request in requests:
        request.output.logprobs = 2
    await run_all(site, worker, leftovers, *requests)
    await leftovers.assert_gone()


async def test_requests_that_end_otherwise_are_gone_at_once_too(site: Site, leftovers: Leftovers) -> None:
    """Cancelled while it runs, at its deadline, left by its reader, paused and cancelled."""
    worker = await site.add_worker()
    worker.may_answer.clear()
    late = counting(20, 400)
    late.timeout_ms = 1000
    reading = [asyncio.create_task(see(site, each)) for each in (counting(10, 400, "cancelled"), late)]
    leaving = asyncio.create_task(see(site, counting(30, 400, "left")))
    pausing = asyncio.create_task(see(site, sampled(40, 200, 3, "paused")))
    await until(lambda: len(site.engine.live) == 4)
    num_steps = len(worker.steps)
    worker.may_answer.set()
    await until(lambda: len(worker.steps) > num_steps + 2)
    worker.may_answer.clear()
    leftovers.count()
    await site.inference.Pause(pb.PauseRequest(request_id="paused"))
    leaving.cancel()
    await site.inference.Cancel(pb.CancelRequest(request_id="cancelled"))
    await until(lambda: len(site.engine.live) == 1)
    await site.inference.Cancel(pb.CancelRequest(request_id="paused"))
    worker.may_answer.set()
    await asyncio.gather(*reading, leaving, pausing, return_exceptions=True)
    await site.idle()
    await leftovers.assert_gone()


async def test_failed_requests_are_gone_at_once(site: Site, leftovers: Leftovers) -> None:
    worker = await site.add_worker()
    make_stumbling(site)
    worker.make_invalid(105)
    requests = [counting(BAD_TOKEN - 4, 30), sampled(BAD_TOKEN - 4, 30, 2), counting(100, 30), sampled(103, 30, 3)]
    await run_all(site, worker, leftovers, *requests)
    await leftovers.assert_gone()


async def test_requests_of_a_session_are_gone_while_it_goes_on(site: Site, leftovers: Leftovers) -> None:
    await site.add_worker()
    session = RawSession(site)
    for handle in (1, 2, 3):
        await session.say(handle, submit=counting(10 * handle, 400 if handle == 3 else 10, f"request-{handle}"))
    await session.say(4, submit=counting(10, 1_000_000))
    await session.read_until("accepted", 3)
    leftovers.count()
    await session.say(3, cancel=pb.Cancellation())
    for handle in (1, 2, 3):
        await session.read_until("finished", handle)
    await session.read_until("error", 4)
    await site.idle()
    await leftovers.assert_gone()
    await session.close()


async def test_what_is_refused_leaves_nothing(site: Site, leftovers: Leftovers) -> None:
    await site.add_worker()
    session = RawSession(site)
    await session.say(1, submit=counting(10, 400))
    await session.read_until("accepted", 1)
    leftovers.count()
    for handle in range(2, 8, 2):
        too_long = counting(10, 1_000_000, f"twice-{handle}")
        await session.say(handle, submit=too_long)
        await session.say(handle + 1, submit=too_long)
        await session.read_until("error", handle)
        await session.read_until("error", handle + 1)
    await session.say(1, cancel=pb.Cancellation())
    await session.read_until("finished", 1)
    await leftovers.assert_gone()
    await session.close()


async def test_a_request_that_became_durable_too_late_is_gone_at_once(leftovers: Leftovers) -> None:
    store = GatedStore()
    async with running_site(store, admission_timeout_s=0.05) as site:
        await site.add_worker()
        store.may_append.clear()
        with pytest.raises(grpc.aio.AioRpcError, match="nothing was accepted"):
            await site.run(counting(10))
        leftovers.count()
        store.may_append.set()
        await until(lambda: not site.journal.stats.pending)
        await leftovers.assert_gone()


async def test_a_prefix_that_was_computed_leaves_no_sequence(site: Site, leftovers: Leftovers) -> None:
    worker = await site.add_worker()
    worker.may_answer.clear()
    pinning = asyncio.create_task(pin(site))
    await until(lambda: bool(leftovers.count()))
    worker.may_answer.set()
    await pinning
    await unpin(site)
    await leftovers.assert_gone()
