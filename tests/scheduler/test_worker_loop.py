"""The loop of a worker and its link: what a worker may answer, and what becomes of the requests."""

import asyncio
import struct
from collections.abc import AsyncIterator
from zlib import crc32

import pytest

from common.step_wire import RESPONSE_TAG, seal_response
from quire.v1 import inference_pb2 as pb
from quire.v1 import worker_pb2
from scheduler_svc.requests.live.hopeless_requests import HOPELESS_EVERY_S
from tests.patience import patient
from tests.scheduler.journal_setup import until
from tests.scheduler.scripted_worker import Answer
from tests.scheduler.serving_site import Site, counting, running_site, tokens_in
from tests.scheduler.worker_states import make_group


@pytest.fixture
async def site() -> AsyncIterator[Site]:
    async with running_site() as made:
        yield made


async def test_a_request_counts_through_every_part(site: Site) -> None:
    await site.add_worker()
    messages = await site.run(counting(10, 5))
    assert tokens_in(messages) == [11, 12, 13, 14, 15]
    assert messages[0].accepted.num_prompt_tokens == 1
    assert messages[-1].finished.state == pb.REQUEST_STATE_FINISHED
    await site.idle()


@pytest.mark.parametrize(
    ("status", "times"),
    [
        (worker_pb2.STEP_STATUS_FAILED, 1),
        (worker_pb2.STEP_STATUS_FAILED, 2),
        (worker_pb2.STEP_STATUS_INVALID, 2),
    ],
)
async def test_steps_that_were_not_executed_are_done_again(
    site: Site, status: worker_pb2.StepStatus.ValueType, times: int
) -> None:
    worker = await site.add_worker()
    worker.refuse(status, times=times)
    runs = [site.run(counting(100 * i, 20)) for i in range(4)]
    for i, messages in enumerate(await asyncio.gather(*runs)):
        assert tokens_in(messages) == list(range(100 * i + 1, 100 * i + 21))
    assert worker.num_streams == 1
    await site.idle()


async def test_a_request_whose_step_was_not_executed_is_taken_by_a_worker_that_has_nothing_to_do(site: Site) -> None:
    small = await site.add_worker("small")
    assert tokens_in(await site.run(counting(10, 1))) == [11]  # a snapshot, which a worker cannot ask for again
    large = await site.add_worker("large", num_blocks=128)
    small.may_answer.clear()
    large.may_answer.clear()
    first = asyncio.create_task(site.run(counting(20, 2)))
    stats = site.engine.scheduler.stats
    await until(lambda: [each.num_in_flight_steps for each in stats().workers] == [0, 2])
    small.refuse(worker_pb2.STEP_STATUS_NEED_SNAPSHOT, times=1)
    second = asyncio.create_task(site.run(counting(100, 3)))
    await until(lambda: len(small.steps) == 2)
    large.may_answer.set()
    assert tokens_in(await first) == [21, 22]
    await asyncio.sleep(2 * HOPELESS_EVERY_S)  # so that no search for hopeless requests wakes anybody
    small.may_answer.set()
    assert tokens_in(await asyncio.wait_for(second, patient(20))) == [101, 102, 103]
    assert len(large.steps) > 2, "it has more room"
    await site.idle()


@pytest.mark.parametrize("is_swapped", [True, False])
async def test_each_result_wakes_the_workers_while_a_group_is_swapped_out_at_one(site: Site, is_swapped: bool) -> None:
    """A worker that has left to this one what goes before the group: nobody else would ask it again."""
    await site.add_worker()
    site.engine.scheduler.workers.add_worker("idle", num_blocks=8, block_size=16, num_seats=4)
    swapped = site.engine.scheduler._places.workers["idle"].swapped
    swapped += [make_group([1], arrival=1000)] * is_swapped
    wakes: list[str] = []
    site.engine.add_waker(lambda: wakes.append("woken"))
    assert tokens_in(await site.run(counting(10, 4))) == [11, 12, 13, 14]
    assert len(wakes) == (1 + 4 if is_swapped else 1), "once when it came, and by each result"
    swapped.clear()
    await site.idle()


