"""Parameters that are accepted, refusals and their words, and the settled request."""

import time
from array import array
from dataclasses import replace
from typing import Any

import pytest

from common.rpc import CLUSTER_MESSAGE_BYTES
from common.sampling_params import SequenceSampling
from common.step import SequenceState, Step
from common.step_codec import step_to_pb
from quire.errors import FailedPreconditionError, InvalidRequestError, OverloadedError
from quire.rpc import PUBLIC_MESSAGE_BYTES
from quire.v1 import inference_pb2 as pb
from scheduler_svc.requests.params.prompt_checks import ModelLimits, check_detokenize, check_prompt_logprobs
from scheduler_svc.requests.params.request_params import (
    MOST_HISTORY_BYTES,
    ValidatedParams,
    bound_by_step,
    request_digest,
    settle_length,
    validate,
)
from tests.scheduler.request_settling import LIMITS, refused, request_of, settled

TOKENS_ONLY = ModelLimits(
    vocab_size=1000, max_model_len=256, eos_token_ids=frozenset({2}), has_tokenizer=False, has_chat_template=False
)
NAN, INFINITY = float("nan"), float("inf")


def chat_of(*roles: str) -> pb.ChatPrompt:
    return pb.ChatPrompt(messages=[pb.ChatMessage(role=role, content="Hello") for role in roles])


def test_a_bare_prompt_gets_every_default_that_the_protocol_promises() -> None:
    assert settled(request_of()) == ValidatedParams(
        request_id="made",
        tenant="",
        cache_salt="",
        priority=0,
        timeout_ms=None,
        cancel_on_disconnect=True,
        sampling=SequenceSampling(seed=77),
        seed=77,
        num_samples=1,
        num_sequences=1,
        beam=None,
        max_tokens=None,
        min_tokens=0,
        stop=(),
        stop_token_ids=frozenset(),
        eos_token_ids=frozenset({2, 3}),
        include_stop=False,
        keep_special_tokens=False,
    )


def test_a_full_request_is_taken_as_it_is() -> None:
    # Floats that float32 holds exactly.
    request = request_of(
        request_id="A-1.b:c_d",
        chat=chat_of("user"),
        sampling=pb.SamplingParams(
            temperature=0.5,
            top_k=40,
            top_p=0.75,
            min_p=0.25,
            repetition_penalty=1.5,
            presence_penalty=-2,
            frequency_penalty=2,
            logit_bias={9: -100, 5: 1.5},
            allowed_token_ids=[7, 5, 7, 9],
            seed=2**64 - 1,
            first_sample_index=4,
            n=3,
            best_of=5,
        ),
        stopping=pb.StoppingParams(
            max_tokens=50,
            min_tokens=10,
            stop=["\n\n", "END"],
            stop_token_ids=[500, 9],
            ignore_eos=True,
            include_stop=True,
        ),
        output=pb.OutputParams(token_ids=True, logprobs=0, prompt_logprobs=20, keep_special_tokens=True),
        tenant="t" * 128,
        cache_salt="s" * 128,
        timeout_ms=1,
        on_disconnect=pb.ON_DISCONNECT_CONTINUE,
        priority=-2,
    )
    sampling = SequenceSampling(
        seed=2**64 - 1,
        sample_index=4,
        allowed_token_ids=(7, 5, 9),
        suppressed_token_ids=(9, 500),
        logit_bias=((5, 1.5), (9, -100.0)),
        repetition_penalty=1.5,
        presence_penalty=-2.0,
        frequency_penalty=2.0,
        temperature=0.5,
        min_p=0.25,
        top_k=40,
        top_p=0.75,
        num_logprobs=0,
        num_prompt_logprobs=20,
    )
    assert settled(request) == ValidatedParams(
        request_id="A-1.b:c_d",
        tenant="t" * 128,
        cache_salt="s" * 128,
        priority=-2,
        timeout_ms=1,
        cancel_on_disconnect=False,
        sampling=sampling,
        seed=2**64 - 1,
        num_samples=3,
        num_sequences=5,
        beam=None,
        max_tokens=50,
        min_tokens=10,
        stop=("\n\n", "END"),
        stop_token_ids=frozenset({500, 9}),
        eos_token_ids=frozenset(),
        include_stop=True,
        keep_special_tokens=True,
    )


