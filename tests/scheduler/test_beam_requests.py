"""Beam searches as requests: what streams meanwhile, what comes back, and how they share steps with others.

What is expected comes from `scripted_beams`, the same search without scheduler, worker and wire.
"""

import asyncio

import grpc
import pytest

from quire.v1 import inference_pb2 as pb
from tests.scheduler.journal_setup import until
from tests.scheduler.raw_session import RawSession
from tests.scheduler.sample_outputs import assert_recorded, record_of, see
from tests.scheduler.scripted_beams import (
    assert_found,
    expected,
    search_of,
    searching,
    tokens_of,
    until_steps,
)
from tests.scheduler.scripted_model import candidates, counted, logprob
from tests.scheduler.scripted_worker import ScriptedWorker
from tests.scheduler.serving_site import Site, counting
from tests.scheduler.speaking_site import make_speaking

LENGTH, STOP, FAILED = pb.FINISH_REASON_LENGTH, pb.FINISH_REASON_STOP, pb.FINISH_REASON_FAILED


@pytest.mark.parametrize("early_stopping", [pb.EARLY_STOPPING_FALSE, pb.EARLY_STOPPING_TRUE, pb.EARLY_STOPPING_NEVER])
@pytest.mark.parametrize("beam_width", [2, 4, 7])
async def test_the_best_hypotheses_come_back_best_first_with_their_scores(
    site: Site, beam_width: int, early_stopping: pb.EarlyStopping.ValueType
) -> None:
    await site.add_worker()
    finishes = set()
    for i, length_penalty in enumerate((0.0, 0.6, 1.0, 1.4)):
        request = searching(
            100 * i + 7,
            12,
            beam_width,
            f"search-{i}",
            early_stopping=early_stopping,
            length_penalty=length_penalty,
        )
        seen = await see(site, request)
        assert seen.accepted is not None and seen.accepted.num_samples == beam_width
        assert_found(seen, request)
        assert_recorded(await record_of(site, f"search-{i}"), seen)
        finishes |= set(seen.reasons)
    assert finishes == {STOP, LENGTH} or early_stopping == pb.EARLY_STOPPING_TRUE


@pytest.mark.parametrize("n", [1, 3])
async def test_no_more_come_back_than_were_asked_for(site: Site, n: int) -> None:
    await site.add_worker()
    request = searching(100, 10, 5, n=n)
    seen = await see(site, request)
    assert len(seen.samples) == n
    assert_found(seen, request)
    request.sampling.ClearField("n")
    assert (await see(site, request)).token_ids == seen.token_ids[:1]


@pytest.mark.parametrize("max_tokens", [1, 2])
async def test_the_shortest_searches_come_back_too(site: Site, max_tokens: int) -> None:
    await site.add_worker()
    request = searching(100, max_tokens, 4)
    assert_found(await see(site, request), request)


async def test_stop_tokens_end_hypotheses_and_min_tokens_holds_all_ends_back(site: Site) -> None:
    await site.add_worker()
    request = searching(100, 10, 4)
    request.stopping.stop_token_ids.extend(list(expected(request)[0].token_ids[3:5]))
    seen = await see(site, request)
    assert_found(seen, request)
    causes = [sample.finish.WhichOneof("cause") for sample in seen.samples if sample.finish]
    assert "stop_token_id" in causes
    request.stopping.min_tokens = 6
    later = await see(site, request)
    assert_found(later, request)
    assert min(len(sample.token_ids) for sample in seen.samples) < 6
    assert min(len(sample.token_ids) for sample in later.samples) > 6
    request.stopping.ClearField("min_tokens")
    request.stopping.ClearField("stop_token_ids")
    request.stopping.ignore_eos = True
    endless = await see(site, request)
    assert_found(endless, request)
    assert endless.reasons == [LENGTH] * 4


async def test_what_all_hypotheses_have_in_common_streams_and_the_rest_comes_at_the_end(site: Site) -> None:
    worker = await site.add_worker()
    request = searching(100, 16, 3, "streaming")
    search = search_of(request)
    search.run(9)
    common = list(search.search.common_prefix())
    assert 0 < len(common) < 9
    worker.silence_after(9)
    running = asyncio.create_task(see(site, request))
    await until_steps(site, "streaming", 9)
    record = await record_of(site, "streaming")
    assert [list(sample.token_ids) for sample in record.samples] == [common]
    assert record.state == pb.REQUEST_STATE_RUNNING
    assert record.usage.completion_tokens == len(common)
    worker.speak_again()
    seen = await running
    assert_found(seen, request)
    assert seen.token_ids[0][: len(common)] == common
    assert seen.samples[0].num_chunks >= 2
    assert [sample.num_chunks for sample in seen.samples[1:]] == [1, 1]
    again = await see(site, request)
    assert again.token_ids == seen.token_ids and again.finished == seen.finished


