"""Faults in a step of a beam search: it fails alone, or finds the same result."""

import asyncio
from collections.abc import Callable

import grpc
import pytest

from common.arrays import pack_float32, unpack_int32
from quire.v1 import inference_pb2 as pb
from quire.v1 import journal_pb2, worker_pb2
from scheduler_svc.requests.live.engine import MAX_PENDING_BYTES
from tests.scheduler.gated_store import GatedStore
from tests.scheduler.journal_setup import until
from tests.scheduler.sample_outputs import assert_recorded, record_of, see
from tests.scheduler.scripted_beams import (
    assert_found,
    expected,
    search_of,
    searching,
    tokens_of,
)
from tests.scheduler.scripted_model import counted
from tests.scheduler.scripted_worker import EOS, Answer, ScriptedWorker
from tests.scheduler.serving_site import Site, counting, running_site
from tests.scheduler.speaking_site import BAD_TOKEN, make_stumbling

LENGTH, STOP, FAILED = pb.FINISH_REASON_LENGTH, pb.FINISH_REASON_STOP, pb.FINISH_REASON_FAILED


Change = Callable[[worker_pb2.StepResponse], None]


def answer_candidates(worker: ScriptedWorker, num_good_steps: int, change: Change) -> None:
    """Change the candidates that the worker answers with, after this many unchanged steps."""
    num_left = num_good_steps

    def script(request: worker_pb2.StepRequest) -> Answer:
        nonlocal num_left
        response = worker.execute(request)
        if response.candidates:
            num_left -= 1
        if response.candidates and num_left < 0:
            change(response)
        return response

    worker.script = script