def test_end_and_stop_tokens_are_held_back_until_min_tokens_stand_behind_the_prompt() -> None:
    params = settled(request_of(stopping=pb.StoppingParams(min_tokens=10, stop_token_ids=[8])))
    sampling = params.sequence_sampling(num_prompt_tokens=30)
    assert sampling.suppressed_token_ids == (2, 3, 8)
    assert sampling.suppressed_until == 40
    without = settled(request_of(stopping=pb.StoppingParams(stop_token_ids=[8]))).sequence_sampling(30)
    assert (without.suppressed_token_ids, without.suppressed_until) == ((), 0)


@pytest.mark.parametrize(
    ("field", "sampling"),
    [
        ("sampling.temperature", {"temperature": -0.1}),
        ("sampling.temperature", {"temperature": 100.1}),
        ("sampling.temperature", {"temperature": NAN}),
        ("sampling.temperature", {"temperature": INFINITY}),
        ("sampling.top_k", {"top_k": 0}),
        ("sampling.top_p", {"top_p": 0}),
        ("sampling.top_p", {"top_p": 1.1}),
        ("sampling.top_p", {"top_p": NAN}),
        ("sampling.min_p", {"min_p": -0.1}),
        ("sampling.min_p", {"min_p": 1.1}),
        ("sampling.repetition_penalty", {"repetition_penalty": 0}),
        ("sampling.repetition_penalty", {"repetition_penalty": -1}),
        ("sampling.repetition_penalty", {"repetition_penalty": INFINITY}),
        ("sampling.presence_penalty", {"presence_penalty": 2.1}),
        ("sampling.frequency_penalty", {"frequency_penalty": -INFINITY}),
        ("sampling.logit_bias[1000]", {"logit_bias": {1000: 1}}),
        ("sampling.logit_bias[-1]", {"logit_bias": {-1: 1}}),
        ("sampling.logit_bias[5]", {"logit_bias": {5: 100.1}}),
        ("sampling.logit_bias[5]", {"logit_bias": {5: NAN}}),
        ("sampling.logit_bias", {"logit_bias": dict.fromkeys(range(1025), 1.0)}),
        ("sampling.allowed_token_ids[1]", {"allowed_token_ids": [0, 1000]}),
        ("sampling.allowed_token_ids[0]", {"allowed_token_ids": [-7]}),
        ("sampling.allowed_token_ids", {"allowed_token_ids": [1] * 65_537}),
    ],
)
def test_sampling_out_of_range_is_refused_by_field(field: str, sampling: dict[str, Any]) -> None:
    assert list(refused(request_of(sampling=pb.SamplingParams(**sampling)))) == [field]


@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 0},
        {"temperature": 100},
        {"top_k": 1},
        {"top_p": 1},
        {"top_p": 1e-6},
        {"min_p": 0},
        {"min_p": 1},
        {"repetition_penalty": 100},
        {"repetition_penalty": 0.01},
        {"presence_penalty": -2, "frequency_penalty": 2},
        {"logit_bias": {0: -100, 999: 100}},
        {"logit_bias": dict.fromkeys(range(1000), 1.0)},
        {"allowed_token_ids": [0, 999]},
        {"allowed_token_ids": [1] * 65_536},
        {"seed": 0},
    ],
)
def test_sampling_on_the_edge_of_its_range_is_taken(sampling: dict[str, Any]) -> None:
    settled(request_of(sampling=pb.SamplingParams(**sampling)))