@pytest.mark.parametrize("status", [worker_pb2.STEP_STATUS_FAILED, worker_pb2.STEP_STATUS_INVALID])
async def test_a_request_in_three_failed_steps_is_failed_with_the_reason(
    site: Site, status: worker_pb2.StepStatus.ValueType
) -> None:
    worker = await site.add_worker()
    worker.refuse(status, times=3, error="out of luck")
    with pytest.raises(Exception, match="out of luck") as caught:
        await site.run(counting(10, 20, "unlucky"))
    assert caught.value.code().name == "INTERNAL"  # type: ignore[attr-defined]
    record = await site.inference.GetRequest(pb.GetRequestRequest(request_id="unlucky"))
    assert record.state == pb.REQUEST_STATE_FAILED and "out of luck" in record.error
    assert tokens_in(await site.run(counting(50, 3))) == [51, 52, 53]
    await site.idle()


async def test_failures_count_only_while_a_request_makes_no_progress(site: Site) -> None:
    """Each of five steps far apart breaks off once; a long request must live through all of them."""
    worker = await site.add_worker()
    broken: set[int] = set()

    def script(request: worker_pb2.StepRequest) -> Answer:
        marks = {number for number in (10, 20, 30, 40, 50) if len(worker.steps) >= number} - broken
        if marks:
            broken.update(marks)
            worker.refuse(worker_pb2.STEP_STATUS_FAILED, times=1)
            response, worker.script = worker.script(request), script
            return response
        return worker.execute(request)

    worker.script = script
    assert tokens_in(await site.run(counting(10, 80))) == list(range(11, 91))
    assert len(broken) == 5
    await site.idle()


def damage(change: str) -> "list[worker_pb2.StepResponse | bytes]":
    """A wrong answer to a step with one sample."""
    wrong = worker_pb2.StepResponse(epoch=1, step_id=1, status=worker_pb2.STEP_STATUS_OK, token_ids=bytes(4))
    one = worker_pb2.LogprobRows(logprobs=bytes(4), ranks=bytes(4))
    match change:
        case "undecodable":
            return [b"\xff\xff\xff" + struct.pack("<BI", RESPONSE_TAG, crc32(b"\xff\xff\xff"))]
        case "a flipped bit":
            sealed = seal_response(wrong)
            return [sealed[:1] + bytes([sealed[1] ^ 1]) + sealed[2:]]
        case "no checksum":
            return [wrong.SerializeToString()]
        case "ragged array":
            wrong.token_ids = b"123"
        case "unknown status":
            wrong.status = worker_pb2.STEP_STATUS_UNSPECIFIED
        case "too many tokens":
            wrong.token_ids = bytes(8)
        case "no tokens":
            wrong.token_ids = b""
        case "negative token":
            wrong.token_ids = b"\xff\xff\xff\xff"
        case "invalid sample out of range":
            wrong.invalid_samples = b"\x07\x00\x00\x00"
        case "logprobs of no sample":
            wrong.logprobs.add(sample=9, rows=one)
        case "logprobs without ranks":
            wrong.logprobs.add(sample=0, rows=worker_pb2.LogprobRows(logprobs=bytes(4)))
        case "top logprobs missing":
            wrong.logprobs.add(sample=0, rows=worker_pb2.LogprobRows(logprobs=bytes(4), ranks=bytes(4), num_top=3))
        case "prompt logprobs without ranks":
            wrong.prompt_logprobs.add(seat=0, position=1, rows=worker_pb2.LogprobRows(logprobs=bytes(4)))
        case "step out of turn":
            wrong.step_id = 99
    return [wrong]


@pytest.mark.parametrize(
    "change",
    [
        "undecodable",
        "a flipped bit",
        "no checksum",
        "ragged array",
        "unknown status",
        "too many tokens",
        "no tokens",
        "negative token",
        "invalid sample out of range",
        "logprobs of no sample",
        "logprobs without ranks",
        "top logprobs missing",
        "prompt logprobs without ranks",
        "step out of turn",
    ],
)
async def test_a_worker_with_a_senseless_answer_is_given_up_and_nothing_is_lost(site: Site, change: str) -> None:
    worker = await site.add_worker()
    wrong = damage(change)

    def script(request: worker_pb2.StepRequest) -> Answer:
        return wrong.pop() if wrong else worker.execute(request)

    worker.script = script
    request = counting(10, 4)
    request.output.logprobs = 0
    running = asyncio.create_task(site.run(request))
    await until(lambda: not site.workers.members, 5)
    site.engine.scheduler.check()
    await site.register(worker)
    assert tokens_in(await running) == [11, 12, 13, 14]
    assert worker.num_streams == 2
    await site.idle()
