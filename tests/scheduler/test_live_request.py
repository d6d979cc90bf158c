"""A live request by itself: what it is made of, which samples come back, and its forms for readers and journal."""

import math

import pytest

from common.arrays import unpack_int32
from quire.v1 import inference_pb2 as pb
from quire.v1 import journal_pb2
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.scheduler_config import SchedulerConfig
from scheduler_svc.requests.live.end_report import first_token_ns, mean_token_ns
from scheduler_svc.requests.live.live_request import LiveRequest, RequestTimes, set_token_stop
from scheduler_svc.requests.live.new_request import prefix_hash_seed
from scheduler_svc.requests.live.paused_requests import PausedRequests
from scheduler_svc.requests.live.request_record import record_of, stream_of_record
from tests.scheduler.live_requests import (
    ARRIVED_NS,
    ARRIVED_UNIX_NS,
    MAX_TOKENS,
    PROMPT,
    SEQ_ID,
    drawing,
    live,
    logprob_of,
    settle,
)
from tests.scheduler.request_settling import request_of, settled
from tests.scheduler.text_tokenizers import byte_level_json, ours

LENGTH, STOP, CANCELLED = pb.FINISH_REASON_LENGTH, pb.FINISH_REASON_STOP, pb.FINISH_REASON_CANCELLED


def restated(request: LiveRequest) -> journal_pb2.JournalEntry:
    """Restate a request in an entry."""
    request.admission = journal_pb2.Admission(sequence=request.number)
    entry = journal_pb2.JournalEntry()
    request.restate(entry)
    assert len(entry.restatements) == 1 and entry.restatements[0].admission.sequence == request.number
    return entry


def test_each_sample_has_a_sequence_of_its_own_with_the_prompt() -> None:
    request = live(drawing(3, first_sample_index=5))
    sequences = request.group.sequences
    assert [each.seq_id for each in sequences] == [SEQ_ID, SEQ_ID + 1, SEQ_ID + 2]
    assert [(each.token_ids, each.num_prompt_tokens, each.max_tokens) for each in sequences] == [(PROMPT, 3, 9)] * 3
    assert [sample.sample_index for sample in request.samples] == [5, 6, 7]
    for number, sequence in enumerate(sequences):
        sequence.token_ids.append(number)
    assert [sample.token_ids[3:] for sample in request.samples] == [[0], [1], [2]]
    assert [sample.num_tokens for sample in request.samples] == [1, 1, 1]
    assert request.number == SEQ_ID and request.num_prompt_tokens == 3 and request.max_tokens == MAX_TOKENS
    assert request.num_tokens == 3 + 3
    assert not request.group.awaits_host and not request.group.num_candidates and request.beams is None


def test_what_was_accepted_is_said_with_every_number() -> None:
    request = live(drawing(2, seed=123))
    assert request.stream.accepted == pb.Accepted(
        request_id="made",
        num_prompt_tokens=3,
        max_tokens=MAX_TOKENS,
        seed=123,
        num_samples=2,
        created_unix_ns=ARRIVED_UNIX_NS,
    )


def test_stop_tokens_and_the_models_own_end_a_sample_but_not_a_beam() -> None:
    stopping = pb.StoppingParams(stop_token_ids=[7], min_tokens=2)
    (sequence,) = live(request_of(stopping=stopping)).group.sequences
    assert (sequence.stop_token_ids, sequence.min_tokens) == (frozenset({2, 3, 7}), 2)
    (sequence,) = live().group.sequences
    assert (sequence.stop_token_ids, sequence.min_tokens) == (frozenset({2, 3}), 0)
    search = live(request_of(stopping=stopping, beam=pb.BeamParams(beam_width=2), sampling=pb.SamplingParams(n=2)))
    assert [each.stop_token_ids for each in search.group.sequences] == [frozenset()] * 2


def test_a_search_streams_one_sample_that_grows_with_what_all_beams_share() -> None:
    search = live(request_of(beam=pb.BeamParams(beam_width=2), sampling=pb.SamplingParams(n=2)))
    assert search.group.awaits_host and search.beams is not None
    assert search.group.num_candidates == search.beams.num_candidates > 0
    (sample,) = search.samples
    assert sample.sequence is None and sample.sample_index == 0 and search.stream.samples == [sample.stream]
    search.beams.common_token_ids.extend([5, 6])
    assert (sample.token_ids, sample.num_tokens, search.num_tokens) == ([5, 6], 2, 5)


def test_samples_stream_unless_they_are_ranked() -> None:
    request = live(drawing(2))
    assert request.stream.samples == [sample.stream for sample in request.samples]
    assert live(drawing(2, best_of=3)).stream.samples == []