@pytest.mark.parametrize(
    ("field", "parts"),
    [
        ("request_id", {"request_id": "white space"}),
        ("request_id", {"request_id": "line\n"}),
        ("request_id", {"request_id": "ünïcode"}),
        ("request_id", {"request_id": "x" * 129}),
        ("tenant", {"tenant": "x" * 129}),
        ("cache_salt", {"cache_salt": "x" * 129}),
        ("priority", {"priority": -(2**31)}),
        ("priority", {"priority": 1001}),
        ("timeout_ms", {"timeout_ms": 0}),
        ("timeout_ms", {"timeout_ms": -5}),
        ("on_disconnect", {"on_disconnect": 7}),
        ("chat.messages", {"chat": pb.ChatPrompt()}),
        (
            "chat.continue_final_message",
            {
                "chat": pb.ChatPrompt(
                    messages=chat_of("user").messages, add_generation_prompt=True, continue_final_message=True
                )
            },
        ),
        ("chat.messages[1].role", {"chat": chat_of("user", "", "user")}),
        ("token_ids.ids", {"token_ids": pb.TokenIds()}),
        ("token_ids.ids", {"token_ids": pb.TokenIds(ids=[1] * 256)}),
        ("token_ids.ids[2]", {"token_ids": pb.TokenIds(ids=[0, 999, 1000])}),
        ("token_ids.ids[0]", {"token_ids": pb.TokenIds(ids=[-1, 5])}),
        ("stopping.max_tokens", {"stopping": pb.StoppingParams(max_tokens=0)}),
        ("stopping.min_tokens", {"stopping": pb.StoppingParams(max_tokens=5, min_tokens=6)}),
        ("stopping.stop", {"stopping": pb.StoppingParams(stop=["x"] * 17)}),
        ("stopping.stop[1]", {"stopping": pb.StoppingParams(stop=["x", ""])}),
        ("stopping.stop[0]", {"stopping": pb.StoppingParams(stop=["é" * 129])}),
        ("stopping.stop_token_ids", {"stopping": pb.StoppingParams(stop_token_ids=[1] * 257)}),
        ("stopping.stop_token_ids[0]", {"stopping": pb.StoppingParams(stop_token_ids=[1000])}),
        ("output.logprobs", {"output": pb.OutputParams(logprobs=21)}),
        ("output.prompt_logprobs", {"output": pb.OutputParams(prompt_logprobs=2**32 - 1)}),
    ],
)
def test_everything_else_out_of_range_is_refused_by_field(field: str, parts: dict[str, Any]) -> None:
    assert list(refused(request_of(**parts))) == [field]


def test_the_least_and_the_equal_lengths_are_taken() -> None:
    params = settled(request_of(stopping=pb.StoppingParams(max_tokens=1, min_tokens=1)))
    assert (params.max_tokens, params.min_tokens) == (1, 1)


def test_prompts_that_just_fit_into_the_context_are_taken() -> None:
    settled(request_of(token_ids=pb.TokenIds(ids=[1] * 255)))  # and one token of output
    settled(request_of(chat=chat_of(*["user"] * 256)))
    longest = LIMITS.max_text_chars
    settled(request_of(text="x" * longest))
    messages = [pb.ChatMessage(role="r" * 100, content="x" * (longest - 100))]
    settled(request_of(chat=pb.ChatPrompt(messages=messages)))
    messages[0].content += "x"
    assert list(refused(request_of(chat=pb.ChatPrompt(messages=messages)))) == ["chat.messages"]
    assert list(refused(request_of(chat=chat_of(*["user"] * 257)))) == ["chat.messages"]


@pytest.mark.parametrize(("max_model_len", "most"), [(256, 65_536), (100_000, 100_000)])
def test_as_many_ids_are_made_text_as_a_context_holds_and_never_less_than_65536(max_model_len: int, most: int) -> None:
    limits = replace(LIMITS, max_model_len=max_model_len)
    check_detokenize(pb.DetokenizeRequest(token_ids=[5] * most), limits)
    with pytest.raises(InvalidRequestError, match=f"token_ids: has {most + 1:,} ids: give at most {most:,}"):
        check_detokenize(pb.DetokenizeRequest(token_ids=[5] * (most + 1)), limits)


