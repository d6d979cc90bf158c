"""Annotations of responses: what is written for gateways of other versions, and read back as it was."""

import json
from typing import Any

import pytest

from gateway_svc.api_error import ApiError
from gateway_svc.openai.responses.annotation import Annotation, decode_annotation

FIRST_FIELDS: dict[str, Any] = {  # which every version knows, and which have no defaults
    "model": "demo",
    "store": True,
    "background": False,
    "instructions": None,
    "previous_response_id": None,
    "max_output_tokens": None,
    "temperature": 1.0,
    "top_p": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "top_logprobs": 0,
    "has_logprobs": False,
    "truncation": "disabled",
    "text": {"format": {"type": "text", "schema": None}},
    "metadata": {},
    "user": None,
    "safety_identifier": None,
    "prompt_cache_key": None,
    "input": [{"role": "user", "content": [{"type": "input_text", "text": "Hello"}]}],
}
CALL = {"type": "function_call", "call_id": "call_1", "name": "weather", "arguments": "{}", "status": "completed"}
REASONING = {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]}
USED: list[dict[str, Any]] = [
    {"max_tool_calls": 2},
    {"reasoning": {"effort": "low", "summary": None}, "reasoning_parser": "think", "tool_parser": "hermes"},
    {"tools": [{"type": "function", "name": "f", "description": None}], "tool_choice": "none"},
    {"parallel_tool_calls": False, "may_call_several": False},
    {"input": [REASONING, CALL, {"type": "function_call_output", "call_id": "call_1", "output": ""}]},
    {"input": [{"id": "msg_1", "role": "assistant", "content": "", "status": "completed", "phase": None}]},
    {"input": []},
]
LARGE = "y" * 300_000
TOOLS = [{"type": "function", "name": "f", "description": LARGE}]
FORMAT = {"format": {"type": "json_schema", "schema": {"description": LARGE}}}
TURN = [{"role": "user", "content": [{"type": "input_text", "text": LARGE}]}]


def test_fields_without_a_use_are_not_written_so_that_earlier_versions_read_the_rest() -> None:
    assert json.loads(Annotation.model_validate(FIRST_FIELDS).encode()) == FIRST_FIELDS


@pytest.mark.parametrize("fields", USED)
def test_an_annotation_is_read_as_it_was(fields: dict[str, Any]) -> None:
    annotation = Annotation.model_validate({**FIRST_FIELDS, **fields})
    assert decode_annotation(annotation.encode()) == annotation
    assert json.loads(annotation.encode()).keys() == {**FIRST_FIELDS, **fields}.keys()


def test_what_has_no_effect_is_not_kept_so_that_an_answer_is_sent_back_with_its_log_probabilities() -> None:
    top = [{"token": " x", "logprob": -1.5, "bytes": [32, 120]}] * 20
    logprobs = [{"token": " x", "logprob": -1.5, "bytes": [32, 120], "top_logprobs": top}] * 400
    part = {"type": "output_text", "text": "Hi.", "annotations": [], "logprobs": logprobs}
    answer = {"type": "message", "id": "msg_1", "role": "assistant", "status": "completed", "content": [part]}
    kept = json.loads(Annotation.model_validate({**FIRST_FIELDS, "input": [answer]}).encode())
    content = [{"type": "output_text", "text": "Hi."}]
    assert kept["input"] == [{"id": "msg_1", "role": "assistant", "content": content}]


def test_an_annotation_with_all_fields_is_read_as_well() -> None:
    annotation = Annotation.model_validate(FIRST_FIELDS)
    assert decode_annotation(annotation.model_dump_json(by_alias=True).encode()) == annotation


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"input": TURN}, "input"),
        ({"instructions": LARGE}, "instructions"),
        ({"tools": TOOLS}, "tools"),
        ({"text": FORMAT, "input": []}, "text"),
        ({"tools": TOOLS, "input": TURN}, "tools"),  # a shorter input would not help
    ],
)
def test_what_is_too_large_to_keep_is_refused_by_the_name_of_what_must_be_shorter(
    fields: dict[str, Any], named: str
) -> None:
    with pytest.raises(ApiError) as refused:
        Annotation.model_validate(FIRST_FIELDS | fields).encode()
    assert refused.value.param == named
    assert ("store: false" in str(refused.value)) is (named == "input")