def test_the_prefix_cache_is_not_asked_where_the_prompt_is_told() -> None:
    assert [live(request_of(output=each)).group.sequences[0].use_prefix_cache for each in OUTPUTS] == [
        True,
        True,
        False,
    ]


OUTPUTS = [pb.OutputParams(), pb.OutputParams(logprobs=0), pb.OutputParams(prompt_logprobs=0)]


def test_tenants_and_salts_have_prefixes_of_their_own() -> None:
    seeds = [
        prefix_hash_seed(*each) for each in (("", ""), ("a", ""), ("", "a"), ("a", "bc"), ("ab", "c"), ("1:a", ""))
    ]
    assert len(set(seeds)) == len(seeds)
    request = live(request_of(tenant="a", cache_salt="bc"))
    assert request.group.sequences[0].hash_seed == prefix_hash_seed("a", "bc")
    assert request.group.owner == "a"


def test_moments_are_told_since_the_arrival() -> None:
    assert RequestTimes(arrived_ns=100, arrived_unix_ns=7).to_pb() == pb.Timings()
    times = RequestTimes(
        arrived_ns=100, arrived_unix_ns=7, accepted_ns=101, first_scheduled_ns=103, first_token_ns=106, finished_ns=110
    )
    assert times.to_pb() == pb.Timings(accepted_ns=1, first_scheduled_ns=3, first_token_ns=6, finished_ns=10)
    times.accepted_ns = 90  # of a clock before
    assert times.to_pb().accepted_ns == 0


def test_the_likeliest_samples_come_back_best_first() -> None:
    request = live(drawing(2, best_of=4))
    for sample, logprobs in zip(request.samples, ([-3.0], [-1.0, -2.0], [], [-1.0]), strict=True):
        settle(sample, *range(20, 20 + len(logprobs)), logprobs=logprobs)
        sample.finish = pb.SampleFinish(reason=LENGTH)
    chosen = request.choose_samples()
    assert chosen == [request.samples[3].stream, request.samples[1].stream]
    scores = [
        sample.finish.score if sample.finish and sample.finish.HasField("score") else None for sample in request.samples
    ]
    assert scores == [-3.0, -1.5, None, -1.0]
    assert request.samples[2].mean_logprob == -math.inf


def test_all_samples_come_back_in_their_order_if_none_is_left_out() -> None:
    request = live(drawing(2))
    for sample, logprob in zip(request.samples, (-2.0, -1.0), strict=True):
        settle(sample, 20, logprobs=[logprob])
        sample.finish = pb.SampleFinish(reason=LENGTH)
    assert request.choose_samples() == [sample.stream for sample in request.samples]
    assert not any(sample.finish.HasField("score") for sample in request.samples if sample.finish)


@pytest.mark.parametrize(("token_id", "expected"), [(2, {"eos_token_id": 2}), (7, {"stop_token_id": 7})])
def test_a_token_that_ends_a_sample_is_the_models_or_the_clients(token_id: int, expected: dict[str, int]) -> None:
    finish = pb.SampleFinish()
    set_token_stop(finish, settled(request_of(stopping=pb.StoppingParams(stop_token_ids=[7]))), token_id)
    assert finish == pb.SampleFinish(reason=STOP, **expected)  # type: ignore[arg-type]


def test_only_what_is_durable_is_restated() -> None:
    request = live(drawing(3))
    first, second, third = request.samples
    for sample in request.samples:
        settle(sample, 20, 21, 22, logprobs=[-1.0, -2.0, -3.0])
    first.num_durable, second.num_durable, third.num_durable = 2, 3, 3
    second.finish = third.finish = pb.SampleFinish(reason=LENGTH)
    third.is_end_durable = True
    request.stream.prompt_logprobs = [logprob_of(12), logprob_of(13)]
    (said,) = restated(request).restatements
    assert [list(unpack_int32(sample.token_ids)) for sample in said.samples] == [[20, 21], [20, 21, 22], [20, 21, 22]]
    assert [len(sample.logprobs) for sample in said.samples] == [2, 3, 3]
    assert [sample.HasField("finish") for sample in said.samples] == [False, False, True]
    assert not said.prompt_logprobs and not said.num_preemptions and not said.HasField("pause")
    request.durable.has_prompt_logprobs = True
    request.durable.num_preemptions = 4
    request.set_durable_pause(True)
    (said,) = restated(request).restatements
    assert [each.token_id for each in said.prompt_logprobs] == [12, 13]
    assert said.num_preemptions == 4
    assert (said.pause.sequence, said.pause.paused) == (SEQ_ID, True)
    request.set_durable_pause(False)
    assert not restated(request).restatements[0].HasField("pause")


