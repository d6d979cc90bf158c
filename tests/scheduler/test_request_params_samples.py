"""Several samples, beams and priorities: what may be asked, what is refused, and what becomes of it once settled."""

from typing import Any

import pytest

from quire.errors import InvalidRequestError, OverloadedError
from quire.v1 import inference_pb2 as pb
from scheduler_svc.core.beam_search import BeamSearchParams
from scheduler_svc.requests.params.request_params import settle, settle_length, validate
from tests.scheduler.request_settling import LIMITS, refused, request_of, settled

NAN, INFINITY = float("nan"), float("inf")


def beams(beam_width: int = 4, sampling: dict[str, Any] | None = None, **beam: Any) -> pb.GenerateRequest:
    request = request_of(beam=pb.BeamParams(beam_width=beam_width, **beam))
    request.sampling.CopyFrom(pb.SamplingParams(**(sampling or {})))
    return request


@pytest.mark.parametrize(
    ("field", "sampling"),
    [
        ("sampling.n", {"n": 0}),
        ("sampling.n", {"n": 129}),
        ("sampling.n", {"n": 2**32 - 1}),
        ("sampling.n", {"n": 0, "best_of": 4}),
        ("sampling.best_of", {"best_of": 0}),
        ("sampling.best_of", {"best_of": 129}),
        ("sampling.best_of", {"n": 3, "best_of": 2}),
        ("sampling.best_of", {"n": 128, "best_of": 129}),
        ("sampling.n", {"n": 2, "temperature": 0}),
        ("sampling.n", {"n": 2, "best_of": 2, "temperature": 0}),
        ("sampling.best_of", {"best_of": 2, "temperature": 0}),
        ("sampling.first_sample_index", {"n": 2, "first_sample_index": 2**32 - 1}),
        ("sampling.first_sample_index", {"n": 2, "best_of": 5, "first_sample_index": 2**32 - 4}),
    ],
)
def test_numbers_of_samples_out_of_range_are_refused_by_field(field: str, sampling: dict[str, Any]) -> None:
    assert list(refused(request_of(sampling=pb.SamplingParams(**sampling)))) == [field]


@pytest.mark.parametrize(
    ("sampling", "num_samples", "num_sequences"),
    [
        ({}, 1, 1),
        ({"n": 1, "temperature": 0}, 1, 1),
        ({"best_of": 1, "temperature": 0}, 1, 1),
        ({"n": 128}, 128, 128),
        ({"best_of": 128}, 1, 128),
        ({"n": 3, "best_of": 3}, 3, 3),
        ({"n": 3, "best_of": 7}, 3, 7),
        ({"n": 2, "first_sample_index": 2**32 - 2}, 2, 2),
    ],
)
def test_numbers_of_samples_on_the_edge_of_their_range_are_taken(
    sampling: dict[str, Any], num_samples: int, num_sequences: int
) -> None:
    params = settled(request_of(sampling=pb.SamplingParams(**sampling)))
    assert (params.num_samples, params.num_sequences) == (num_samples, num_sequences)
    assert params.is_ranked == (num_sequences > num_samples)
    assert params.beam is None


@pytest.mark.parametrize(
    ("field", "request_"),
    [
        ("beam.beam_width", beams(0)),
        ("beam.beam_width", beams(1)),
        ("beam.beam_width", beams(65)),
        ("beam.beam_width", beams(2**32 - 1)),
        ("sampling.n", beams(4, {"n": 5})),
        ("sampling.n", beams(4, {"n": 0})),
        ("sampling.n", beams(64, {"n": 128})),
        ("sampling.n", beams(64, {"n": 129})),
        ("beam.length_penalty", beams(length_penalty=4.1)),
        ("beam.length_penalty", beams(length_penalty=-4.1)),
        ("beam.length_penalty", beams(length_penalty=NAN)),
        ("beam.length_penalty", beams(length_penalty=INFINITY)),
        ("beam.early_stopping", beams(early_stopping=4)),
        ("beam.early_stopping", beams(early_stopping=-1)),
        ("sampling.temperature", beams(4, {"temperature": 1})),
        ("sampling.temperature", beams(4, {"temperature": 0.5})),
        ("sampling.temperature", beams(4, {"temperature": NAN})),
        ("sampling.top_k", beams(4, {"top_k": 1})),
        ("sampling.top_p", beams(4, {"top_p": 0.5})),
        ("sampling.min_p", beams(4, {"min_p": 0.5})),
        ("sampling.best_of", beams(4, {"best_of": 4})),
        ("sampling.best_of", beams(4, {"best_of": 0})),
        ("sampling.best_of", beams(4, {"best_of": 500})),
        ("sampling.first_sample_index", beams(4, {"first_sample_index": 1})),
    ],
)
def test_beam_searches_out_of_range_are_refused_by_field(field: str, request_: pb.GenerateRequest) -> None:
    assert list(refused(request_)) == [field]


