"""Fields of requests beside the SDK's parameters: what the SDK can do, HTTP can ask for. Starts nothing."""

import dataclasses
from typing import Any

import pytest
from pydantic import ValidationError

import quire
from gateway_svc.anthropic.fields import MessageRequest
from gateway_svc.openai.chat_request import ChatRequest
from gateway_svc.openai.completions import CompletionRequest

Kind = type[CompletionRequest] | type[ChatRequest] | type[MessageRequest]
BODIES: dict[Any, dict[str, Any]] = {
    CompletionRequest: {"prompt": "x"},
    ChatRequest: {"messages": [{"role": "user", "content": "x"}]},
    MessageRequest: {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1},
}


@pytest.mark.parametrize("kind", BODIES)
def test_every_sampling_parameter_of_the_sdk_is_a_field(kind: Kind) -> None:
    names = {each.name for each in dataclasses.fields(quire.SamplingParams)}
    if kind is MessageRequest:
        names -= {"n", "best_of"}  # it has one output
    assert names <= kind.model_fields.keys()


@pytest.mark.parametrize("kind", BODIES)
def test_numbers_are_passed_on_under_their_names(kind: Kind) -> None:
    numbers = {"temperature": 0.5, "min_p": 0.25, "repetition_penalty": 1.5, "first_sample_index": 3, "priority": -2}
    given = kind.model_validate(BODIES[kind] | numbers).keywords("id")
    assert numbers.items() <= given.items()


@pytest.mark.parametrize("kind", BODIES)
def test_a_number_is_no_text(kind: Kind) -> None:
    for wrong in ("1", True, [1]):
        with pytest.raises(ValidationError):
            kind.model_validate(BODIES[kind] | {"min_p": wrong})