@pytest.mark.parametrize(("num_top", "most"), [(20, 68_385), (0, 524_288)])  # as the manual states
def test_the_longest_prompt_with_log_probabilities_fills_a_message_and_fits_into_it(num_top: int, most: int) -> None:
    check_prompt_logprobs(most, num_top)
    with pytest.raises(InvalidRequestError, match=f"output.prompt_logprobs: is {num_top} .* to at most {most:,}"):
        check_prompt_logprobs(most + 1, num_top)
    largest_id = 2**28 - 1  # of the 4 bytes that an id of any vocabulary takes on the wire
    each = pb.TokenLogprobs(
        token_id=largest_id,
        logprob=-1.0,
        rank=largest_id,
        top_token_ids=[largest_id] * num_top,
        top_logprobs=[-1.0] * num_top,
    )
    num_bytes = most * (pb.Chunk(prompt_logprobs=[each] * 2).ByteSize() - pb.Chunk(prompt_logprobs=[each]).ByteSize())
    assert PUBLIC_MESSAGE_BYTES // 2 < num_bytes < PUBLIC_MESSAGE_BYTES * 7 // 8


def test_a_request_without_prompt_is_refused() -> None:
    assert refused(pb.GenerateRequest()) == {"prompt": "is missing: give text, chat or token_ids"}


def test_everything_wrong_is_said_at_once_with_what_to_change() -> None:
    request = pb.GenerateRequest(
        request_id="?",
        sampling=pb.SamplingParams(temperature=NAN, allowed_token_ids=[2]),
        stopping=pb.StoppingParams(stop=["a", "b", "c", ""], max_tokens=0, min_tokens=1),
        output=pb.OutputParams(logprobs=100),
    )
    descriptions = refused(request)
    assert list(descriptions) == [
        "request_id",
        "prompt",
        "sampling.temperature",
        "stopping.max_tokens",
        "stopping.stop[3]",
        "output.logprobs",
        "sampling.allowed_token_ids",
    ]
    assert descriptions["sampling.temperature"] == "is nan: give a number from 0 to 100"
    assert descriptions["output.logprobs"] == "is 100: give at most 20"


def test_at_most_ten_violations_are_listed_and_the_others_counted() -> None:
    request = request_of(stopping=pb.StoppingParams(stop_token_ids=[-1] * 200), output=pb.OutputParams(logprobs=21))
    with pytest.raises(InvalidRequestError, match="and at least 2 more") as caught:
        settled(request)
    assert [each.field for each in caught.value.violations] == [f"stopping.stop_token_ids[{i}]" for i in range(10)]
    assert len(caught.value.message) < 1000


def test_a_hundred_thousand_stop_strings_are_refused_at_once_and_not_repeated() -> None:
    request = request_of(stopping=pb.StoppingParams(stop=[f"secret {i}" for i in range(100_000)]))
    started_s = time.process_time()
    descriptions = refused(request)
    assert time.process_time() - started_s < 0.05
    assert descriptions == {"stopping.stop": "has 100,000 items: give at most 16"}


def test_nothing_long_of_a_bad_request_is_repeated() -> None:
    secret = "secret" * 1000
    request = request_of(
        request_id=secret, tenant=secret, cache_salt=secret, stopping=pb.StoppingParams(stop=[secret] * 16)
    )
    assert "secret" not in str(refused(request))


@pytest.mark.parametrize(
    ("parts", "remedy"),
    [
        ({"text": "Once"}, "token_ids"),
        ({"chat": chat_of("user")}, "token_ids"),
        ({"token_ids": pb.TokenIds(ids=[1]), "stopping": pb.StoppingParams(stop=["x"])}, "stop_token_ids"),
    ],
)
def test_a_model_without_tokenizer_takes_only_token_ids_and_no_stop_strings(parts: dict[str, Any], remedy: str) -> None:
    with pytest.raises(FailedPreconditionError, match=f"no tokenizer.*{remedy}"):
        settled(request_of(**parts), TOKENS_ONLY)
    assert settled(request_of(token_ids=pb.TokenIds(ids=[1])), TOKENS_ONLY).stop == ()


def test_a_model_without_chat_template_takes_no_chats() -> None:
    limits = ModelLimits(
        vocab_size=10, max_model_len=9, eos_token_ids=frozenset(), has_tokenizer=True, has_chat_template=False
    )
    with pytest.raises(FailedPreconditionError, match="no chat template: send the prompt as text"):
        settled(request_of(chat=chat_of("user")), limits)


