"""Several samples of one request: each streams, ends and is kept by itself, and the request ends with the last.

Sample i of the scripted model goes up by i + 1 from the prompt's last token: see `scripted_model.counted`.
"""

import asyncio
from itertools import pairwise

import grpc
import pytest

from quire.v1 import inference_pb2 as pb
from tests.scheduler.journal_setup import until
from tests.scheduler.sample_outputs import RequestSeen, assert_recorded, num_released, record_of, sampled, see
from tests.scheduler.scripted_model import candidates, counted, logprob
from tests.scheduler.serving_site import Site
from tests.scheduler.speaking_site import make_speaking

LENGTH, STOP, FAILED = pb.FINISH_REASON_LENGTH, pb.FINISH_REASON_STOP, pb.FINISH_REASON_FAILED


async def test_every_sample_has_its_own_tokens_and_one_finish_before_the_end_of_the_request(site: Site) -> None:
    await site.add_worker()
    seen = await see(site, sampled(100, 6, 4, "four"))
    assert seen.accepted is not None and seen.accepted.num_samples == 4
    assert seen.token_ids == [counted(100, 6, i) for i in range(4)]
    assert seen.reasons == [LENGTH] * 4
    assert [sample.finish.sample_index for sample in seen.samples if sample.finish] == [0, 1, 2, 3]
    assert not any(sample.finish.HasField("score") for sample in seen.samples if sample.finish)
    assert (seen.end.usage.prompt_tokens, seen.end.usage.completion_tokens) == (1, 24)
    assert_recorded(await record_of(site, "four"), seen)


async def test_a_sample_is_what_a_request_of_its_own_with_its_index_gives(site: Site) -> None:
    await site.add_worker()
    together = await see(site, sampled(100, 5, 3, seed=7, first_sample_index=4))
    assert [sample.finish.sample_index for sample in together.samples if sample.finish] == [4, 5, 6]
    for index, sample in enumerate(together.samples):
        alone = await see(site, sampled(100, 5, 1, seed=7, first_sample_index=4 + index))
        assert alone.token_ids == [sample.token_ids] == [counted(100, 5, 4 + index)]


@pytest.mark.parametrize("n", [1, 3, 64])
async def test_one_token_of_each_sample_takes_one_step(site: Site, n: int) -> None:
    worker = await site.add_worker()
    seen = await see(site, sampled(100, 1, n))
    assert seen.token_ids == [[101 + i] for i in range(n)]
    assert seen.reasons == [LENGTH] * n
    assert len(worker.steps) == 1


async def test_samples_stream_while_they_are_made(site: Site) -> None:
    worker = await site.add_worker()
    worker.silence_after(3)
    running = asyncio.create_task(see(site, sampled(100, 9, 3, "slow")))
    await until(lambda: "slow" in site.engine.live and num_released(site, "slow") == [3, 3, 3])
    record = await record_of(site, "slow")
    assert record.state == pb.REQUEST_STATE_RUNNING
    assert [list(sample.token_ids) for sample in record.samples] == [counted(100, 3, i) for i in range(3)]
    assert not any(sample.HasField("finish") for sample in record.samples)
    assert record.usage.completion_tokens == 9
    worker.speak_again()
    seen = await running
    assert seen.token_ids == [counted(100, 9, i) for i in range(3)]
    assert min(sample.num_chunks for sample in seen.samples) >= 2


async def test_samples_end_each_in_its_time(site: Site) -> None:
    """Stop token 12 behind 0: in steps of 1, 2, 3 and 4 it is reached after 12, 6, 4 and 3 tokens; by fives never."""
    worker = await site.add_worker()
    worker.silence_after(8)
    request = sampled(0, 14, 5, "parting")
    request.stopping.stop_token_ids.append(12)
    running = asyncio.create_task(see(site, request))
    await until(lambda: "parting" in site.engine.live and num_released(site, "parting") == [8, 6, 4, 3, 8])
    record = await record_of(site, "parting")
    assert [sample.HasField("finish") for sample in record.samples] == [False, True, True, True, False]
    assert record.state == pb.REQUEST_STATE_RUNNING
    worker.speak_again()
    seen = await running
    assert seen.token_ids == [counted(0, num, i) for i, num in enumerate([12, 6, 4, 3, 14])]
    assert seen.reasons == [STOP, STOP, STOP, STOP, LENGTH]
    assert [sample.finish.stop_token_id for sample in seen.samples if sample.finish] == [12, 12, 12, 12, 0]
    assert seen.end.usage.completion_tokens == 12 + 6 + 4 + 3 + 14
    assert_recorded(await record_of(site, "parting"), seen)