def test_an_end_that_is_not_a_samples_own_is_restated_with_the_request() -> None:
    request = live()
    (sample,) = request.samples
    sample.finish, sample.is_end_durable = pb.SampleFinish(reason=CANCELLED), True
    entry = restated(request)
    assert not entry.restatements[0].samples[0].HasField("finish") and not entry.finishes
    request.durable.finish = journal_pb2.Finish(sequence=SEQ_ID, state=pb.REQUEST_STATE_CANCELLED)
    entry = restated(request)
    assert list(entry.finishes) == [request.durable.finish]


def ended_request() -> LiveRequest:
    """Two samples of 3 and 1 tokens, of which the end may be seen."""
    output = pb.OutputParams(token_ids=True, logprobs=0, prompt_logprobs=0)
    asked = request_of(sampling=pb.SamplingParams(n=2), output=output, tenant="acme")
    request = live(asked, tokenizer=ours(byte_level_json()))
    request.stream.prompt_logprobs = [logprob_of(12), logprob_of(13)]
    request.times.accepted_ns = ARRIVED_NS + 1
    request.times.finished_ns = ARRIVED_NS + 700
    for sample, tokens in zip(request.samples, ([20, 21, 22], [30]), strict=True):
        settle(sample, *tokens, logprobs=[-1.0] * len(tokens))
        sample.finish = pb.SampleFinish(reason=LENGTH)
    request.ended_state, request.error = pb.REQUEST_STATE_FAILED, "why"
    request.settle_outcome()
    for sample in request.samples:
        assert sample.finish is not None
        sample.stream.close(sample.finish)
    assert request.outcome is not None
    request.stream.close(request.outcome)
    return request


def test_an_end_says_how_much_came_and_when() -> None:
    request = ended_request()
    assert request.outcome is not None
    assert (request.outcome.state, request.outcome.error) == (pb.REQUEST_STATE_FAILED, "why")
    assert (request.outcome.usage.prompt_tokens, request.outcome.usage.completion_tokens) == (3, 4)
    assert request.outcome.timings == pb.Timings(accepted_ns=1, first_token_ns=700, finished_ns=700), "in one piece"
    entry = request.to_finish_entry()
    assert entry == journal_pb2.Finish(
        sequence=SEQ_ID,
        state=pb.REQUEST_STATE_FAILED,
        error="why",
        finished_unix_ns=ARRIVED_UNIX_NS + 700,
        outcome=request.outcome,
    )


def test_what_is_said_of_an_ended_request_is_what_was_said_at_its_end() -> None:
    request = ended_request()
    said = request.to_response()
    request.group.num_preemptions += 1
    request.group.num_copied_blocks += 1
    request.times.finished_ns = ARRIVED_NS + 800
    assert request.outcome is not None
    assert request.to_response() == said
    assert (said.usage, said.timings, said.memory, said.error, said.state) == (
        request.outcome.usage,
        request.outcome.timings,
        request.outcome.memory,
        "why",
        pb.REQUEST_STATE_FAILED,
    )


def test_what_is_said_of_a_live_request_is_how_it_is_now() -> None:
    request = live()
    settle(request.samples[0], 20, 21)
    request.samples[0].stream.num_released = 1
    request.group.num_preemptions, request.group.num_copied_blocks = 3, 4
    request.times.accepted_ns = ARRIVED_NS + 1
    said = request.to_response()
    assert (said.usage.completion_tokens, said.usage.num_preemptions, said.memory.copied_blocks) == (1, 3, 4)
    assert (said.timings, list(said.samples[0].token_ids)) == (pb.Timings(accepted_ns=1), [20])


def test_the_state_of_a_request_is_that_of_its_group_until_its_end_is_durable() -> None:
    scheduler = Scheduler(SchedulerConfig(pipeline_depth=1))
    scheduler.workers.add_worker("w", num_blocks=40, block_size=4, num_seats=16)
    request, never_ran = live(), live()
    scheduler.add(request.group)
    assert request.state == pb.REQUEST_STATE_WAITING
    plan = scheduler.schedule("w")
    assert plan is not None and request.state == pb.REQUEST_STATE_RUNNING
    request.times.first_scheduled_ns = ARRIVED_NS + 1
    scheduler.apply("w", plan.step_id, [20])
    scheduler.pause(request.group, keep_on_host=False)
    assert request.state == pb.REQUEST_STATE_PAUSED
    request.ended_state = never_ran.ended_state = pb.REQUEST_STATE_CANCELLED
    assert (request.state, never_ran.state) == (pb.REQUEST_STATE_RUNNING, pb.REQUEST_STATE_WAITING)
    for each in (request, never_ran):
        each.stream.close(each.settle_outcome())
        assert each.state == pb.REQUEST_STATE_CANCELLED