async def test_hypotheses_come_back_with_the_log_probabilities_of_their_tokens(site: Site) -> None:
    worker = await site.add_worker()
    worker.tells_prompt_logprobs = True
    request = searching(100, 12, 4, "telling")
    request.token_ids.ids[:] = [40, 30, 20, 10]
    request.output.logprobs = 2
    request.output.prompt_logprobs = 0
    worker.silence_after(7)
    running = asyncio.create_task(see(site, request))
    await until_steps(site, "telling", 7)
    worker.speak_again()
    seen = await running
    assert_found(seen, request)
    for sample in seen.samples:
        before = [10, *sample.token_ids]
        assert [each.token_id for each in sample.logprobs] == sample.token_ids
        for last, each in zip(before, sample.logprobs, strict=False):
            assert each.logprob == logprob(last, each.token_id)
            assert list(each.top_token_ids) == candidates(last, 2, allowed=(), held_back=())
    assert [each.token_id for each in seen.samples[0].prompt_logprobs] == [30, 20, 10]
    assert not any(sample.prompt_logprobs for sample in seen.samples[1:])


async def test_fewer_come_back_where_fewer_are_allowed(site: Site) -> None:
    await site.add_worker()
    request = searching(100, 5, 4)
    request.sampling.allowed_token_ids.append(7)
    seen = await see(site, request)
    assert_found(seen, request)
    assert seen.token_ids == [[7] * 5]
    assert seen.accepted is not None and seen.accepted.num_samples == 4
    request.sampling.allowed_token_ids.append(8)
    request.stopping.max_tokens = 1
    seen = await see(site, request)
    assert_found(seen, request)
    assert sorted(seen.token_ids) == [[7], [8]]


@pytest.mark.parametrize("how", ["cancelled", "expired"])
@pytest.mark.parametrize("num_steps", [1, 6])
async def test_cut_short_the_best_so_far_comes_back(site: Site, num_steps: int, how: str) -> None:
    worker = await site.add_worker()
    worker.silence_after(num_steps)
    request = searching(200, 30, 4, "short", early_stopping=pb.EARLY_STOPPING_NEVER)
    running = asyncio.create_task(see(site, request))
    await until_steps(site, "short", num_steps)
    if how == "cancelled":
        await site.inference.Cancel(pb.CancelRequest(request_id="short"))
        reason, code = pb.FINISH_REASON_CANCELLED, grpc.StatusCode.CANCELLED
    else:
        site.engine.end(site.engine.live["short"], pb.REQUEST_STATE_EXPIRED)
        reason, code = pb.FINISH_REASON_DEADLINE, grpc.StatusCode.DEADLINE_EXCEEDED
    seen = await running
    assert seen.error is not None and seen.error.code() is code
    best = expected(request, num_steps)
    assert seen.token_ids == tokens_of(best)
    assert [sample.finish.score for sample in seen.samples if sample.finish] == [each.score for each in best]
    assert seen.reasons == [STOP if each.finish == "eos" else reason for each in best]
    assert num_steps == 1 or {each.finish for each in best} == {"eos", None}
    assert_recorded(await record_of(site, "short"), seen)
    worker.speak_again()


async def test_cancelled_before_its_first_step_a_search_comes_back_with_one_empty_sample(site: Site) -> None:
    worker = await site.add_worker()
    worker.may_answer.clear()
    running = asyncio.create_task(see(site, searching(100, 9, 4, "early")))
    await until(lambda: "early" in site.engine.live)
    await site.inference.Cancel(pb.CancelRequest(request_id="early"))
    seen = await running
    assert seen.token_ids == [[]] and seen.reasons == [pb.FINISH_REASON_CANCELLED]
    assert_recorded(await record_of(site, "early"), seen)
    worker.speak_again()


async def test_in_little_memory_searches_take_turns(site: Site) -> None:
    """16 blocks of 16 tokens: one of these needs up to 4 * 3, so that two hardly run together."""
    await site.add_worker(num_blocks=16)
    requests = [searching(100 * i, 40, 4) for i in range(4)]
    for request, seen in zip(requests, await asyncio.gather(*(see(site, each) for each in requests)), strict=True):
        assert_found(seen, request)


