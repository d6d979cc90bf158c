"""Requests rebuilt from their entries in the journal: what readers and later leaders find in them, and what is refused.

No store, no worker and no event loop: entries in, live requests out.
"""

import time
from typing import Any

import pytest

from common.arrays import pack_float32, pack_int32, pack_int64
from quire.v1 import inference_pb2 as pb
from quire.v1 import journal_pb2
from scheduler_svc.core.sequence import SequenceStatus
from scheduler_svc.requests.live.live_request import LiveRequest
from scheduler_svc.requests.live.request_record import record_of, stream_of_record
from scheduler_svc.requests.params.prompt_checks import ModelLimits
from scheduler_svc.requests.params.served_model import ServedModel
from scheduler_svc.requests.recovery.journal_replay import JournaledRequest
from scheduler_svc.requests.recovery.rebuilding import arrival_times, rebuild_request
from scheduler_svc.requests.recovery.textless_record import record_without_text
from tests.scheduler.journal_setup import replayed
from tests.scheduler.scripted_beams import searching
from tests.scheduler.text_tokenizers import byte_level_json, ours

TOKENIZER = ours(byte_level_json())
EOS = 479
MODEL = ServedModel(
    name="m",
    fingerprint="m-1",
    architecture="a",
    dtype="float32",
    limits=ModelLimits(
        vocab_size=480,
        max_model_len=1000,
        eos_token_ids=frozenset({EOS}),
        has_tokenizer=True,
        has_chat_template=False,
    ),
    tokenizer=TOKENIZER,
    tokenizer_fingerprint="t-1",
)
NUMBER = 7  # of the request's first sequence
PROMPT = [300, 301, 302]
ARRIVED_UNIX_NS = 1_700_000_000_000_000_000
SECOND_NS = 1_000_000_000


def asked(n: int = 1, max_tokens: int = 9, **sampling: Any) -> pb.GenerateRequest:
    """Request as the journal has it: settled, and without its prompt."""
    request = pb.GenerateRequest(request_id="r", tenant="acme", sampling=pb.SamplingParams(n=n, seed=3, **sampling))
    request.stopping.max_tokens = max_tokens
    request.output.token_ids = True
    return request


def sought(max_tokens: int = 9, **beam: Any) -> pb.GenerateRequest:
    request = searching(300, max_tokens, 2, "r", **beam)
    request.sampling.seed = 3
    request.ClearField("token_ids")
    return request


def logprob(token_id: int, value: float = -1.0) -> pb.TokenLogprobs:
    return pb.TokenLogprobs(token_id=token_id, logprob=value)


def deltas(*samples: list[int], logprobs: bool = False) -> journal_pb2.JournalEntry:
    """Tokens of each sample."""
    of_sequences = [(NUMBER + index, token_id) for index, each in enumerate(samples) for token_id in each]
    entry = journal_pb2.JournalEntry(
        delta_sequences=pack_int64([number for number, _ in of_sequences]),
        delta_tokens=pack_int32([token_id for _, token_id in of_sequences]),
    )
    for delta, (number, token_id) in enumerate(of_sequences if logprobs else []):
        entry.delta_logprobs.add(delta=delta, logprobs=logprob(token_id, NUMBER - number - 1.0))
    return entry


def stopped(index: int, **finish: Any) -> journal_pb2.JournalEntry:
    entry = journal_pb2.JournalEntry()
    entry.sample_finishes.add(
        sequence=NUMBER + index, finish=pb.SampleFinish(reason=pb.FINISH_REASON_STOP, sample_index=index, **finish)
    )
    return entry


def ended(state: pb.RequestState.ValueType, **fields: Any) -> journal_pb2.JournalEntry:
    entry = journal_pb2.JournalEntry()
    entry.finishes.add(sequence=NUMBER, state=state, finished_unix_ns=ARRIVED_UNIX_NS + 5 * SECOND_NS, **fields)
    return entry


