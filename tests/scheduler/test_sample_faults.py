"""Faults in one sample or one step of a request with several samples: it fails alone, or nobody notices."""

import asyncio

import grpc
import pytest

from quire.v1 import inference_pb2 as pb
from quire.v1 import worker_pb2
from tests.scheduler.journal_replay import replayed
from tests.scheduler.journal_setup import entries_of, until
from tests.scheduler.sample_outputs import RequestSeen, assert_recorded, record_of, sampled, see
from tests.scheduler.scripted_model import counted
from tests.scheduler.scripted_worker import ScriptedWorker
from tests.scheduler.serving_site import Site, running_site
from tests.scheduler.speaking_site import BAD_TOKEN, make_stumbling

LENGTH, STOP, FAILED = pb.FINISH_REASON_LENGTH, pb.FINISH_REASON_STOP, pb.FINISH_REASON_FAILED


async def assert_replayed(site: Site, request_id: str, seen: RequestSeen) -> None:
    """The journal has the same samples, each token and each end once."""
    replay = replayed([entry for _, entry in await entries_of(site.store)])
    samples = replay.requests[request_id].samples
    assert [sample.token_ids for sample in samples] == seen.token_ids
    assert [sample.finish for sample in samples] == [sample.finish for sample in seen.samples]


@pytest.mark.parametrize("stop", [[], ["never said"]])
async def test_a_text_that_cannot_be_made_fails_its_request_with_all_samples_and_no_other(
    site: Site, stop: list[str]
) -> None:
    """Sample 2 goes up by threes, and comes to the bad token as its fourth."""
    worker = await site.add_worker()
    make_stumbling(site)
    bad = sampled(BAD_TOKEN - 12, 30, 3, "wordless")
    bad.stopping.stop.extend(stop)
    bad.output.logprobs = 0
    good = asyncio.create_task(see(site, sampled(BAD_TOKEN + 1, 30, 2)))
    seen = await see(site, bad)
    assert seen.error is not None and seen.error.code() is grpc.StatusCode.INTERNAL
    assert "could not be made" in seen.end.error
    assert seen.reasons == [FAILED] * 3
    assert seen.token_ids[2] == [BAD_TOKEN - 9, BAD_TOKEN - 6, BAD_TOKEN - 3]
    for index, sample in enumerate(seen.samples):
        assert sample.token_ids == counted(BAD_TOKEN - 12, len(sample.token_ids), index)
        assert [each.token_id for each in sample.logprobs] == sample.token_ids
    assert len(seen.token_ids[0]) in (3, 4) and len(seen.token_ids[1]) in (3, 4)
    assert_recorded(await record_of(site, "wordless"), seen)
    await assert_replayed(site, "wordless", seen)
    assert (await good).token_ids == [counted(BAD_TOKEN + 1, 30, i) for i in range(2)]
    assert worker.num_streams == 1


async def test_a_text_can_fail_beside_a_sample_that_has_ended(site: Site) -> None:
    """By ones sample 0 stops five before the bad token; by threes sample 2 comes to it."""
    await site.add_worker()
    make_stumbling(site)
    request = sampled(BAD_TOKEN - 6, 6, 3, "late")
    request.stopping.stop_token_ids.append(BAD_TOKEN - 5)
    seen = await see(site, request)
    assert seen.reasons == [STOP, FAILED, FAILED]
    assert seen.token_ids[0] == [BAD_TOKEN - 5] and seen.token_ids[2] == [BAD_TOKEN - 3]
    assert_recorded(await record_of(site, "late"), seen)
    await assert_replayed(site, "late", seen)


async def test_invalid_logits_of_one_sample_fail_its_request_and_no_other(site: Site) -> None:
    worker = await site.add_worker()
    worker.make_invalid(108)  # the fourth token of sample 1, the eighth of sample 0
    good = asyncio.create_task(see(site, sampled(200, 20, 3)))
    seen = await see(site, sampled(100, 20, 3, "sick"))
    assert seen.error is not None and "not finite" in (seen.error.details() or "")
    assert seen.reasons == [FAILED] * 3
    assert seen.token_ids == [counted(100, 3, i) for i in range(3)], "of the answer with it nothing counts"
    assert [sample.finish.sample_index for sample in seen.samples if sample.finish] == [0, 1, 2]
    assert_recorded(await record_of(site, "sick"), seen)
    assert (await good).token_ids == [counted(200, 20, i) for i in range(3)]
    assert worker.num_streams == 1


