"""Tokens of several steps go out together where deliveries come too fast; first tokens and ends wait for nothing."""

import asyncio

import pytest

from quire.v1 import inference_pb2 as pb
from scheduler_svc.requests.live import settle_pace
from scheduler_svc.requests.live.settle_pace import SettlePace
from tests.patience import patient
from tests.scheduler.sample_outputs import sampled, see
from tests.scheduler.scripted_beams import assert_found, searching
from tests.scheduler.serving_site import counting, running_site

LONG_S = 600.0
ANY = 3


def nobody() -> None:
    raise AssertionError("woken")


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """A delivery fills any limit."""
    monkeypatch.setattr(settle_pace, "SECONDS_PER_DELIVERY", 2 * LONG_S)


@pytest.mark.usefixtures("slow")
async def test_what_comes_soon_after_is_held_back_and_what_is_urgent_is_not() -> None:
    pace = SettlePace(LONG_S, nobody)
    assert pace.is_due(ANY)
    pace.record_settled(ANY)
    assert not pace.is_due(ANY)
    assert not pace.is_due(ANY)
    pace.hasten()
    assert pace.is_due(ANY)
    pace.record_settled(ANY)
    assert not pace.is_due(ANY)
    pace.record_settled(0)
    assert pace.is_due(ANY)


@pytest.mark.usefixtures("slow")
async def test_with_a_limit_of_nothing_all_is_due_at_once() -> None:
    pace = SettlePace(0.0, nobody)
    for _ in range(3):
        assert pace.is_due(ANY)
        pace.record_settled(ANY)


async def test_the_more_readers_there_are_the_longer_it_is_until_the_next_delivery() -> None:
    pace = SettlePace(LONG_S, nobody)
    pace.record_settled(1_000_000)
    assert not pace.is_due(ANY)
    pace.record_settled(1)
    await asyncio.sleep(2 * settle_pace.SECONDS_PER_DELIVERY)
    assert pace.is_due(ANY)


@pytest.mark.usefixtures("slow")
async def test_what_is_held_back_is_due_after_the_limit_and_somebody_is_woken_once() -> None:
    woken = asyncio.Event()
    pace = SettlePace(0.2, woken.set)
    pace.record_settled(ANY)
    assert not pace.is_due(ANY)
    await asyncio.wait_for(woken.wait(), patient(20))
    assert pace.is_due(ANY)
    pace.record_settled(ANY)
    woken.clear()
    pace.is_due(ANY)
    pace.record_settled(ANY)  # ends the wait
    await asyncio.sleep(0.4)
    assert not woken.is_set()


def chunk_sizes(messages: list[pb.GenerateResponse]) -> list[int]:
    return [message.chunk.num_tokens for message in messages if message.HasField("chunk")]


@pytest.mark.usefixtures("slow")
async def test_the_first_token_goes_out_alone_and_the_rest_with_the_end() -> None:
    async with running_site(stream_interval_s=LONG_S) as site:
        await site.add_worker()
        assert chunk_sizes(await site.run(counting(10, 6))) == [1, 5]
        assert chunk_sizes(await site.run(counting(10, 1))) == [1]
        await site.idle()


@pytest.mark.usefixtures("slow")
async def test_a_first_token_goes_out_at_once_and_takes_along_what_is_there() -> None:
    async with running_site(stream_interval_s=LONG_S) as site:
        await site.add_worker(num_blocks=1024)
        long = site.inference.Generate(counting(10, 4000))
        chunks = (message.chunk async for message in long if message.HasField("chunk"))
        assert (await anext(chunks)).num_tokens == 1
        assert chunk_sizes(await site.run(counting(10, 3))) == [1, 2]
        assert (await anext(chunks)).position == 1
        long.cancel()


@pytest.mark.usefixtures("slow")
async def test_the_end_of_a_sample_goes_out_at_once_while_another_goes_on() -> None:
    """Stop token 12 behind 0 ends sample 1 after 6 tokens, sample 0 after 12."""
    async with running_site(stream_interval_s=LONG_S) as site:
        worker = await site.add_worker()
        worker.silence_after(8)
        request = sampled(0, 14, 2)
        request.stopping.stop_token_ids.append(12)
        stream = site.inference.Generate(request)
        finishes = []
        async with asyncio.timeout(patient(20)):
            async for message in stream:
                if message.chunk.HasField("finish"):
                    finishes.append((message.chunk.index, message.chunk.finish.stop_token_id))
                    worker.speak_again()
        assert finishes == [(1, 12), (0, 12)]


@pytest.mark.usefixtures("slow")
async def test_the_end_of_a_search_goes_out_at_once() -> None:
    async with running_site(stream_interval_s=LONG_S) as site:
        await site.add_worker()
        await site.run(counting(10, 2))  # after which nothing is due for long
        request = searching(100, 6, 3)
        async with asyncio.timeout(patient(20)):
            assert_found(await see(site, request), request)


@pytest.mark.usefixtures("slow")
async def test_no_more_than_some_tokens_are_held_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settle_pace, "MAX_HELD_TOKENS", 4)
    async with running_site(stream_interval_s=LONG_S) as site:
        await site.add_worker()
        sizes = chunk_sizes(await site.run(counting(10, 10)))
        assert sizes == [1, 4, 4, 1]


@pytest.mark.usefixtures("slow")
async def test_a_token_that_nothing_follows_goes_out_after_the_limit() -> None:
    async with running_site(pipeline_depth=1, stream_interval_s=0.3) as site:
        worker = await site.add_worker()
        worker.silence_after(5)
        stream = site.inference.Generate(counting(10, 9))
        num_tokens = 0
        async with asyncio.timeout(patient(20)):
            async for message in stream:
                num_tokens += message.chunk.num_tokens
                if num_tokens == 5:
                    break
        worker.speak_again()
        stream.cancel()
