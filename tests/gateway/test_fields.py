"""Fields of requests beside the SDK's parameters: what the SDK can do, HTTP can ask for. Starts nothing."""

import dataclasses
from typing import Any

import pytest
from pydantic import ValidationError

import quire
from gateway_svc.anthropic.fields import MessageRequest
from gateway_svc.openai.chat_request import ChatRequest
from gateway_svc.openai.completions import CompletionRequest
from gateway_svc.openai.responses.fields import ResponseRequest
from gateway_svc.openai.responses.items import InputCall
from gateway_svc.openai.responses.tools import FunctionTool
from quire.parsing.answer_format import AnswerFormat

Kind = type[CompletionRequest] | type[ChatRequest] | type[MessageRequest]
BODIES: dict[Any, dict[str, Any]] = {
    CompletionRequest: {"prompt": "x"},
    ChatRequest: {"messages": [{"role": "user", "content": "x"}]},
    MessageRequest: {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1},
    ResponseRequest: {"input": "x"},
}
LONG = "key " * 1000
GENERATIONS = [CompletionRequest, ChatRequest, MessageRequest]


@pytest.mark.parametrize("kind", GENERATIONS)
def test_every_sampling_parameter_of_the_sdk_is_a_field(kind: Kind) -> None:
    names = {each.name for each in dataclasses.fields(quire.SamplingParams)}
    if kind is MessageRequest:
        names -= {"n", "best_of"}  # it has one output
    assert names <= kind.model_fields.keys()


@pytest.mark.parametrize("kind", GENERATIONS)
def test_numbers_are_passed_on_under_their_names(kind: Kind) -> None:
    numbers = {"temperature": 0.5, "min_p": 0.25, "repetition_penalty": 1.5, "first_sample_index": 3, "priority": -2}
    given = kind.model_validate(BODIES[kind] | numbers).keywords("id")
    assert numbers.items() <= given.items()


@pytest.mark.parametrize("kind", GENERATIONS)
def test_a_whole_number_may_be_written_with_a_point(kind: Kind) -> None:
    whole = {"top_k": 4, "min_tokens": 0, "priority": -2, "seed": 7}
    with_points: dict[str, Any] = {name: float(value) for name, value in whole.items()}
    given = [kind.model_validate(BODIES[kind] | numbers).keywords("id") for numbers in (whole, with_points)]
    assert given[0] == given[1]
    for wrong in (4.5, 1e300, -1e300):
        with pytest.raises(ValidationError):
            kind.model_validate(BODIES[kind] | {"top_k": wrong})


@pytest.mark.parametrize("kind", GENERATIONS)
def test_a_number_is_no_text(kind: Kind) -> None:
    for wrong in ("1", True, [1]):
        with pytest.raises(ValidationError):
            kind.model_validate(BODIES[kind] | {"min_p": wrong})


@pytest.mark.parametrize(
    ("kind", "given", "session"),
    [
        (CompletionRequest, {"user": "u"}, "u"),
        (CompletionRequest, {"user": "u", "prompt_cache_key": "p"}, "p"),
        (ChatRequest, {"user": "u", "prompt_cache_key": "p", "session_key": "s"}, "s"),
        (ChatRequest, {"user": "", "prompt_cache_key": "", "session_key": ""}, None),
        (ResponseRequest, {"prompt_cache_key": "p"}, "p"),
        (ResponseRequest, {"user": "u", "prompt_cache_key": None}, "u"),
        (MessageRequest, {"metadata": {"user_id": "m", "more": [1]}}, "m"),
        (MessageRequest, {"metadata": {"user_id": "m"}, "session_key": "s"}, "s"),
        (MessageRequest, {"metadata": {"user_id": None}}, None),
        (MessageRequest, {"metadata": None}, None),
        (CompletionRequest, {"prompt_cache_key": LONG}, LONG),
        (ChatRequest, {"user": LONG}, LONG),
        (MessageRequest, {"metadata": {"user_id": LONG}}, LONG),
    ],
)
def test_the_session_of_a_request_is_in_the_fields_that_clients_of_each_api_send(
    kind: Any, given: dict[str, Any], session: str | None
) -> None:
    body = kind.model_validate(BODIES[kind] | given)
    assert body.session == session
    assert "session_key" not in body.keywords("id")  # it has chosen the id


@pytest.mark.parametrize(
    ("kind", "given"),
    [
        (ChatRequest, {"user": 5}),
        (CompletionRequest, {"user": ["u"]}),
        (ChatRequest, {"prompt_cache_key": 5}),
        (ChatRequest, {"session_key": LONG}),
        (ResponseRequest, {"user": LONG}),  # it is kept with the response
        (ResponseRequest, {"prompt_cache_key": LONG}),
        (MessageRequest, {"metadata": {"user_id": 5}}),
    ],
)
def test_a_key_that_is_no_text_or_too_long_for_its_field_is_refused(kind: Any, given: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        kind.model_validate(BODIES[kind] | given)


@pytest.mark.parametrize("kind", [FunctionTool, InputCall])
def test_an_async_function_is_refused_by_name(kind: type[FunctionTool] | type[InputCall]) -> None:
    plain: dict[str, Any] = {"type": "function", "name": "f"}
    if kind is InputCall:
        plain |= {"type": "function_call", "call_id": "c", "arguments": "{}"}
    kind.model_validate(plain | {"async": None})
    with pytest.raises(ValidationError, match="does not support it"):
        kind.model_validate(plain | {"async": True})


def variables_of(kind: Any, fields: dict[str, Any]) -> Any:
    """Variables that the chat template gets."""
    body = kind.model_validate(BODIES[kind] | fields)
    return body.chat([] if kind is ResponseRequest else AnswerFormat()).template_kwargs


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        (ChatRequest, lambda effort: {"reasoning_effort": effort}),
        (ResponseRequest, lambda effort: {"reasoning": {"effort": effort}}),
        (MessageRequest, lambda effort: {"output_config": {"effort": effort}}),
    ],
)
def test_an_effort_of_none_switches_thinking_off_unless_the_request_says_otherwise(kind: Any, fields: Any) -> None:
    off = {"reasoning_effort": "none", "enable_thinking": False, "thinking": False}
    assert variables_of(kind, fields("none")) == off
    assert variables_of(kind, fields("high")) == {"reasoning_effort": "high"}
    assert variables_of(kind, fields(None)) == {}
    given = {"chat_template_kwargs": {"enable_thinking": True, "thinking": True}}
    assert variables_of(kind, fields("none") | given) == off | given["chat_template_kwargs"]
    if kind is MessageRequest:
        thinking = {"type": "adaptive"}
        assert variables_of(kind, fields("none") | {"thinking": thinking})["enable_thinking"] is True