def test_min_tokens_must_leave_a_token_to_choose() -> None:
    only_ends = request_of(
        sampling=pb.SamplingParams(allowed_token_ids=[2, 9]),
        stopping=pb.StoppingParams(min_tokens=1, stop_token_ids=[9]),
    )
    assert list(refused(only_ends)) == ["sampling.allowed_token_ids"]
    only_ends.sampling.allowed_token_ids.append(3)  # and so all of them
    assert list(refused(only_ends)) == ["sampling.allowed_token_ids"]
    only_ends.stopping.ignore_eos = True
    settled(only_ends)
    tiny = ModelLimits(
        vocab_size=4, max_model_len=9, eos_token_ids=frozenset({2, 3}), has_tokenizer=True, has_chat_template=False
    )
    everything = request_of(stopping=pb.StoppingParams(min_tokens=1, stop_token_ids=[0, 1]))
    assert list(refused(everything, tiny)) == ["stopping.stop_token_ids"]


def test_a_small_vocabulary_has_no_more_likely_tokens_than_tokens() -> None:
    limits = ModelLimits(
        vocab_size=10, max_model_len=9, eos_token_ids=frozenset(), has_tokenizer=True, has_chat_template=False
    )
    request = request_of(sampling=pb.SamplingParams(top_k=10), output=pb.OutputParams(logprobs=20, prompt_logprobs=11))
    params = settled(request, limits)
    assert params.sampling.top_k is None
    assert (params.sampling.num_logprobs, params.sampling.num_prompt_logprobs) == (10, 10)


@pytest.mark.parametrize(("top_k", "kept"), [(1, 1), (999, 999), (1000, None), (2**32 - 1, None)])
def test_only_a_top_k_below_the_vocabulary_is_one(top_k: int, kept: int | None) -> None:
    assert settled(request_of(sampling=pb.SamplingParams(top_k=top_k))).sampling.top_k == kept


def test_the_output_is_bounded_by_what_context_or_memory_leave() -> None:
    params = settled(request_of())
    assert settle_length(params, 100, LIMITS, max_tokens_that_fit=10_000) == 156
    assert settle_length(params, 100, LIMITS, max_tokens_that_fit=120) == 20
    assert settle_length(params, 255, LIMITS, max_tokens_that_fit=256) == 1
    bounded = settled(request_of(stopping=pb.StoppingParams(max_tokens=20)))
    assert settle_length(bounded, 100, LIMITS, max_tokens_that_fit=120) == 20
    assert settle_length(bounded, 236, LIMITS, max_tokens_that_fit=10_000) == 20


LONG = replace(LIMITS, max_model_len=1 << 20)


def carried(sampling: pb.SamplingParams, num_prompt_tokens: int, bound: int, max_tokens: int | None = None) -> int:
    params = settled(request_of(sampling=sampling, stopping=pb.StoppingParams(max_tokens=max_tokens)), LONG)
    return bound_by_step(params, num_prompt_tokens, bound)