def beam_step(token_ids: list[int], logprobs: list[float], counts: list[int]) -> journal_pb2.JournalEntry:
    entry = journal_pb2.JournalEntry()
    entry.beam_steps.add(
        sequence=NUMBER,
        token_ids=pack_int32(token_ids),
        num_candidates=pack_int32(counts),
        logprobs=pack_float32(logprobs),
        token_logprobs=[logprob(*each) for each in zip(token_ids, logprobs, strict=True)],
    )
    return entry


# Both beams begin with token 310: readers know it.
BEAM_STEPS = [
    beam_step([310, 311], [-0.5, -30.0], [2]),
    beam_step([320, 321, 322, 323], [-0.25, -0.5, -30.0, -31.0], [2, 2]),
]


def journaled(request: pb.GenerateRequest, *entries: journal_pb2.JournalEntry, **admission: Any) -> JournaledRequest:
    admitted = journal_pb2.JournalEntry()
    admitted.admissions.add(
        sequence=NUMBER,
        request=request,
        prompt_token_ids=pack_int32(PROMPT),
        arrived_unix_ns=ARRIVED_UNIX_NS,
        request_digest=b"digest",
        model_fingerprint="m-1",
        **admission,
    )
    return replayed(admitted, *entries).requests[NUMBER]


def rebuilt(request: pb.GenerateRequest, *entries: journal_pb2.JournalEntry, **admission: Any) -> LiveRequest:
    return rebuild_request(journaled(request, *entries, **admission), MODEL)


def preempted(times: int) -> journal_pb2.JournalEntry:
    return journal_pb2.JournalEntry(preemptions=[journal_pb2.Preemption(sequence=NUMBER)] * times)


PROMPT_LOGPROBS = journal_pb2.JournalEntry(
    prompt_logprobs=[journal_pb2.PromptTokenLogprobs(sequence=NUMBER, logprobs=[logprob(301), logprob(302)])]
)
PAUSED = journal_pb2.JournalEntry(pauses=[journal_pb2.PauseChange(sequence=NUMBER, paused=True)])


def said(request: JournaledRequest | LiveRequest) -> journal_pb2.JournalEntry:
    entry = journal_pb2.JournalEntry()
    request.restate(entry)
    return entry


@pytest.mark.parametrize(
    ("request_", "entries"),
    [
        (asked(), []),
        (asked(2), [deltas([310, 311], [320, 321], logprobs=True), stopped(1, stop_token_id=321)]),
        (asked(2, best_of=3), [deltas([310], [], [330], logprobs=True)]),
        (asked(), [PROMPT_LOGPROBS, deltas([310]), preempted(2), PAUSED]),
        (sought(), []),
        (sought(), [*BEAM_STEPS, preempted(1)]),
    ],
    ids=["none", "samples", "ranked", "paused", "no step", "beams"],
)
def test_a_rebuilt_request_restates_what_the_journal_has(
    request_: pb.GenerateRequest, entries: list[journal_pb2.JournalEntry]
) -> None:
    known = journaled(request_, *entries)
    assert said(rebuild_request(known, MODEL)) == said(known)


def test_a_rebuilt_request_shows_and_continues_the_output_that_was_delivered() -> None:
    before = [PROMPT_LOGPROBS, deltas([310, 311], [320, 321], logprobs=True), stopped(1, stop_token_id=321)]
    request = rebuilt(asked(2), *before, preempted(3))
    first, second = request.to_response().samples
    assert (list(first.token_ids), first.text) == ([310, 311], TOKENIZER.decode([310, 311], keep_special_tokens=True))
    assert (list(second.token_ids), second.finish.stop_token_id) == ([320, 321], 321)
    assert not first.HasField("finish")
    assert [list(each.logprobs) for each in request.stream.samples] == [
        [logprob(310, -1.0), logprob(311, -1.0)],
        [logprob(320, -2.0), logprob(321, -2.0)],
    ]
    assert list(request.stream.prompt_logprobs) == [logprob(301), logprob(302)]
    shown = request.to_response()
    assert (shown.usage.completion_tokens, shown.usage.num_preemptions) == (4, 3)
    assert (shown.created_unix_ns, shown.seed, shown.tenant) == (ARRIVED_UNIX_NS, 3, "acme")
    assert request.stream.finished is None and request.ended_state is None
    # The next token is drawn behind the last one.
    assert [each.token_ids for each in request.group.sequences] == [[*PROMPT, 310, 311], [*PROMPT, 320, 321]]
    assert [each.seq_id for each in request.group.sequences] == [NUMBER, NUMBER + 1]