def test_a_beam_search_with_stop_strings_is_refused_with_what_to_use_instead() -> None:
    request = beams()
    request.stopping.stop.append("x")
    assert refused(request) == {
        "stopping.stop": "cannot end a beam search: use stop_token_ids, or ask for no beam search"
    }


def test_all_that_is_wrong_with_a_beam_search_is_said_at_once() -> None:
    request = beams(65, {"temperature": 1, "top_k": 5, "best_of": 3}, length_penalty=9, early_stopping=9)
    request.stopping.stop.append("x")
    assert list(refused(request)) == [
        "beam.beam_width",
        "beam.length_penalty",
        "beam.early_stopping",
        "sampling.temperature",
        "sampling.top_k",
        "sampling.best_of",
        "stopping.stop",
    ]


@pytest.mark.parametrize(
    "request_",
    [
        beams(2),
        beams(64, {"n": 64}),
        beams(4, {"n": 1, "temperature": 0, "top_p": 1, "min_p": 0}),
        beams(4, {"first_sample_index": 0, "seed": 5}),
        beams(4, {"repetition_penalty": 1.5, "logit_bias": {5: 1.0}, "allowed_token_ids": [5, 6]}),
        beams(length_penalty=4, early_stopping=pb.EARLY_STOPPING_NEVER),
        beams(length_penalty=-4, early_stopping=pb.EARLY_STOPPING_UNSPECIFIED),
        beams(length_penalty=0),
    ],
)
def test_beam_searches_on_the_edge_of_their_range_are_taken(request_: pb.GenerateRequest) -> None:
    params = settled(request_)
    assert params.beam is not None and not params.is_ranked
    assert params.num_sequences == request_.beam.beam_width
    assert params.num_samples == (request_.sampling.n or 1)


def test_a_beam_search_settles_as_the_protocol_promises() -> None:
    request = beams(3)
    request.stopping.stop_token_ids.extend([7, 8])
    assert settled(request).beam_params(20) == BeamSearchParams(
        beam_width=3,
        max_tokens=20,
        eos_token_ids=frozenset({2, 3, 7, 8}),
        num_return=1,
        length_penalty=1.0,
        early_stopping=False,
    )
    request = beams(6, {"n": 5}, length_penalty=0, early_stopping=pb.EARLY_STOPPING_NEVER)
    request.stopping.ignore_eos = True
    assert settled(request).beam_params(9) == BeamSearchParams(
        beam_width=6,
        max_tokens=9,
        eos_token_ids=frozenset(),
        num_return=5,
        length_penalty=0.0,
        early_stopping="never",
    )
    assert settled(beams(2, early_stopping=pb.EARLY_STOPPING_TRUE)).beam_params(9).early_stopping is True


def test_each_sample_draws_the_noise_of_its_own_index_and_all_else_is_alike() -> None:
    request = request_of(
        sampling=pb.SamplingParams(n=2, best_of=3, first_sample_index=7, temperature=0.5),
        stopping=pb.StoppingParams(min_tokens=4),
    )
    params = settled(request)
    seats = [params.sequence_sampling(10, index) for index in range(3)]
    assert [seat.sample_index for seat in seats] == [7, 8, 9]
    assert {seat.seed for seat in seats} == {77}
    assert {seat.suppressed_until for seat in seats} == {14}


def test_what_is_ranked_is_computed_with_log_probabilities_even_if_nobody_sees_them() -> None:
    ranked = settled(request_of(sampling=pb.SamplingParams(n=1, best_of=2)))
    assert ranked.sequence_sampling(10).num_logprobs == 0 and ranked.sampling.num_logprobs is None
    asked = settled(request_of(sampling=pb.SamplingParams(best_of=2), output=pb.OutputParams(logprobs=3)))
    assert asked.sequence_sampling(10, 1).num_logprobs == 3
    assert settled(request_of(sampling=pb.SamplingParams(n=2))).sequence_sampling(10).num_logprobs is None


def test_beams_are_all_sampled_alike() -> None:
    request = beams(4, {"repetition_penalty": 1.5})
    request.stopping.min_tokens = 3
    params = settled(request)
    assert len({params.sequence_sampling(10, index) for index in range(4)}) == 1
    assert params.sequence_sampling(10).suppressed_until == 13