def test_samples_whose_contexts_a_step_has_to_carry_are_bounded_by_its_size() -> None:
    """Regression: a step of more than 128 MiB broke the link to the worker, and so all that ran there began again."""
    longest = MOST_HISTORY_BYTES // (4 * 64)  # of 64 sequences
    drawn, penalised = pb.SamplingParams(n=64), pb.SamplingParams(n=64, repetition_penalty=1.1)
    assert carried(drawn, longest, 700_000) == 700_000
    assert carried(penalised, 100, 700_000) == longest - 100
    assert carried(penalised, longest - 5, 5, max_tokens=5) == 5
    with pytest.raises(InvalidRequestError, match=r"sampling.n: is 64 for .* give at most 63, or .* 262,144 tokens"):
        carried(penalised, longest - 5, 6, max_tokens=6)
    with pytest.raises(InvalidRequestError, match=r"sampling.n: is 64"):
        carried(penalised, longest, 700_000)
    seat = SequenceState(
        seat=1,
        position=longest - 1,
        block_table=array("i", [7]) * (longest // 2),  # with blocks of two tokens
        token_ids=[5],
        history=array("i", [5]) * (longest - 1),
        num_prompt_tokens=1,
        sampling=SequenceSampling(seed=1, repetition_penalty=1.1),
    )
    one, two = (step_to_pb(Step(epoch=1, step_id=1, whole=[seat] * number)).ByteSize() for number in (1, 2))
    assert 64 * (two - one) < CLUSTER_MESSAGE_BYTES * 7 // 8


@pytest.mark.parametrize(
    ("num_prompt_tokens", "stopping", "fit", "field", "numbers"),
    [
        (0, {}, 10_000, "prompt", ["empty"]),
        (256, {}, 10_000, "prompt", ["256 tokens", "at most 255", "context"]),
        (5000, {}, 10_000, "prompt", ["5,000 tokens", "at most 255", "context"]),
        (100, {}, 100, "prompt", ["100 tokens", "at most 99", "the KV memory holds 100 tokens of one request"]),
        (100, {"max_tokens": 157}, 10_000, "stopping.max_tokens", ["157", "100 tokens", "at most 156", "context"]),
        (100, {"max_tokens": 21}, 120, "stopping.max_tokens", ["21", "at most 20", "(--kv-memory-bytes"]),
        (100, {"min_tokens": 157}, 10_000, "stopping.min_tokens", ["157", "at most 156"]),
        (100, {"min_tokens": 21}, 120, "stopping.min_tokens", ["21", "at most 20", "(--kv-memory-bytes"]),
    ],
)
def test_lengths_that_can_never_work_are_refused_with_the_largest_that_would(
    num_prompt_tokens: int, stopping: dict[str, Any], fit: int, field: str, numbers: list[str]
) -> None:
    params = settled(request_of(stopping=pb.StoppingParams(**stopping)))
    with pytest.raises(InvalidRequestError) as caught:
        settle_length(params, num_prompt_tokens, LIMITS, fit)
    (violation,) = caught.value.violations
    assert violation.field == field
    assert all(each in violation.description for each in numbers), violation.description
    assert "unpin" not in violation.description


@pytest.mark.parametrize(
    ("num_prompt_tokens", "stopping", "num_needed"),
    [
        (120, {}, 121),
        (100, {"max_tokens": 21}, 121),
        (100, {"min_tokens": 25}, 125),
        (100, {"min_tokens": 25, "max_tokens": 30}, 130),
        (100, {"max_tokens": 156}, 256),
    ],
)
def test_what_only_pins_keep_out_may_come_back_and_what_would_not_fit_without_them_may_not(
    num_prompt_tokens: int, stopping: dict[str, Any], num_needed: int
) -> None:
    params = settled(request_of(stopping=pb.StoppingParams(**stopping)))

    def length(max_tokens_without_pins: int) -> int:
        return settle_length(
            params, num_prompt_tokens, LIMITS, 120, num_pinned_blocks=7, max_tokens_without_pins=max_tokens_without_pins
        )

    for enough in (num_needed, 10_000):
        with pytest.raises(OverloadedError, match=f"120 tokens .* 7 blocks .* needs {num_needed}: unpin") as caught:
            length(enough)
        assert caught.value.retry_after_s > 0
    with pytest.raises(InvalidRequestError):
        length(num_needed - 1)


def test_pins_neither_keep_out_what_fits_beside_them_nor_let_in_what_the_context_does_not_hold() -> None:
    fits = settled(request_of(stopping=pb.StoppingParams(max_tokens=20)))
    assert settle_length(fits, 100, LIMITS, 120, num_pinned_blocks=7, max_tokens_without_pins=10_000) == 20
    too_long = settled(request_of(stopping=pb.StoppingParams(max_tokens=157)))
    with pytest.raises(InvalidRequestError):
        settle_length(too_long, 100, LIMITS, 120, num_pinned_blocks=7, max_tokens_without_pins=10_000)


@pytest.mark.parametrize("n", [1, 2])
def test_where_pins_hold_memory_the_refusal_says_so(n: int) -> None:
    params = settled(request_of(sampling=pb.SamplingParams(n=n), stopping=pb.StoppingParams(max_tokens=30)))
    with pytest.raises(InvalidRequestError, match=r"give at most 20, .*unpin prefixes, which hold 7 blocks, or serve"):
        settle_length(params, 100, LIMITS, 120, num_pinned_blocks=7)


@pytest.mark.parametrize(
    ("wide", "num_top", "most"),
    [
        ({"sampling": pb.SamplingParams(n=128)}, 20, 11_397),
        ({"sampling": pb.SamplingParams(n=128)}, 0, 87_381),
        ({"beam": pb.BeamParams(beam_width=64)}, 20, 11_397),
        ({"sampling": pb.SamplingParams(n=16)}, 20, 91_180),
    ],
)
def test_the_log_probabilities_of_an_output_fit_into_one_entry_of_the_journal(
    wide: dict[str, Any], num_top: int, most: int
) -> None:
    """Regression: a restatement above 512 MiB was refused by the store for ever, and its whole journal stood still."""
    limits = replace(LIMITS, max_model_len=1_000_000, vocab_size=200_000)
    asked = {**wide, "output": pb.OutputParams(logprobs=num_top)}
    fit = 1_000_000
    assert settle_length(settled(request_of(**asked), limits), 100, limits, fit) == most
    assert settle_length(settled(request_of(**wide), limits), 100, limits, fit) == fit - 100
    for field in ("max_tokens", "min_tokens"):
        at_most: dict[str, Any] = {field: most}
        bounded = settled(request_of(**asked, stopping=pb.StoppingParams(**at_most)), limits)
        assert settle_length(bounded, 100, limits, fit) == most
        above: dict[str, Any] = {field: most + 1}
        beyond = settled(request_of(**asked, stopping=pb.StoppingParams(**above)), limits)
        with pytest.raises(InvalidRequestError, match=f"output.logprobs: is {num_top} .* of at most {most:,}"):
            settle_length(beyond, 100, limits, fit)


def test_samples_that_are_ranked_by_their_log_probabilities_are_bounded_as_if_these_were_asked_for() -> None:
    limits = replace(LIMITS, max_model_len=1_000_000)
    stopping = pb.StoppingParams(max_tokens=87_382)
    params = settled(request_of(sampling=pb.SamplingParams(n=1, best_of=128), stopping=stopping), limits)
    with pytest.raises(InvalidRequestError, match=r"sampling.best_of: is 128, which are ranked .* of at most 87,381"):
        settle_length(params, 100, limits, 1_000_000)


def test_the_digest_is_of_the_body_and_not_of_id_and_timeout() -> None:
    body = request_of(sampling=pb.SamplingParams(logit_bias={64 * i: i / 8 for i in range(64)}), tenant="t")
    again = request_of(sampling=pb.SamplingParams(logit_bias={64 * i: i / 8 for i in reversed(range(64))}), tenant="t")
    again.request_id, again.timeout_ms = "another", 5
    assert request_digest(body) == request_digest(again)
    assert again.request_id == "another"
    for change in (pb.GenerateRequest(text="Twice"), pb.GenerateRequest(tenant="u"), _with_seed(0)):
        other = pb.GenerateRequest()
        other.CopyFrom(body)
        other.MergeFrom(change)
        assert request_digest(other) != request_digest(body)


def test_a_settled_request_is_valid_again_and_stays_as_it_is() -> None:
    """The journal keeps requests in this form, and a new leader settles them again."""
    request = request_of(text="Once", stopping=pb.StoppingParams(min_tokens=3, stop=["."]))
    params = settled(request)
    request.request_id, request.sampling.seed = params.request_id, params.seed
    request.stopping.max_tokens = settle_length(params, 10, LIMITS, 100)
    again = validate(request, LIMITS, draw_seed=lambda: 1, make_id=lambda: "other")
    assert again.sequence_sampling(10) == params.sequence_sampling(10)
    assert (again.request_id, again.max_tokens) == (params.request_id, 90)
    assert settle_length(again, 10, LIMITS, 100) == 90


def _with_seed(seed: int) -> pb.GenerateRequest:
    return pb.GenerateRequest(sampling=pb.SamplingParams(seed=seed))