def test_a_rebuilt_search_shows_the_tokens_that_its_beams_share_and_continues_each_beam() -> None:
    request = rebuilt(sought(), *BEAM_STEPS)
    (shown,) = request.to_response().samples
    assert list(shown.token_ids) == [310]
    assert list(request.stream.samples[0].logprobs) == [logprob(310, -0.5)]
    assert [each.token_ids for each in request.group.sequences] == [[*PROMPT, 310, 320], [*PROMPT, 310, 321]]


@pytest.mark.parametrize("kind", ["journaled outcome", "no outcome"])
def test_a_request_that_has_ended_is_recorded_with_its_end(kind: str) -> None:
    outcome = None
    if kind == "journaled outcome":
        timings = pb.Timings(first_token_ns=123, finished_ns=456)
        outcome = pb.Finished(state=pb.REQUEST_STATE_FINISHED, usage=pb.Usage(cached_tokens=2), timings=timings)
    request = rebuilt(
        asked(2),
        deltas([310], [320, 321]),
        stopped(0, stop_string="?"),
        stopped(1, eos_token_id=321),
        preempted(1),
        ended(pb.REQUEST_STATE_FINISHED, outcome=outcome),
    )
    response = record_of(request).response
    assert (request.ended_state, response.state) == (pb.REQUEST_STATE_FINISHED,) * 2
    assert [list(each.token_ids) for each in response.samples] == [[310], [320, 321]]
    assert [each.finish.WhichOneof("cause") for each in response.samples] == ["stop_string", "eos_token_id"]
    texts = [TOKENIZER.decode([token_id], keep_special_tokens=True) for token_id in (310, 320)]  # no text of the eos
    assert [each.text for each in response.samples] == texts
    if outcome is not None:
        assert (response.usage, response.timings) == (outcome.usage, outcome.timings)
    else:
        assert response.usage == pb.Usage(prompt_tokens=3, completion_tokens=3, num_preemptions=1)
        assert response.timings.finished_ns == 5 * SECOND_NS


@pytest.mark.parametrize(
    ("state", "reason"),
    [
        (pb.REQUEST_STATE_CANCELLED, pb.FINISH_REASON_CANCELLED),
        (pb.REQUEST_STATE_EXPIRED, pb.FINISH_REASON_DEADLINE),
        (pb.REQUEST_STATE_FAILED, pb.FINISH_REASON_FAILED),
    ],
)
def test_samples_that_a_request_took_with_it_end_for_its_reason_and_others_keep_their_ends(
    state: pb.RequestState.ValueType, reason: pb.FinishReason.ValueType
) -> None:
    entries = [deltas([310], [320]), stopped(0, stop_token_id=310), ended(state, error="why")]
    response = record_of(rebuilt(asked(2, first_sample_index=4), *entries)).response
    assert [each.finish for each in response.samples] == [
        pb.SampleFinish(reason=pb.FINISH_REASON_STOP, stop_token_id=310),
        pb.SampleFinish(reason=reason, sample_index=5),
    ]
    assert response.error == "why"
    hypotheses = record_of(rebuilt(sought(), *BEAM_STEPS, ended(state))).response.samples
    assert [list(each.token_ids) for each in hypotheses] == [[310, 320], [310, 321]]
    assert [each.finish.reason for each in hypotheses] == [reason] * 2


def test_a_search_that_is_over_is_recorded_with_its_hypotheses() -> None:
    request = rebuilt(sought(max_tokens=2), *BEAM_STEPS, ended(pb.REQUEST_STATE_FINISHED))
    samples = record_of(request).response.samples
    assert [list(each.token_ids) for each in samples] == [[310, 320], [310, 321]]
    assert [each.finish.reason for each in samples] == [pb.FINISH_REASON_LENGTH] * 2
    assert [each.finish.score for each in samples] == [-0.375, -0.5]