def test_an_end_without_output_has_no_first_token() -> None:
    request = live()
    request.ended_state, request.times.finished_ns = pb.REQUEST_STATE_CANCELLED, ARRIVED_NS + 700
    assert request.settle_outcome().timings == pb.Timings(finished_ns=700)
    assert first_token_ns(request) is None and mean_token_ns(request) is None


def test_the_time_of_the_first_token_stays_what_it_was() -> None:
    request = live()
    settle(request.samples[0], 20)
    request.times.first_token_ns, request.times.finished_ns = ARRIVED_NS + 300, ARRIVED_NS + 700
    request.ended_state = pb.REQUEST_STATE_FINISHED
    assert request.settle_outcome().timings == pb.Timings(first_token_ns=300, finished_ns=700)


@pytest.mark.parametrize(("num_tokens", "expected"), [((1,), None), ((2,), 400), ((3,), 200), ((1, 5, 2), 100)])
def test_the_time_between_tokens_is_the_mean_of_the_longest_sample(
    num_tokens: tuple[int, ...], expected: int | None
) -> None:
    request = live(drawing(len(num_tokens)))
    for sample, number in zip(request.samples, num_tokens, strict=True):
        settle(sample, *range(20, 20 + number))
        sample.stream.num_released = number
    request.times.first_token_ns, request.times.finished_ns = ARRIVED_NS + 300, ARRIVED_NS + 700
    assert (first_token_ns(request), mean_token_ns(request)) == (300, expected)
    request.times.finished_ns = ARRIVED_NS + 200  # decided before its tokens were released
    assert mean_token_ns(request) == (None if expected is None else 0)


def test_a_record_says_all_that_a_late_reader_of_the_request_may_ask() -> None:
    request = ended_request()
    record = journal_pb2.RequestRecord.FromString(record_of(request).SerializeToString())
    assert record.request_digest == b"digest"
    assert record.response == request.to_response()
    assert (record.response.request_id, record.response.tenant) == ("made", "acme")
    assert record.response.created_unix_ns == ARRIVED_UNIX_NS
    stream = stream_of_record(record)
    expected = pb.Accepted()
    expected.CopyFrom(request.stream.accepted)
    expected.attached = True
    assert stream.accepted == expected
    assert stream.wanted == request.stream.wanted and stream.finished == request.stream.finished
    assert list(stream.prompt_logprobs) == list(request.stream.prompt_logprobs)
    for read, kept in zip(stream.samples, request.stream.samples, strict=True):
        assert (read.token_ids, read.num_released, read.finish) == (kept.token_ids, kept.num_released, kept.finish)
        assert list(read.logprobs) == list(kept.logprobs) != []
        assert (read.released_text, read.text_log.released_ends) == (kept.released_text, kept.text_log.released_ends)
        assert read.released_text


def test_a_record_leaves_out_log_probabilities_that_only_ranked_the_samples() -> None:
    request = live(drawing(1, best_of=2))
    for sample in request.samples:
        settle(sample, 20, logprobs=[-1.0])
        sample.finish = pb.SampleFinish(reason=LENGTH)
        sample.stream.close(sample.finish)
    request.ended_state = pb.REQUEST_STATE_FINISHED
    request.stream.samples.extend(request.choose_samples())
    request.stream.close(request.settle_outcome())
    (kept,) = record_of(request).samples
    assert not kept.logprobs


def test_paused_requests_count_by_tenant_with_the_tokens_that_they_had() -> None:
    paused = PausedRequests()
    mine, more, other = (live(request_of(tenant=tenant)) for tenant in ("acme", "acme", "other"))
    mine.samples[0].token_ids.extend([20, 21])
    for request in (mine, mine, more, other):
        paused.add(request)
    mine.samples[0].token_ids.append(22)  # of a step that was in flight
    assert (len(paused), paused.size(), paused.size_of("acme"), paused.size_of("other")) == (
        3,
        (3, 5 + 3 + 3),
        (2, 5 + 3),
        (1, 3),
    )
    for _ in range(2):
        paused.discard(mine)
    assert mine not in paused and more in paused
    assert (len(paused), paused.size_of("acme")) == (2, (1, 3))
    paused.discard(more)
    paused.discard(other)
    assert (len(paused), paused.size(), paused.size_of("acme")) == (0, (0, 0), (0, 0))