@pytest.mark.parametrize("include_stop", [False, True])
async def test_a_stop_string_ends_the_samples_in_which_it_appears_and_no_others(site: Site, include_stop: bool) -> None:
    await site.add_worker()
    make_speaking(site)
    whole = await see(site, sampled(280, 30, 4))
    texts = [sample.text for sample in whole.samples]
    stop = texts[2][20:24]
    assert [stop in text for text in texts].count(True) in (1, 2, 3)
    request = sampled(280, 30, 4, "cut")
    request.stopping.stop.append(stop)
    request.stopping.include_stop = include_stop
    seen = await see(site, request)
    for sample, text, token_ids in zip(seen.samples, texts, whole.token_ids, strict=True):
        before, found, _ = text.partition(stop)
        assert sample.text == before + (found if include_stop else "")
        assert sample.token_ids == token_ids[: len(sample.token_ids)]
        assert sample.reason == (STOP if found else LENGTH)
        assert sample.finish is not None and sample.finish.stop_string == found
    assert_recorded(await record_of(site, "cut"), seen)


async def test_log_probabilities_stand_beside_the_tokens_of_each_sample(site: Site) -> None:
    worker = await site.add_worker()
    worker.tells_prompt_logprobs = True
    request = sampled(0, 6, 3)
    request.token_ids.ids[:] = prompt = [40, 30, 20, 10]
    request.output.logprobs = 2
    request.output.prompt_logprobs = 0
    seen = await see(site, request)
    for index, sample in enumerate(seen.samples):
        assert sample.token_ids == counted(10, 6, index)
        before = [10, *sample.token_ids]
        assert [each.token_id for each in sample.logprobs] == sample.token_ids
        for last, each in zip(before, sample.logprobs, strict=False):
            assert each.logprob == logprob(last, each.token_id)
            assert list(each.top_token_ids) == candidates(last, 2, allowed=(), held_back=())
    first, *others = seen.samples
    assert [(each.token_id, each.logprob) for each in first.prompt_logprobs] == [
        (token, logprob(last, token)) for last, token in pairwise(prompt)
    ]
    assert not any(sample.prompt_logprobs for sample in others)


async def test_requests_of_every_width_share_steps(site: Site) -> None:
    await site.add_worker()
    widths = [1, 4, 1, 2, 7, 1, 3]
    requests = [sampled(1000 * i, 12, n) for i, n in enumerate(widths)]
    seen: list[RequestSeen] = await asyncio.gather(*(see(site, request) for request in requests))
    for i, (n, each) in enumerate(zip(widths, seen, strict=True)):
        assert each.token_ids == [counted(1000 * i, 12, sample) for sample in range(n)]


async def test_in_little_memory_requests_with_samples_take_turns(site: Site) -> None:
    """16 blocks of 16 tokens: one of these requests fills 3 + 3 + 3 + 3 blocks at its end."""
    await site.add_worker(num_blocks=16)
    requests = [sampled(1000 * i, 40, 4, f"r{i}") for i in range(5)]
    for i, seen in enumerate(await asyncio.gather(*(see(site, each) for each in requests))):
        assert seen.token_ids == [counted(1000 * i, 40, sample) for sample in range(4)]