def test_of_ranked_samples_the_best_are_recorded_though_none_was_shown_before_the_end() -> None:
    entries = [deltas([310], [320], [330], logprobs=True)]
    entries += [stopped(index, stop_token_id=token_id) for index, token_id in enumerate([310, 320, 330])]
    assert not rebuilt(asked(2, best_of=3), *entries).to_response().samples
    samples = record_of(rebuilt(asked(2, best_of=3), *entries, ended(pb.REQUEST_STATE_FINISHED))).response.samples
    assert [list(each.token_ids) for each in samples] == [[310], [320]]
    assert [each.finish.score for each in samples] == [-1.0, -2.0]


STOP = TOKENIZER.decode([311], keep_special_tokens=True)


def with_stop(text: str) -> pb.GenerateRequest:
    request = asked()
    request.stopping.stop.append(text)
    return request


def without(request: pb.GenerateRequest, message: str, field: str) -> pb.GenerateRequest:
    getattr(request, message).ClearField(field)
    return request


@pytest.mark.parametrize(
    ("request_", "entries", "reason"),
    [
        (asked(max_tokens=2), [deltas([310, 311])], "has all its tokens, and no end"),
        (asked(max_tokens=2), [deltas([310, 311, 312])], "has all its tokens, and no end"),
        (with_stop(STOP), [deltas([310, 311])], "has its stop string, and no end"),
        (sought(max_tokens=2), BEAM_STEPS, "search is over, and it has no end"),
        (asked(2), [stopped(0), ended(pb.REQUEST_STATE_FINISHED)], "one of its samples has no end"),
        (without(asked(), "stopping", "max_tokens"), [], "no max_tokens"),
        (without(asked(), "sampling", "seed"), [], "leaves something open"),
    ],
)
def test_entries_that_do_not_fit_together_are_refused_with_what_is_missing(
    request_: pb.GenerateRequest, entries: list[journal_pb2.JournalEntry], reason: str
) -> None:
    with pytest.raises(ValueError, match=reason):
        rebuilt(request_, *entries)


