"""Errors of a wrong body: a handful however large it is, since each takes time and memory. Starts nothing."""

import json
from typing import Any, cast

import pytest
from pydantic import ValidationError
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaMode, JsonSchemaValue
from pydantic_core import core_schema

import quire
from gateway_svc.anthropic.fields import Conversation
from gateway_svc.api_error import from_validation
from gateway_svc.app import create_app
from gateway_svc.json_body import MAX_CONTAINERS, decode_json
from gateway_svc.openai.chat_request import ChatRequest
from gateway_svc.openai.responses.annotation import Annotation
from gateway_svc.openai.responses.fields import ResponseRequest
from gateway_svc.openai.responses.items import InputReasoning
from gateway_svc.openai.tools import FunctionDefinition
from gateway_svc.prefixes import PinRequest
from gateway_svc.request_fields import MOST_FIELDS, ApiModel

NUM_WRONG = 2_000
FEW = 24  # alternatives of a type, each with its own


def models_below(kind: type[ApiModel]) -> set[type[ApiModel]]:
    """A model's subclasses, and theirs."""
    return {each for below in kind.__subclasses__() for each in (below, *models_below(below))}


def models_of_bodies() -> list[type[ApiModel]]:
    """Each model of which a body, or a part of one, is made."""
    create_app(quire.AsyncClient("127.0.0.1:1"), max_body_bytes=1 << 20)  # which imports all of them
    found = [each for each in models_below(ApiModel) - {Annotation} if each.__module__.startswith("gateway_svc.")]
    return sorted(found, key=lambda each: f"{each.__module__}.{each.__name__}")


MODELS = models_of_bodies()
EACH_MODEL = pytest.mark.parametrize("kind", MODELS, ids=lambda kind: f"{kind.__module__}.{kind.__name__}")


def num_errors(kind: type[ApiModel], given: Any) -> int:
    """The number of errors of a value."""
    try:
        kind.model_validate(given)
    except ValidationError as error:
        return error.error_count()
    return 0


class _Unbounded(GenerateJsonSchema):
    """Schemas whose making notes lists and dicts that may have an error for each of their members."""

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self.found: list[Any] = []
        _found.append(self.found)

    def list_schema(self, schema: core_schema.ListSchema) -> JsonSchemaValue:
        if not schema.get("fail_fast"):
            self.found.append(schema)
        return super().list_schema(schema)

    def function_before_schema(self, schema: core_schema.BeforeValidatorFunctionSchema) -> JsonSchemaValue:
        inner = schema["schema"]
        if inner["type"] == "dict":
            return super().dict_schema(cast(core_schema.DictSchema, inner))  # its members are counted before
        return super().function_before_schema(schema)

    def dict_schema(self, schema: core_schema.DictSchema) -> JsonSchemaValue:
        if schema.get("values_schema", {"type": "any"})["type"] != "any":
            self.found.append(schema)
        return super().dict_schema(schema)


_found: list[list[Any]] = []


@EACH_MODEL
@pytest.mark.parametrize("mode", ["validation", "serialization"])
def test_each_list_ends_with_its_first_error_and_each_dict_is_bounded(
    kind: type[ApiModel], mode: JsonSchemaMode
) -> None:
    _found.clear()
    kind.model_json_schema(mode=mode, schema_generator=_Unbounded)
    assert [] in _found
    assert not any(_found)


@EACH_MODEL
def test_many_wrong_members_have_few_errors(kind: type[ApiModel]) -> None:
    many = {str(number): number for number in range(NUM_WRONG)}
    assert num_errors(kind, many) <= len(kind.model_fields)
    given: list[Any] = [[1] * NUM_WRONG, [{}] * NUM_WRONG, [None] * NUM_WRONG, [many], many]
    for name, field in kind.model_fields.items():
        for wrong in given:
            assert num_errors(kind, {field.alias or name: wrong}) <= len(kind.model_fields) + FEW, name


def test_an_object_may_have_all_fields_of_any_model() -> None:
    assert {ChatRequest, ResponseRequest, Conversation, FunctionDefinition, InputReasoning, PinRequest} <= {*MODELS}
    assert max(len(each.model_fields) for each in MODELS) < MOST_FIELDS


@pytest.mark.parametrize(
    ("kind", "given", "param"),
    [
        (ChatRequest, {"messages": [{"role": "user"}, 1, 2]}, "messages[1]"),
        (ChatRequest, {"messages": [{"role": "user", "content": [{"type": "text", "text": 3}] * 9}]},
         "messages[0].content[0].text"),
        (ResponseRequest, {"input": [{"role": "user", "content": "x"}, {"role": "nobody", "content": "x"}, 7]},
         "input[1].role"),
        (Conversation, {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}, 7, 8]}]},
         "messages[0].content[1]"),
        (ChatRequest, {"messages": [{"role": "user"}, {str(i): i for i in range(MOST_FIELDS + 1)}]}, "messages[1]"),
        (ChatRequest, {"messages": [{"role": "user"}], "logit_bias": {str(i): "x" for i in range(2000)}}, "logit_bias"),
        (ResponseRequest, {"input": "x", "metadata": {str(i): 1 for i in range(17)}}, "metadata"),
    ],
)  # fmt: skip
def test_the_first_wrong_member_is_named(kind: type[ApiModel], given: dict[str, Any], param: str) -> None:
    with pytest.raises(ValidationError) as caught:
        kind.model_validate(given)
    errors = [{**each, "loc": ("body", *each["loc"])} for each in caught.value.errors()]
    assert from_validation(errors).param == param


def test_objects_and_lists_of_a_body_are_bounded_and_what_only_looks_like_them_in_a_text_is_not() -> None:
    assert decode_json(b"[" + b",".join([b"{}"] * (MAX_CONTAINERS - 1)) + b"]")
    assert decode_json(b'["' + b"{[" * MAX_CONTAINERS + b'"]')
    for wrong in (
        b"[" + b",".join([b"{}"] * MAX_CONTAINERS) + b"]",
        b"[" + b",".join([b"[[]]"] * MAX_CONTAINERS) + b"]",
    ):
        with pytest.raises(json.JSONDecodeError, match="objects and lists"):
            decode_json(wrong)
