"""`Attach`: the rest of a request's output, from any positions, for any submitter."""

import asyncio
from collections.abc import AsyncIterator
from weakref import ref

import grpc
import pytest

from quire.v1 import inference_pb2 as pb
from tests.scheduler.journal_setup import until
from tests.scheduler.refusals import code_of
from tests.scheduler.sample_outputs import RequestSeen, sampled
from tests.scheduler.serving_site import Site, counting, running_site

NUM_TOKENS = 12


@pytest.fixture
async def site() -> AsyncIterator[Site]:
    async with running_site() as made:
        yield made


async def attached(site: Site, request_id: str, positions: list[int]) -> list[pb.GenerateResponse]:
    request = pb.AttachRequest(request_id=request_id, from_positions=positions)
    return [message async for message in site.inference.Attach(request)]


def seen_behind(whole: RequestSeen, positions: list[int], messages: list[pb.GenerateResponse]) -> RequestSeen:
    """Output of a reader that attached after it had seen a part of the whole."""
    assert messages[0].accepted.attached
    seen = RequestSeen()
    for index, sample in enumerate(whole.samples):
        position = positions[index] if index < len(positions) else 0
        if position:
            seen.add_chunk(pb.Chunk(index=index, num_tokens=position, token_ids=sample.token_ids[:position]))
    for message in messages:
        seen.add_message(message)
    return seen


async def test_an_attachment_at_every_position_gives_the_rest(site: Site) -> None:
    await site.add_worker()
    whole = RequestSeen()
    for message in await site.run(sampled(10, NUM_TOKENS, 2, "r")):
        whole.add_message(message)
    for positions in [[], *([i] for i in range(NUM_TOKENS + 1)), *([3, i] for i in range(NUM_TOKENS + 1))]:
        seen = seen_behind(whole, positions, await attached(site, "r", positions))
        assert (seen.token_ids, seen.reasons) == (whole.token_ids, whole.reasons)
        assert seen.end == whole.end


async def test_an_attachment_to_a_live_request_at_every_position_gives_what_is_there_and_what_comes(site: Site) -> None:
    worker = await site.add_worker()
    reading = asyncio.create_task(site.run(counting(10, NUM_TOKENS, "r")))
    worker.silence_after(6)
    await until(lambda: "r" in site.engine.live)
    stream = site.engine.live["r"].stream
    await until(lambda: stream.samples[0].num_released == 6)
    attaching = [asyncio.create_task(attached(site, "r", [i])) for i in range(7)]
    await until(lambda: len(stream.subscriptions) == 8)
    worker.speak_again()
    whole = RequestSeen()
    for message in await reading:
        whole.add_message(message)
    assert whole.token_ids == [list(range(11, 11 + NUM_TOKENS))]
    for position, task in enumerate(attaching):
        assert seen_behind(whole, [position], await task).token_ids == whole.token_ids


async def test_who_attaches_and_leaves_is_a_reader_as_any_other(site: Site) -> None:
    worker = await site.add_worker()
    worker.may_answer.clear()
    reading = asyncio.create_task(site.run(counting(10, 4, "r")))
    await until(lambda: "r" in site.engine.live)
    live = site.engine.live["r"]
    call = site.inference.Attach(pb.AttachRequest(request_id="r"))
    await anext(aiter(call))
    reading.cancel()
    await until(lambda: len(live.stream.subscriptions) == 1)
    assert live.abandonment is None
    call.cancel()
    await until(lambda: live.abandonment is not None)
    worker.may_answer.set()
    await site.idle()


async def test_what_is_not_there_is_refused(site: Site) -> None:
    await site.add_worker()
    await site.run(counting(10, NUM_TOKENS, "r"))
    assert await code_of(attached(site, "nobody", [])) is grpc.StatusCode.NOT_FOUND
    assert await code_of(attached(site, "r", [NUM_TOKENS + 1])) is grpc.StatusCode.INVALID_ARGUMENT
    assert await code_of(attached(site, "r", [0, 1])) is grpc.StatusCode.INVALID_ARGUMENT


async def test_an_attachment_ends_with_the_error_of_its_request(site: Site) -> None:
    worker = await site.add_worker()
    worker.may_answer.clear()
    reading = asyncio.create_task(site.run(counting(10, 4, "r")))
    await until(lambda: "r" in site.engine.live)
    await site.inference.Cancel(pb.CancelRequest(request_id="r"))
    assert await code_of(reading) is grpc.StatusCode.CANCELLED
    assert await code_of(attached(site, "r", [])) is grpc.StatusCode.CANCELLED
    worker.may_answer.set()
    await site.idle()


async def test_readers_of_one_record_share_its_output_which_goes_with_the_last_of_them(site: Site) -> None:
    """Regression: each attachment had its own, nine times as large as the record."""
    await site.add_worker()
    await site.run(counting(10, NUM_TOKENS, "r"))
    await until(lambda: not site.records.num_pending)
    output, _ = await site.control.attach("r")
    again, _ = await site.admission.submit(counting(10, NUM_TOKENS, "r"), None)
    assert again is output and await site.control.find("r") is output
    kept = ref(output)
    del output, again
    await until(lambda: kept() is None)
    assert (await site.control.find("r")).finished is not None