async def test_of_an_answer_with_invalid_samples_no_end_of_another_sample_is_believed_either(site: Site) -> None:
    """By fives, sixes, sevens and eights: in the second step sample 0 would stop by 10, and 12 and 16 are invalid."""
    worker = await site.add_worker()
    worker.make_invalid(12, 16)
    request = sampled(0, 20, 4, "mixed", first_sample_index=4)
    request.stopping.stop_token_ids.append(10)
    request.output.logprobs = 0
    seen = await see(site, request)
    assert seen.error is not None
    assert seen.reasons == [FAILED] * 4
    assert seen.token_ids == [[5], [6], [7], [8]]
    for sample in seen.samples:
        assert [each.token_id for each in sample.logprobs] == sample.token_ids
    assert_recorded(await record_of(site, "mixed"), seen)
    await assert_replayed(site, "mixed", seen)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("every", [2, 5])
async def test_preempted_again_and_again_all_samples_come_as_if_they_had_not(depth: int, every: int) -> None:
    async with running_site(pipeline_depth=depth, preempt_every=every) as site:
        await site.add_worker()
        requests = [sampled(1000 * i, 20 + i, 4, f"r{i}") for i in range(4)]
        for i, seen in enumerate(await asyncio.gather(*(see(site, each) for each in requests))):
            assert seen.token_ids == [counted(1000 * i, 20 + i, sample) for sample in range(4)]
        records = [await record_of(site, f"r{i}") for i in range(4)]
        assert sum(record.usage.num_preemptions for record in records) >= 4
        await site.idle()


async def test_swapped_out_while_its_prompt_is_computed_a_request_keeps_the_log_probabilities_of_that_step() -> None:
    """In chunks of 16 tokens, of which the last one is on its way when the request gives way."""
    async with running_site(pipeline_depth=2, preempt_every=1, preemption="swap") as site:
        worker = ScriptedWorker()
        worker.description.pool.num_host_blocks = 64
        worker.description.max_batched_tokens = 16
        worker.tells_prompt_logprobs = True
        await site.start_worker(worker)
        requests = [sampled(0, 8, 1, f"r{i}") for i in range(4)]
        for i, request in enumerate(requests):
            request.token_ids.ids[:] = range(1000 * i, 1000 * i + 20 + i)
            request.output.prompt_logprobs = 0
        for request, seen in zip(requests, await asyncio.gather(*(see(site, each) for each in requests)), strict=True):
            told = [each.token_id for each in seen.samples[0].prompt_logprobs]
            assert told == request.token_ids.ids[1:]
        assert any(step.swap_in for step in worker.steps)
        await site.idle()


async def test_a_lost_worker_costs_no_sample_a_token(site: Site) -> None:
    first = await site.add_worker("first")
    first.silence_after(4)
    requests = [sampled(1000 * i, 9, 3, f"r{i}") for i in range(3)]
    running = [asyncio.create_task(see(site, each)) for each in requests]
    await until(lambda: len(first.steps) >= 5 and not first.may_answer.is_set())
    await first.stop()
    await site.until_nobody_is_left()
    await site.add_worker("second")
    for i, seen in enumerate(await asyncio.gather(*running)):
        assert seen.token_ids == [counted(1000 * i, 9, sample) for sample in range(3)]
        assert_recorded(await record_of(site, f"r{i}"), seen)


@pytest.mark.parametrize("status", [worker_pb2.STEP_STATUS_NEED_SNAPSHOT, worker_pb2.STEP_STATUS_FAILED])
async def test_steps_that_were_not_executed_are_made_good(site: Site, status: worker_pb2.StepStatus.ValueType) -> None:
    worker = await site.add_worker()
    worker.refuse(status, times=1, after=3)
    seen = await see(site, sampled(100, 9, 4))
    assert seen.token_ids == [counted(100, 9, i) for i in range(4)]
    assert len([step for step in worker.steps if step.snapshot]) >= 2


async def test_a_request_whose_steps_always_fail_ends_with_all_samples_failed(site: Site) -> None:
    worker = await site.add_worker()
    worker.refuse(worker_pb2.STEP_STATUS_FAILED, times=100)
    seen = await see(site, sampled(100, 9, 3, "sick"))
    assert seen.error is not None and seen.error.code() is grpc.StatusCode.INTERNAL
    assert seen.reasons == [FAILED] * 3 and seen.token_ids == [[], [], []]
    assert_recorded(await record_of(site, "sick"), seen)
    worker.script = worker.execute
