"""Requests that draw more samples than come back: nothing streams, the likeliest come at the end, best first."""

import asyncio
from itertools import pairwise
from statistics import fmean

import pytest

from quire.v1 import inference_pb2 as pb
from quire.v1 import journal_pb2
from tests.scheduler.journal_setup import until
from tests.scheduler.sample_outputs import assert_recorded, record_of, sampled, see
from tests.scheduler.scripted_model import counted, logprob
from tests.scheduler.serving_site import Site

LENGTH, STOP, FAILED = pb.FINISH_REASON_LENGTH, pb.FINISH_REASON_STOP, pb.FINISH_REASON_FAILED


def mean_logprob(start: int, num_tokens: int, index: int) -> float:
    tokens = [start, *counted(start, num_tokens, index)]
    return fmean(logprob(last, token) for last, token in pairwise(tokens))


@pytest.mark.parametrize("logprobs", [None, 0, 2])
async def test_of_more_samples_than_come_back_the_likeliest_come_at_the_end_best_first(
    site: Site, logprobs: int | None
) -> None:
    worker = await site.add_worker()
    worker.silence_after(4)
    request = sampled(100, 7, 3, "best", best_of=6, first_sample_index=2)
    if logprobs is not None:
        request.output.logprobs = logprobs
    running = asyncio.create_task(see(site, request))
    await until(lambda: "best" in site.engine.live and site.engine.live["best"].samples[5].stream.num_released == 4)
    record = await record_of(site, "best")
    assert not record.samples and not record.usage.completion_tokens and not record.timings.first_token_ns
    worker.speak_again()
    seen = await running
    ranked = sorted(range(2, 8), key=lambda index: -mean_logprob(100, 7, index))[:3]
    assert seen.accepted is not None and seen.accepted.num_samples == 3
    assert seen.token_ids == [counted(100, 7, index) for index in ranked]
    assert [sample.num_chunks for sample in seen.samples] == [1, 1, 1]
    finishes = [sample.finish for sample in seen.samples if sample.finish]
    assert [finish.sample_index for finish in finishes] == ranked
    assert [finish.score for finish in finishes] == pytest.approx([mean_logprob(100, 7, i) for i in ranked], rel=1e-6)
    for sample in seen.samples:
        assert [each.token_id for each in sample.logprobs] == ([] if logprobs is None else sample.token_ids)
        assert all(len(each.top_token_ids) == logprobs for each in sample.logprobs)
    assert seen.end.usage.completion_tokens == 21
    record = await record_of(site, "best")
    assert_recorded(record, seen)
    assert record.timings.first_token_ns > 0
    again = await see(site, request)
    assert again.accepted is not None and again.accepted.attached
    assert again.samples == seen.samples and again.finished == seen.finished
    kept = journal_pb2.RequestRecord.FromString(await site.engine.records.get("best") or b"")
    assert [len(sample.logprobs) for sample in kept.samples] == ([0] * 3 if logprobs is None else [7] * 3)


async def test_samples_of_different_lengths_are_ranked_by_the_mean_of_their_own_tokens(site: Site) -> None:
    """Stop token 12 behind 0 ends the samples after 12, 6, 4 and 3 tokens; by fives it is never met."""
    await site.add_worker()
    request = sampled(0, 14, 2, best_of=5)
    request.stopping.stop_token_ids.append(12)
    seen = await see(site, request)
    lengths = [12, 6, 4, 3, 14]
    ranked = sorted(range(5), key=lambda index: -mean_logprob(0, lengths[index], index))[:2]
    assert seen.token_ids == [counted(0, lengths[index], index) for index in ranked]


async def test_best_of_as_many_as_come_back_streams_in_the_order_of_the_samples(site: Site) -> None:
    await site.add_worker()
    seen = await see(site, sampled(100, 5, 3, best_of=3))
    assert seen.token_ids == [counted(100, 5, i) for i in range(3)]
    assert not any(sample.finish.HasField("score") for sample in seen.samples if sample.finish)


async def test_cut_short_the_likeliest_so_far_come_back(site: Site) -> None:
    worker = await site.add_worker()
    worker.silence_after(3)
    running = asyncio.create_task(see(site, sampled(100, 200, 2, "best", best_of=4)))
    await until(lambda: "best" in site.engine.live and site.engine.live["best"].samples[3].stream.num_released == 3)
    await site.inference.Cancel(pb.CancelRequest(request_id="best"))
    seen = await running
    ranked = sorted(range(4), key=lambda index: -mean_logprob(100, 3, index))[:2]
    assert seen.token_ids == [counted(100, 3, index) for index in ranked]
    assert seen.reasons == [pb.FINISH_REASON_CANCELLED] * 2
    assert_recorded(await record_of(site, "best"), seen)
    worker.speak_again()


async def test_cancelled_before_it_ran_a_ranked_request_has_samples_without_score(site: Site) -> None:
    worker = await site.add_worker()
    worker.may_answer.clear()
    running = asyncio.create_task(see(site, sampled(0, 5, 2, "early", best_of=4)))
    await until(lambda: "early" in site.engine.live)
    await site.inference.Cancel(pb.CancelRequest(request_id="early"))
    seen = await running
    assert seen.token_ids == [[], []]
    assert not any(sample.finish.HasField("score") for sample in seen.samples if sample.finish)
    worker.speak_again()


async def test_the_prompt_of_a_ranked_request_is_told_with_the_best_sample(site: Site) -> None:
    worker = await site.add_worker()
    worker.tells_prompt_logprobs = True
    request = sampled(0, 6, 2, best_of=5)
    request.token_ids.ids[:] = [40, 30, 20, 10]
    request.output.prompt_logprobs = 1
    seen = await see(site, request)
    assert [each.token_id for each in seen.samples[0].prompt_logprobs] == [30, 20, 10]
    assert not seen.samples[1].prompt_logprobs and not seen.samples[0].logprobs
