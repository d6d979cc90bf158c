"""Readers of several samples: slow ones, and those that reattach at a position in each."""

import asyncio
from collections.abc import AsyncIterator, Callable

import grpc
import pytest
from google.rpc import status_pb2

from quire.errors import InvalidRequestError, from_status
from quire.v1 import inference_pb2 as pb
from scheduler_svc.requests.live.output_stream import Subscription
from tests.scheduler.journal_setup import until
from tests.scheduler.raw_session import RawSession
from tests.scheduler.sample_outputs import num_released, sampled, see, seen_in
from tests.scheduler.scripted_model import counted
from tests.scheduler.serving_site import Site, running_site

LENGTH, STOP, FAILED = pb.FINISH_REASON_LENGTH, pb.FINISH_REASON_STOP, pb.FINISH_REASON_FAILED


@pytest.fixture
async def site() -> AsyncIterator[Site]:
    async with running_site() as made:
        yield made
        await made.idle()


async def test_a_slow_reader_gets_everything_in_one_piece_of_each_sample(site: Site) -> None:
    await site.add_worker()
    stream, _ = await site.admission.submit(sampled(0, 50, 4, "slow"), None)
    place = site.readers.subscribe(stream, (), lambda _: None)
    await until(lambda: stream.finished is not None)
    chunks: list[pb.Chunk] = []
    assert place.take_chunks(adder(chunks), 1000) == 200
    assert [chunk.index for chunk in chunks] == [0, 1, 2, 3]
    assert seen_in(chunks).token_ids == [counted(0, 50, i) for i in range(4)]
    assert place.done
    place.close()


async def test_a_slow_reader_is_given_no_more_at_once_than_it_asks_for(site: Site) -> None:
    await site.add_worker()
    stream, _ = await site.admission.submit(sampled(0, 50, 3, "slow"), None)
    place = site.readers.subscribe(stream, (), lambda _: None)
    await until(lambda: stream.finished is not None)
    chunks: list[pb.Chunk] = []
    sizes = take_all(place, chunks, 40)
    assert sizes == [40, 40, 40, 30]
    assert [(chunk.index, chunk.position, chunk.num_tokens) for chunk in chunks] == [
        (0, 0, 40),
        (0, 40, 10),
        (1, 0, 30),
        (1, 30, 20),
        (2, 0, 20),
        (2, 20, 30),
    ]
    assert seen_in(chunks).token_ids == [counted(0, 50, i) for i in range(3)]
    place.close()


async def test_a_reader_comes_back_to_its_place_in_each_sample(site: Site) -> None:
    """Live, after 3 tokens of each; sample 2 had ended with its second; and again from the record."""
    worker = await site.add_worker()
    worker.silence_after(3)
    request = sampled(0, 8, 3, "back")
    request.stopping.stop_token_ids.append(6)  # the sixth of sample 0, the third of sample 1, the second of sample 2
    running = asyncio.create_task(see(site, request))
    await until(lambda: "back" in site.engine.live and num_released(site, "back") == [3, 3, 2])
    attached = Attached(site)
    assert "from_positions[0]: is 9, but the request has at most 8" in await attached.refusal("back", 9)
    assert "from_positions[2]: is 9, but the request has at most 8" in await attached.refusal("back", 0, 0, 9)
    assert "from_positions[3]: is of a sample that the request does not" in await attached.refusal("back", 0, 0, 0, 1)
    coming = asyncio.create_task(attached.chunks("back", 2, 3, 1))
    await until(lambda: len(site.engine.live["back"].stream.subscriptions) == 2)
    worker.speak_again()
    expected = [(0, 2, [3, 4, 5, 6]), (1, 3, []), (2, 1, [6])]
    assert await coming == expected
    assert (await running).token_ids == [[1, 2, 3, 4, 5, 6], [2, 4, 6], [3, 6]]
    assert await attached.chunks("back", 2, 3, 1) == expected
    assert await attached.chunks("back", 6, 3, 2, 0, 0) == [(0, 6, []), (1, 3, []), (2, 2, [])]
    assert await attached.chunks("back", 1) == [(0, 1, [2, 3, 4, 5, 6]), (1, 0, [2, 4, 6]), (2, 0, [3, 6])]
    assert "from_positions[1]: is 9, but the request has at most 8" in await attached.refusal("back", 0, 9)
    assert "from_positions[3]: is of a sample that the request does not" in await attached.refusal("back", 0, 0, 0, 1)
    await attached.session.close()


async def test_who_has_read_more_of_a_ranked_request_than_there_is_waits_for_its_end(site: Site) -> None:
    worker = await site.add_worker()
    worker.silence_after(3)
    running = asyncio.create_task(see(site, sampled(0, 8, 2, "best", best_of=3)))
    await until(lambda: "best" in site.engine.live and site.engine.live["best"].samples[0].stream.num_released == 3)
    attached = Attached(site)
    assert "from_positions[2]: is of a sample that the request does not" in await attached.refusal("best", 0, 0, 1)
    coming = asyncio.create_task(attached.chunks("best", 1, 0))
    await until(lambda: len(site.engine.live["best"].stream.subscriptions) == 2)
    worker.speak_again()
    tokens = (await running).token_ids
    assert await coming == [(0, 1, tokens[0][1:]), (1, 0, tokens[1])]
    assert await attached.chunks("best", 8, 3) == [(0, 8, []), (1, 3, tokens[1][3:])]
    await attached.session.close()


def adder(chunks: list[pb.Chunk]) -> Callable[[], pb.Chunk]:
    def add() -> pb.Chunk:
        chunks.append(pb.Chunk())
        return chunks[-1]

    return add


def take_all(place: Subscription, chunks: list[pb.Chunk], max_tokens: int) -> list[int]:
    """Takes until nothing is left. Returns how many tokens each time."""
    sizes = []
    while not place.done:
        assert place.has_news
        sizes.append(place.take_chunks(adder(chunks), max_tokens))
    return sizes


class Attached:
    """A session's view of a request that it attached to."""

    def __init__(self, site: Site) -> None:
        self.session = RawSession(site)
        self._num_handles = 0

    async def chunks(self, request_id: str, *from_positions: int) -> list[tuple[int, int, list[int]]]:
        """(index, position, tokens) of all that comes until the end, joined by sample."""
        self._num_handles += 1
        handle = self._num_handles
        await self.session.say(handle, attach=pb.Attach(request_id=request_id, from_positions=from_positions))
        await self.session.read_until("finished", handle)
        found: dict[int, tuple[int, list[int]]] = {}
        for event in self.session.events:
            if event.handle == handle and event.HasField("chunk"):
                position, tokens = found.setdefault(event.chunk.index, (event.chunk.position, []))
                assert event.chunk.position == position + len(tokens)
                tokens.extend(event.chunk.token_ids)
        return [(index, *found[index]) for index in sorted(found)]

    async def refusal(self, request_id: str, *from_positions: int) -> str:
        self._num_handles += 1
        handle = self._num_handles
        await self.session.say(handle, attach=pb.Attach(request_id=request_id, from_positions=from_positions))
        error = (await self.session.read_until("error", handle)).error
        assert error.code == grpc.StatusCode.INVALID_ARGUMENT.value[0]
        refused = from_status(status_pb2.Status.FromString(error.status))
        assert isinstance(refused, InvalidRequestError)
        (violation,) = refused.violations
        assert error.message == f"{violation.field}: {violation.description}"
        return error.message