def test_a_request_is_continued_up_to_its_last_token_and_with_a_stop_string_that_ended_it() -> None:
    assert rebuilt(asked(max_tokens=2), deltas([310])).samples[0].num_tokens == 1
    by_length = journal_pb2.JournalEntry()
    by_length.sample_finishes.add(sequence=NUMBER, finish=pb.SampleFinish(reason=pb.FINISH_REASON_LENGTH))
    assert rebuilt(asked(max_tokens=1), deltas([310]), by_length).samples[0].num_tokens == 1
    (stopped_one,) = rebuilt(with_stop(STOP), deltas([310, 311]), stopped(0, stop_string=STOP)).to_response().samples
    assert stopped_one.text == TOKENIZER.decode([310], keep_special_tokens=True)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clock three seconds after the arrival of the request, at 100 s of the monotonic one."""
    monkeypatch.setattr(time, "time_ns", lambda: ARRIVED_UNIX_NS + 3 * SECOND_NS)
    monkeypatch.setattr(time, "monotonic_ns", lambda: 100 * SECOND_NS)
    monkeypatch.setattr(time, "monotonic", lambda: 100.0)


@pytest.mark.usefixtures("clock")
def test_times_count_from_the_arrival_in_the_earlier_process() -> None:
    times = arrival_times(ARRIVED_UNIX_NS)
    assert (times.arrived_ns, times.accepted_ns, times.arrived_unix_ns) == (97 * SECOND_NS,) * 2 + (ARRIVED_UNIX_NS,)
    ahead = arrival_times(ARRIVED_UNIX_NS + 4 * SECOND_NS)  # the time of day was set back
    assert ahead.arrived_ns == 100 * SECOND_NS
    request = rebuilt(asked(), deadline_unix_ns=ARRIVED_UNIX_NS + 8 * SECOND_NS)
    assert request.group.deadline_s == 105.0
    assert rebuilt(asked()).group.deadline_s is None


def test_of_what_was_settled_before_nothing_is_settled_again() -> None:
    entries = [PROMPT_LOGPROBS, deltas([310], [320], logprobs=True), stopped(1, stop_token_id=320), preempted(2)]
    request = rebuilt(asked(2), *entries)
    assert request.are_prompt_logprobs_settled
    assert request.num_settled_preemptions == request.group.num_preemptions == 2
    assert [each.is_end_settled for each in request.samples] == [False, True]
    assert [(each.settle_tokens(), list(each.settle_logprobs())) for each in request.samples] == [([], [])] * 2
    assert not rebuilt(asked(2), deltas([310])).are_prompt_logprobs_settled
    assert all(each.status is SequenceStatus.WAITING for each in request.group.sequences)


def textless(request: pb.GenerateRequest, *entries: journal_pb2.JournalEntry) -> journal_pb2.RequestRecord:
    known = journaled(request, *entries)
    assert known.finish is not None
    return record_without_text(known, known.finish)


def test_a_record_without_text_keeps_tokens_ends_and_usage() -> None:
    record = textless(
        asked(2),
        PROMPT_LOGPROBS,
        deltas([310, 311], [320], logprobs=True),
        stopped(1, stop_token_id=320),
        preempted(2),
        ended(pb.REQUEST_STATE_FAILED, error="the model is gone"),
    )
    response = record.response
    assert [(list(each.token_ids), each.text) for each in response.samples] == [([310, 311], ""), ([320], "")]
    assert [each.finish for each in response.samples] == [
        pb.SampleFinish(reason=pb.FINISH_REASON_FAILED),
        pb.SampleFinish(reason=pb.FINISH_REASON_STOP, sample_index=1, stop_token_id=320),
    ]
    assert response.usage == pb.Usage(prompt_tokens=3, completion_tokens=3, num_preemptions=2)
    assert (response.request_id, response.tenant, response.seed) == ("r", "acme", 3)
    assert (response.state, response.error) == (pb.REQUEST_STATE_FAILED, "the model is gone")
    assert response.created_unix_ns == ARRIVED_UNIX_NS
    output = stream_of_record(record)  # as a late reader gets it
    assert [list(each.logprobs) for each in output.samples] == [
        [logprob(310, -1.0), logprob(311, -1.0)],
        [logprob(320, -2.0)],
    ]
    assert [each.text_end(len(each.token_ids)) for each in output.samples] == [0, 0]
    assert [each.text_end(1) for each in output.samples] == [0, 0]
    assert list(output.prompt_logprobs) == [logprob(301), logprob(302)]
    assert (output.accepted.num_samples, output.accepted.max_tokens) == (2, 9)
    assert record.request_digest == b"digest"


def test_a_record_without_text_has_the_outcome_that_readers_were_told() -> None:
    outcome = pb.Finished(
        state=pb.REQUEST_STATE_FINISHED,
        usage=pb.Usage(completion_tokens=1, cached_tokens=2),
        timings=pb.Timings(finished_ns=5),
        memory=pb.RequestMemory(blocks=6),
    )
    end = ended(pb.REQUEST_STATE_FINISHED, outcome=outcome)
    response = textless(asked(0), deltas([310]), stopped(0, stop_token_id=310), end).response
    assert (response.usage, response.timings, response.memory) == (outcome.usage, outcome.timings, outcome.memory)
    assert [list(each.token_ids) for each in response.samples] == [[310]]


@pytest.mark.parametrize("request_", [asked(2, best_of=3), sought()], ids=["ranked", "beams"])
def test_a_record_without_text_has_no_samples_that_cannot_be_chosen(request_: pb.GenerateRequest) -> None:
    entries = BEAM_STEPS if request_.HasField("beam") else [deltas([310], [320], [330], logprobs=True)]
    record = textless(request_, *entries, ended(pb.REQUEST_STATE_FAILED))
    assert not record.response.samples and not record.samples
    assert stream_of_record(record).accepted.num_samples == 2