async def test_prompts_in_pieces_and_beams_over_several_steps_change_nothing(site: Site) -> None:
    """5 tokens a step: a prompt of 12 takes three, and six beams take two."""
    worker = ScriptedWorker()
    worker.description.max_batched_tokens = 5
    await site.start_worker(worker)
    requests = [searching(100, 10, 6), searching(300, 10, 3)]
    for request in requests:
        request.token_ids.ids[:] = [*range(1, 12), request.token_ids.ids[0]]
    for request, seen in zip(requests, await asyncio.gather(*(see(site, each) for each in requests)), strict=True):
        assert_found(seen, request)


async def test_greedy_drawn_and_beam_requests_share_steps(site: Site) -> None:
    await site.add_worker()
    searches = [searching(100 * i, 15, 2 + i) for i in range(3)]
    drawn = [counting(1000 * i, 15) for i in range(3)]
    for i, request in enumerate(drawn):
        request.sampling.n = 1 + i
    found = await asyncio.gather(*(see(site, each) for each in [*searches, *drawn]))
    for request, seen in zip(searches, found, strict=False):
        assert_found(seen, request)
    for i, seen in enumerate(found[3:]):
        assert seen.token_ids == [counted(1000 * i, 15, sample) for sample in range(1 + i)]


async def test_more_beams_than_a_worker_has_seats_for_are_refused_by_field(site: Site) -> None:
    await site.add_worker(num_seats=4)
    seen = await see(site, searching(100, 5, 5))
    assert seen.error is not None and seen.error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "beam.beam_width: is 5, more than run at once on a worker: give at most 4" in (seen.error.details() or "")


@pytest.mark.parametrize("include_stop", [False, True])
async def test_hypotheses_come_with_their_texts(site: Site, include_stop: bool) -> None:
    """Tokens from 40 to about 400, of which the tokenizer knows the words; a stop token is text if that is wanted."""
    await site.add_worker()
    tokenizer = make_speaking(site)
    request = searching(40, 7, 4)
    request.stopping.ignore_eos = True
    request.stopping.include_stop = include_stop
    request.stopping.stop_token_ids.append(expected(request)[1].token_ids[2])
    seen = await see(site, request)
    assert_found(seen, request)
    assert set(seen.reasons) == {STOP, LENGTH}
    for sample in seen.samples:
        is_cut = sample.reason == STOP and not include_stop
        words = sample.token_ids[:-1] if is_cut else sample.token_ids
        assert sample.text == tokenizer.decode([40, *words], False).removeprefix(tokenizer.decode([40], False))


async def test_a_reader_comes_back_to_its_place_in_the_common_prefix_and_after_the_end(site: Site) -> None:
    worker = await site.add_worker()
    request = searching(100, 16, 3, "back")
    common = list(search_of(request).run(9).common_prefix())
    worker.silence_after(9)
    running = asyncio.create_task(see(site, request))
    await until_steps(site, "back", 9)
    session = RawSession(site)
    await session.say(1, attach=pb.Attach(request_id="back", from_positions=[len(common) + 1]))
    await session.say(2, attach=pb.Attach(request_id="back", from_positions=[0, 1]))
    await session.say(3, attach=pb.Attach(request_id="back", from_positions=[len(common), 0, 0]))
    for handle in (1, 2, 3):  # who is ahead of what is known waits for it
        await session.read_until("accepted", handle)
    worker.speak_again()
    seen = await running
    ends = [len(each) for each in seen.token_ids]
    for handle in (1, 2, 3):
        await session.read_until("finished", handle)
    await session.say(4, attach=pb.Attach(request_id="back", from_positions=[ends[0], 2]))
    await session.read_until("finished", 4)
    attached = {1: [len(common) + 1, 0, 0], 2: [0, 1, 0], 3: [len(common), 0, 0], 4: [ends[0], 2, 0]}
    for handle, places in attached.items():
        chunks = [event.chunk for event in session.events if event.handle == handle and event.HasField("chunk")]
        for index, (place, tokens) in enumerate(zip(places, seen.token_ids, strict=True)):
            mine = [chunk for chunk in chunks if chunk.index == index]
            assert mine[0].position == place
            assert [token for chunk in mine for token in chunk.token_ids] == tokens[place:]
    await session.close()