@pytest.mark.parametrize("priority", [0, 1, -1, 1000, -1000])
def test_every_priority_within_the_range_is_taken(priority: int) -> None:
    assert settled(request_of(priority=priority)).priority == priority


@pytest.mark.parametrize(("priority", "kept"), [(2**31 - 1, 1000), (-(2**31), -1000)])
def test_a_priority_that_an_earlier_journal_has_is_brought_into_the_range(priority: int, kept: int) -> None:
    request = request_of(priority=priority)
    params = settle(request, LIMITS, draw_seed=lambda: 1, make_id=lambda: "id")
    assert params.priority == kept


@pytest.mark.parametrize(
    ("request_", "which"),
    [
        (request_of(sampling=pb.SamplingParams(n=4)), "sampling.n"),
        (request_of(sampling=pb.SamplingParams(n=2, best_of=4)), "sampling.best_of"),
        (beams(4), "beam.beam_width"),
    ],
)
def test_what_does_not_fit_as_often_as_asked_is_refused_with_what_to_lower(
    request_: pb.GenerateRequest, which: str
) -> None:
    params, keyword = settled(request_), which.rpartition(".")[2]
    with pytest.raises(InvalidRequestError, match=f"{which}: is 4, more than run at once.*give at most 3$"):
        settle_length(params, 10, LIMITS, 0, max_sequences_that_fit=3)
    with pytest.raises(InvalidRequestError, match=f"prompt: .*4 sequences of 100 tokens each.*lower {keyword}, or"):
        settle_length(params, 100, LIMITS, 100)
    request_.stopping.max_tokens = 21
    with pytest.raises(InvalidRequestError, match=f"stopping.max_tokens: .*give at most 20, lower {keyword}, or"):
        settle_length(settled(request_), 100, LIMITS, 120)
    request_.stopping.max_tokens = 20
    assert settle_length(settled(request_), 100, LIMITS, 120) == 20


def test_the_longest_prompt_is_named_that_leaves_each_sample_a_block_of_its_own() -> None:
    """With 10 blocks of 4 tokens and 38 of prompt, 3 samples have 36 tokens each; with 35 they would have 32."""
    params = settled(request_of(sampling=pb.SamplingParams(n=3)))
    expected = "prompt: the prompt is too long: 38 tokens; .*3 sequences of 32 tokens each.*at most 31, lower n, or"
    with pytest.raises(InvalidRequestError, match=expected):
        settle_length(params, 38, LIMITS, 36, longest_prompt_that_fits=lambda: 31)
    with pytest.raises(InvalidRequestError, match=r"sampling\.n: is 3, more than run at once.*give at most 2$"):
        settle_length(params, 9, LIMITS, 8, longest_prompt_that_fits=lambda: 0, max_sequences_that_fit=2)
    with pytest.raises(InvalidRequestError, match=r"maximum context length is 256 tokens.*at most 255$"):
        settle_length(params, 5000, LIMITS, 5000, longest_prompt_that_fits=lambda: 4000)
    with pytest.raises(OverloadedError, match=r"holds 32 tokens of this request beside 7 blocks .* needs 39: unpin"):
        settle_length(
            params, 38, LIMITS, 36, longest_prompt_that_fits=lambda: 31, num_pinned_blocks=7, max_tokens_without_pins=39
        )


def test_the_number_of_samples_is_to_be_lowered_only_where_there_are_several() -> None:
    one, two = (settled(request_of(sampling=pb.SamplingParams(n=n))) for n in (1, 2))
    for fit in (0, 100):
        with pytest.raises(InvalidRequestError, match=f"prompt: .*{fit} tokens of one request") as caught:
            settle_length(one, 100, LIMITS, fit)
        assert "lower" not in str(caught.value)
    with pytest.raises(InvalidRequestError, match=r"sampling\.n: is 2, more than run at once.*give at most 1$"):
        settle_length(two, 100, LIMITS, 0)
    with pytest.raises(InvalidRequestError, match=r"prompt: .*2 sequences of 100 tokens each.*lower n, or"):
        settle_length(two, 100, LIMITS, 100)


@pytest.mark.parametrize("request_", [request_of(sampling=pb.SamplingParams(n=2, best_of=4)), beams(5, {"n": 2})])
def test_a_settled_request_is_valid_again_and_stays_as_it_is(request_: pb.GenerateRequest) -> None:
    """The journal keeps requests in this form, and a new leader settles them again."""
    params = settled(request_)
    request_.request_id, request_.sampling.seed = params.request_id, params.seed
    assert validate(request_, LIMITS, draw_seed=lambda: 1, make_id=lambda: "other") == params