def allow_nothing(response: worker_pb2.StepResponse) -> None:
    for each in response.candidates:
        each.logprobs = pack_float32([float("-inf")] * (len(each.logprobs) // 4))


def spoil_first_row(response: worker_pb2.StepResponse) -> None:
    response.candidates[0].CopyFrom(worker_pb2.Candidates())


def spoil_last_row(response: worker_pb2.StepResponse) -> None:
    response.candidates[-1].CopyFrom(worker_pb2.Candidates())


@pytest.mark.parametrize("num_good_steps", [0, 3])
async def test_a_search_that_is_allowed_nothing_and_has_found_nothing_fails_alone(
    site: Site, num_good_steps: int
) -> None:
    worker = await site.add_worker()
    answer_candidates(worker, num_good_steps, allow_nothing)
    request = searching(100, 9, 4, "stuck")
    request.stopping.ignore_eos = True
    request.sampling.logit_bias[1] = -100.0
    common = list(search_of(request).run(num_good_steps).common_prefix())
    good = asyncio.create_task(see(site, counting(500, 12)))
    seen = await see(site, request)
    assert seen.error is not None and seen.error.code() is grpc.StatusCode.INTERNAL
    assert "no token was left to choose" in seen.end.error
    assert seen.token_ids == [common] and seen.reasons == [FAILED]
    assert_recorded(await record_of(site, "stuck"), seen)
    assert (await good).token_ids == [counted(500, 12)]


async def test_a_search_that_is_allowed_nothing_more_ends_with_what_it_has_found(site: Site) -> None:
    worker = await site.add_worker()
    request = searching(7, 9, 4, early_stopping=pb.EARLY_STOPPING_NEVER)
    request.sampling.logit_bias[1] = -100.0
    search = search_of(request)
    while not any(each.finish for each in search.search.finish()):
        search.step()
    found = [each for each in search.search.finish() if each.finish]
    assert found and not search.search.is_done
    answer_candidates(worker, search.num_steps, allow_nothing)
    seen = await see(site, request)
    assert seen.error is None and seen.reasons == [STOP] * len(found)
    assert seen.token_ids == tokens_of(found)


@pytest.mark.parametrize("spoil", [spoil_first_row, spoil_last_row])
@pytest.mark.parametrize("num_good_steps", [0, 4])
async def test_logits_of_one_beam_that_are_not_finite_fail_the_request_and_no_other(
    site: Site, num_good_steps: int, spoil: Change
) -> None:
    worker = await site.add_worker()
    answer_candidates(worker, num_good_steps, spoil)
    request = searching(100, 12, 4, "sick")
    good = asyncio.create_task(see(site, counting(500, 12)))
    seen = await see(site, request)
    assert seen.error is not None and "not finite" in (seen.error.details() or "")
    assert seen.end.state == pb.REQUEST_STATE_FAILED
    assert seen.token_ids == (tokens_of(expected(request, num_good_steps)) or [[]])
    assert_recorded(await record_of(site, "sick"), seen)
    assert (await good).token_ids == [counted(500, 12)]
    assert worker.num_streams == 1


async def test_of_two_searches_side_by_side_only_the_sick_one_fails(site: Site) -> None:
    worker = await site.add_worker()

    def spoil_those_of_large_tokens(response: worker_pb2.StepResponse) -> None:
        for each in response.candidates:
            if min(unpack_int32(each.token_ids)) > 5000:
                each.CopyFrom(worker_pb2.Candidates())

    answer_candidates(worker, 6, spoil_those_of_large_tokens)
    request = searching(100, 14, 3)
    well, sick = await asyncio.gather(see(site, request), see(site, searching(6000, 14, 3)))
    assert_found(well, request)
    assert sick.error is not None and "not finite" in sick.end.error
    assert worker.num_streams == 1


@pytest.mark.parametrize(
    ("num_good_steps", "status"),
    [
        (0, worker_pb2.STEP_STATUS_FAILED),
        (5, worker_pb2.STEP_STATUS_FAILED),
        (5, worker_pb2.STEP_STATUS_NEED_SNAPSHOT),
    ],
)
async def test_steps_that_were_not_executed_are_made_good(
    site: Site, num_good_steps: int, status: worker_pb2.StepStatus.ValueType
) -> None:
    worker = await site.add_worker()
    worker.refuse(status, times=1, after=num_good_steps)
    request = searching(100, 12, 4)
    assert_found(await see(site, request), request)


async def test_a_search_whose_steps_always_fail_ends_with_the_best_so_far(site: Site) -> None:
    worker = await site.add_worker()
    worker.refuse(worker_pb2.STEP_STATUS_FAILED, times=100, after=3)
    request = searching(100, 12, 4, "sick")
    seen = await see(site, request)
    assert seen.error is not None and seen.error.code() is grpc.StatusCode.INTERNAL
    assert seen.token_ids == tokens_of(expected(request, 3))
    assert_recorded(await record_of(site, "sick"), seen)
    worker.script = worker.execute


async def test_a_lost_worker_changes_no_hypothesis(site: Site) -> None:
    first = await site.add_worker("first")
    first.silence_after(6)
    requests = [searching(100 * i, 12, 3, f"search-{i}") for i in range(3)]
    running = [asyncio.create_task(see(site, each)) for each in requests]
    await until(lambda: not first.may_answer.is_set())
    await first.stop()
    await site.until_nobody_is_left()
    await site.add_worker("second")
    for request, seen in zip(requests, await asyncio.gather(*running), strict=True):
        assert_found(seen, request)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("every", [2, 5])
async def test_preempted_again_and_again_a_search_finds_the_same(depth: int, every: int) -> None:
    async with running_site(pipeline_depth=depth, preempt_every=every) as site:
        await site.add_worker()
        requests = [searching(100 * i, 20, 2 + i, f"search-{i}") for i in range(4)]
        for request, seen in zip(requests, await asyncio.gather(*(see(site, each) for each in requests)), strict=True):
            assert_found(seen, request)
        records = [await record_of(site, f"search-{i}") for i in range(4)]
        assert sum(record.usage.num_preemptions for record in records) >= 4
        await site.idle()


@pytest.mark.parametrize("max_tokens", [1, 8])
async def test_a_text_that_cannot_be_made_fails_its_search_and_no_other(site: Site, max_tokens: int) -> None:
    """Every other token of its hypotheses is the bad one, or all that are left."""
    worker = await site.add_worker()
    make_stumbling(site)
    request = searching(100, max_tokens, 3, "wordless")
    request.sampling.allowed_token_ids.extend([BAD_TOKEN, BAD_TOKEN + 1, EOS])
    request.output.logprobs = 0
    good = asyncio.create_task(see(site, searching(BAD_TOKEN + 1, 5, 3)))
    seen = await see(site, request)
    assert seen.error is not None and "could not be made" in seen.end.error
    assert seen.end.state == pb.REQUEST_STATE_FAILED and FAILED in seen.reasons
    for sample in seen.samples:
        assert BAD_TOKEN not in sample.token_ids
        assert [each.token_id for each in sample.logprobs] == sample.token_ids
    assert_recorded(await record_of(site, "wordless"), seen)
    assert (await good).error is None
    assert worker.num_streams == 1


async def test_a_store_that_does_not_keep_up_holds_searches_back_by_the_bytes_of_their_steps() -> None:
    store = GatedStore()
    async with running_site(store) as site:
        worker = await site.add_worker()
        request = searching(100, 200, 2)
        request.stopping.ignore_eos = True
        running = asyncio.create_task(see(site, request))
        await until(lambda: len(worker.steps) > 5)
        store.may_append.clear()
        heavy = journal_pb2.BeamStep(sequence=1000, token_ids=bytes(MAX_PENDING_BYTES))
        site.journal.append(sequences=(), tokens=(), beam_steps=[heavy], on_durable=lambda: None)
        assert site.journal.stats.pending < 100
        num_steps = len(worker.steps)
        for _ in range(50):
            await asyncio.sleep(0.002)
        assert len(worker.steps) <= num_steps + 2, "those in flight, and no more"
        store.may_append.set()
        assert_found(await running, request)
        await site.idle()