@pytest.mark.parametrize("how", ["cancelled", "expired"])
async def test_cut_short_every_sample_has_a_finish_and_those_that_had_ended_keep_theirs(site: Site, how: str) -> None:
    """Stop token 12 behind 0: sample 2 is done after 4 tokens, sample 3 after 3. Nothing is answered after 5."""
    worker = await site.add_worker()
    worker.silence_after(5)
    request = sampled(0, 200, 4, "short")
    request.stopping.stop_token_ids.append(12)
    running = asyncio.create_task(see(site, request))
    await until(lambda: "short" in site.engine.live and num_released(site, "short") == [5, 5, 4, 3])
    if how == "cancelled":
        await site.inference.Cancel(pb.CancelRequest(request_id="short"))
    else:
        site.engine.end(site.engine.live["short"], pb.REQUEST_STATE_EXPIRED)
    seen = await running
    state, reason, code = {
        "cancelled": (pb.REQUEST_STATE_CANCELLED, pb.FINISH_REASON_CANCELLED, grpc.StatusCode.CANCELLED),
        "expired": (pb.REQUEST_STATE_EXPIRED, pb.FINISH_REASON_DEADLINE, grpc.StatusCode.DEADLINE_EXCEEDED),
    }[how]
    assert seen.end.state == state
    assert seen.error is not None and seen.error.code() is code
    assert seen.reasons == [reason, reason, STOP, STOP]
    assert seen.token_ids == [counted(0, num, i) for i, num in enumerate([5, 5, 4, 3])]
    assert_recorded(await record_of(site, "short"), seen)
    worker.speak_again()


async def test_a_deadline_ends_all_samples(site: Site) -> None:
    worker = await site.add_worker()
    worker.silence_after(2)
    request = sampled(0, 200, 3, "late")
    request.timeout_ms = 200
    seen = await see(site, request)
    assert seen.error is not None and seen.error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    assert seen.reasons == [pb.FINISH_REASON_DEADLINE] * 3
    assert seen.token_ids == [counted(0, len(seen.token_ids[0]), i) for i in range(3)]
    worker.speak_again()


async def test_cancelled_before_it_ran_all_samples_are_empty(site: Site) -> None:
    worker = await site.add_worker()
    worker.may_answer.clear()
    running = asyncio.create_task(see(site, sampled(0, 5, 3, "early")))
    await until(lambda: "early" in site.engine.live)
    await site.inference.Cancel(pb.CancelRequest(request_id="early"))
    seen = await running
    assert seen.token_ids == [[], [], []]
    assert seen.reasons == [pb.FINISH_REASON_CANCELLED] * 3
    assert_recorded(await record_of(site, "early"), seen)
    worker.speak_again()


async def test_the_same_id_with_another_number_of_samples_is_another_request(site: Site) -> None:
    worker = await site.add_worker()
    worker.may_answer.clear()
    running = asyncio.create_task(see(site, sampled(0, 5, 3, "mine")))
    await until(lambda: "mine" in site.engine.live)
    for other in (sampled(0, 5, 2, "mine"), sampled(0, 5, 3, "mine", best_of=4), sampled(0, 5, 1, "mine")):
        seen = await see(site, other)
        assert seen.error is not None and seen.error.code() is grpc.StatusCode.ALREADY_EXISTS
    attached = asyncio.create_task(see(site, sampled(0, 5, 3, "mine")))
    await until(lambda: len(site.engine.live["mine"].stream.subscriptions) == 2)
    worker.speak_again()
    first, second = await running, await attached
    assert first.token_ids == second.token_ids == [counted(0, 5, i) for i in range(3)]
    assert second.accepted is not None and second.accepted.attached
    seen = await see(site, sampled(0, 5, 2, "mine"))
    assert seen.error is not None and seen.error.code() is grpc.StatusCode.ALREADY_EXISTS
    assert site.engine.num_admitted == 1


async def test_more_samples_than_a_worker_has_seats_for_are_refused_by_field(site: Site) -> None:
    await site.add_worker(num_seats=4)
    assert (await see(site, sampled(0, 3, 4))).token_ids == [counted(0, 3, i) for i in range(4)]
    for request, field in ((sampled(0, 3, 5), "sampling.n"), (sampled(0, 3, 2, best_of=5), "sampling.best_of")):
        seen = await see(site, request)
        assert seen.error is not None and seen.error.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert f"{field}: is 5, more than run at once on a worker: give at most 4" in (seen.error.details() or "")
