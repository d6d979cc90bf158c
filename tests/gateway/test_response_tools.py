"""Tools and reasoning of `/v1/responses`: items, their events, and conversations that go on with results of calls."""

import json
from typing import Any

import httpx2
import openai
import pytest

import quire
from tests.gateway.reciter import ANSWERS, ARGUMENTS, MODEL, TOOLS, asking
from tests.gateway.reciting_model import cue
from tests.gateway.test_response_streams import events_of, resumed

FLAT: list[Any] = [{"type": "function", **TOOLS[0]["function"]}]
FISHY: dict[str, Any] = {"type": "function", "name": "f", "parameters": {"type": "fish"}}
CALL: dict[str, Any] = {"model": MODEL, "input": "call", "tools": FLAT, "temperature": 0}
THINKING: dict[str, Any] = {"chat_template_kwargs": {"enable_thinking": True}}
PREFIXES = {"reasoning": "rs_", "message": "msg_", "function_call": "fc_"}


@pytest.fixture(scope="module")
def deployment(reciter: tuple[str, str]) -> tuple[str, str]:
    """Addresses of the scheduler and of the gateway."""
    return reciter


def test_a_call_is_an_item_beside_reasoning_and_text(api: openai.OpenAI) -> None:
    response = api.responses.create(**CALL)
    reasoning, message, call = response.output
    assert reasoning.type == "reasoning" and reasoning.content is not None
    assert ([each.text for each in reasoning.content], reasoning.summary) == (["Which one?"], [])
    assert message.type == "message" and response.output_text == "Let me look."
    assert call.type == "function_call" and (call.name, call.arguments) == ("weather", ARGUMENTS)
    assert call.call_id.startswith("call_")
    assert response.status == "completed" and {each.to_dict()["status"] for each in response.output} == {"completed"}
    assert len({each.id for each in response.output}) == 3
    assert all(str(each.id).startswith(PREFIXES[each.type]) for each in response.output)
    shown = response.to_dict()
    assert shown["tools"] == [{**FLAT[0], "description": None, "strict": False}]
    assert (shown["tool_choice"], shown["parallel_tool_calls"]) == ("auto", True)
    assert api.responses.retrieve(response.id).to_dict() == shown


@pytest.mark.parametrize(
    ("fields", "kinds"),
    [
        (CALL, ["reasoning", "message", "function_call"]),
        (CALL | {"background": True}, ["reasoning", "message", "function_call"]),
        (CALL | {"input": "calls"}, ["function_call", "function_call"]),
        (CALL | {"input": "calls", "parallel_tool_calls": False}, ["function_call"]),
        (CALL | {"input": "broken"}, ["message"]),
        (CALL | {"include": ["message.output_text.logprobs"]}, ["reasoning", "message", "function_call"]),
        (CALL | {"max_output_tokens": 8}, None),
        ({"model": MODEL, "input": "?", **THINKING}, ["reasoning", "message"]),
    ],
)
def test_events_add_up_to_the_items_from_wherever_they_are_read(
    http: httpx2.Client, fields: dict[str, Any], kinds: list[str] | None
) -> None:
    events = events_of(http.post("/v1/responses", json=fields | {"stream": True}).text.splitlines())
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    last = events[-1]["response"]
    items = last["output"]
    assert kinds is None or [item["type"] for item in items] == kinds
    for index, item in enumerate(items):
        check_events_of_item([event for event in events if event.get("output_index") == index], item)
    assert http.get(f"/v1/responses/{last['id']}").json() == last
    for after in (-1, 1, len(events) // 2, len(events) - 3):
        params = {} if after < 0 else {"starting_after": after}
        assert resumed(http, last["id"], **params) == events[after + 1 :]


def check_events_of_item(events: list[dict[str, Any]], item: dict[str, Any]) -> None:
    """Kinds, places and texts of the events of an item."""
    of_call = item["type"] == "function_call"
    text = item["arguments"] if of_call else item["content"][0]["text"]
    parts = [] if of_call else ["response.content_part"]
    name = {"message": "output_text", "reasoning": "reasoning_text", "function_call": "function_call_arguments"}
    stem = f"response.{name[item['type']]}"
    begins = ["response.output_item.added", *(f"{each}.added" for each in parts)]
    ends = [f"{stem}.done", *(f"{each}.done" for each in parts), "response.output_item.done"]
    num_deltas = len(events) - len(begins) - len(ends)
    assert [event["type"] for event in events] == [*begins, *[f"{stem}.delta"] * num_deltas, *ends]
    assert "".join(event["delta"] for event in events if "delta" in event) == text
    added, done = events[0]["item"], events[-1]["item"]
    empty: dict[str, Any] = {"arguments": ""} if of_call else {"content": []}
    assert done == item and added == item | {"status": "in_progress"} | empty
    assert {event["item_id"] for event in events[1:-1]} == {item["id"]}
    assert all(event["content_index"] == 0 for event in events[1:-1]) if not of_call else num_deltas > 2
    rows = [row for event in events[1:-1] if "delta" in event for row in event.get("logprobs", ())]
    assert of_call or rows == item["content"][0].get("logprobs", [])
    of_text = next(event for event in events if event["type"] == f"{stem}.done")
    assert of_text["arguments" if of_call else "text"] == text


def test_openais_client_gathers_calls(api: openai.OpenAI) -> None:
    with api.responses.stream(**CALL) as stream:
        deltas = [event.delta for event in stream if event.type == "response.function_call_arguments.delta"]
        final = stream.get_final_response()
    call = final.output[-1]
    assert call.type == "function_call" and "".join(deltas) == call.arguments == ARGUMENTS


def test_a_call_that_is_cut_off_makes_the_response_incomplete(api: openai.OpenAI) -> None:
    whole = api.responses.create(**CALL)
    assert whole.usage is not None
    response = api.responses.create(**CALL, max_output_tokens=whole.usage.output_tokens - 6)
    call = response.output[-1]
    assert response.status == "incomplete"
    assert call.type == "function_call" and call.status == "incomplete"
    assert call.arguments and call.arguments != ARGUMENTS and ARGUMENTS.startswith(call.arguments)


def test_a_call_that_a_stop_string_cuts_off_is_incomplete(api: openai.OpenAI, http: httpx2.Client) -> None:
    response = api.responses.create(**CALL, extra_body={"stop": '"unit"'})
    call = response.output[-1]
    assert (response.status, call.type == "function_call" and call.arguments) == ("completed", '{"city": "Paris", ')
    assert call.to_dict()["status"] == "incomplete"
    assert api.responses.retrieve(response.id).output == response.output
    events = events_of(http.post("/v1/responses", json=CALL | {"stop": '"unit"', "stream": True}).text.splitlines())
    assert [each["item"]["status"] for each in events if each["type"] == "response.output_item.done"][
        -1
    ] == "incomplete"
    assert events[-1]["type"] == "response.completed"
    whole = api.responses.create(**CALL, extra_body={"stop": "}\n"})
    assert whole.output[-1].to_dict()["status"] == "completed"


def test_a_conversation_goes_on_by_id_or_by_items(api: openai.OpenAI, sdk: quire.Client) -> None:
    first = api.responses.create(**CALL)
    call = first.output[-1]
    assert call.type == "function_call"
    told: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "hello"}
    parts: Any = told | {"output": [{"type": "input_text", "text": "hello"}]}
    items: Any = [{"role": "user", "content": "call"}, *(each.to_dict() for each in first.output)]
    by_id = api.responses.create(**CALL | {"input": [told]}, previous_response_id=first.id)
    by_items = api.responses.create(**CALL | {"input": [*items, parts]})
    seen = quire.Chat(
        messages=[
            quire.ChatMessage("user", "call"),
            quire.ChatMessage(
                "assistant",
                "Let me look.",
                tool_calls=[quire.ToolCall(call.call_id, "weather", ARGUMENTS)],
                reasoning="Which one?",
            ),
            quire.ChatMessage("tool", "hello", tool_call_id=call.call_id),
        ],
        tools=TOOLS,
    )
    num_tokens = len(sdk.tokenize(seen).token_ids)
    for response in (by_id, by_items):
        assert response.output_text == "Hello, <b>you</b> there."
        assert response.usage is not None and response.usage.input_tokens == num_tokens
    listed = list(api.responses.input_items.list(by_items.id, order="asc"))
    assert [each.type for each in listed] == [
        "message",
        "reasoning",
        "message",
        "function_call",
        "function_call_output",
    ]
    again: Any = [each.to_dict() for each in listed]  # a listing can be sent again
    assert api.responses.create(**CALL | {"input": again}).output_text == by_items.output_text


def test_calls_one_after_another_are_of_one_turn(api: openai.OpenAI, sdk: quire.Client) -> None:
    calls = [("a", '{"city": "Rome"}'), ("b", '{"city": "Kiel"}')]
    sent: Any = [{"type": "function_call", "call_id": id, "name": "weather", "arguments": each} for id, each in calls]
    sent += [{"type": "function_call_output", "call_id": id, "output": "hello"} for id, _ in calls]
    turns = [
        quire.ChatMessage("assistant", tool_calls=[quire.ToolCall(id, "weather", each) for id, each in calls]),
        *(quire.ChatMessage("tool", "hello", tool_call_id=id) for id, _ in calls),
    ]
    response = api.responses.create(model=MODEL, input=sent)
    assert response.usage is not None and response.usage.input_tokens == len(sdk.tokenize(turns).token_ids)


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "weather"}])
def test_a_call_is_forced_and_its_arguments_follow_the_schema(api: openai.OpenAI, choice: Any) -> None:
    city = {"city": {"enum": ["Paris", "Rome"]}}
    schema = {"type": "object", "properties": city, "required": ["city"], "additionalProperties": False}
    tool: Any = {"type": "function", "name": "weather", "strict": True, "parameters": schema}
    response = api.responses.create(**CALL | {"input": "atlantis", "tools": [tool]}, tool_choice=choice)
    call = response.output[0]
    assert call.type == "function_call" and json.loads(call.arguments)["city"] in ("Paris", "Rome")
    shown = response.to_dict()
    assert (shown["tool_choice"], shown["tools"]) == (choice, [{**tool, "description": None}])
    assert api.responses.retrieve(response.id) == response


def test_strict_arguments_follow_the_schema_where_the_model_decides_to_call(api: openai.OpenAI) -> None:
    city = {"city": {"enum": ["Paris", "Rome"]}}
    schema = {"type": "object", "properties": city, "required": ["city"], "additionalProperties": False}
    tool: Any = {"type": "function", "name": "weather", "strict": True, "parameters": schema}
    fields = {
        **CALL,
        "input": "atlantis",
        "tools": [tool, {"type": "function", "name": "other", "parameters": {}}],
        "parallel_tool_calls": False,
    }
    response = api.responses.create(**fields)
    call = response.output[0]
    assert call.type == "function_call" and json.loads(call.arguments)["city"] in ("Paris", "Rome")
    assert [each["strict"] for each in response.to_dict()["tools"]] == [True, False]
    said = api.responses.create(**{**fields, "input": "plain"})
    assert said.output_text == "It rains: 3 < 4."


def test_a_form_of_content_does_not_keep_a_call_from_being_forced(api: openai.OpenAI) -> None:
    city = {"city": {"enum": ["Paris", "Rome"]}}
    schema = {"type": "object", "properties": city, "required": ["city"], "additionalProperties": False}
    tools: Any = [{"type": "function", "name": "weather", "parameters": schema}]
    fields = {**CALL, "input": "plain", "tools": tools, "tool_choice": "required", "parallel_tool_calls": False}
    form: Any = {"format": {"type": "json_schema", "name": "n", "schema": {"type": "object"}}}
    *_, call = api.responses.create(**fields, text=form).output
    assert call.type == "function_call" and json.loads(call.arguments)["city"] in ("Paris", "Rome")


@pytest.mark.parametrize("most", [1, 5, 12])
def test_a_forced_call_that_is_cut_off_leaves_no_marker_as_text(api: openai.OpenAI, most: int) -> None:
    fields = {**CALL, "input": "plain", "tool_choice": "required", "max_output_tokens": most}
    response = api.responses.create(**fields)
    assert (response.status, response.output_text) == ("incomplete", "")
    assert api.responses.retrieve(response.id).to_dict() == response.to_dict()


def test_only_tools_that_are_allowed_are_called(api: openai.OpenAI) -> None:
    city = {"city": {"enum": ["Paris", "Rome"]}}
    schema = {"type": "object", "properties": city, "required": ["city"], "additionalProperties": False}
    tools: Any = [
        {"type": "function", "name": name, "strict": True, "parameters": schema} for name in ("weather", "tides")
    ]
    choice: Any = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "tides"}]}
    fields = {**CALL, "input": "atlantis", "tools": tools, "tool_choice": choice, "parallel_tool_calls": False}
    response = api.responses.create(**fields)
    call = response.output[0]
    assert call.type == "function_call" and call.name == "tides"
    assert response.to_dict()["tool_choice"] == choice
    assert api.responses.retrieve(response.id) == response


@pytest.mark.parametrize("without", [{}, {"tools": FLAT, "tool_choice": "none"}])
def test_without_tools_the_text_is_content(api: openai.OpenAI, without: dict[str, Any]) -> None:
    response = api.responses.create(model=MODEL, input="calls", **without)
    assert response.output_text == ANSWERS[cue("calls")][0]


def test_the_effort_reaches_the_template(api: openai.OpenAI, sdk: quire.Client) -> None:
    response = api.responses.create(
        model=MODEL, input="hello", reasoning={"effort": "high", "summary": "auto", "generate_summary": "auto"}
    )
    seen = quire.Chat(messages=asking("hello"), template_kwargs={"reasoning_effort": "high"})
    assert response.usage is not None and response.usage.input_tokens == len(sdk.tokenize(seen).token_ids)
    assert response.reasoning is not None and response.reasoning.effort == "high"


def test_logprobs_are_those_of_the_message(http: httpx2.Client) -> None:
    include = {"include": ["message.output_text.logprobs"]}
    response = http.post("/v1/responses", json=CALL | include).json()
    [message] = [item for item in response["output"] if item["type"] == "message"]
    tokens = "".join(each["token"] for each in message["content"][0]["logprobs"])
    assert tokens.strip() == "Let me look."
    assert http.get(f"/v1/responses/{response['id']}").json() == response


@pytest.mark.parametrize(("most", "num_calls"), [(1, 1), (2, 2), (7, 2), (None, 2)])
def test_no_more_calls_come_back_than_are_asked_for(
    api: openai.OpenAI, http: httpx2.Client, most: int | None, num_calls: int
) -> None:
    fields: dict[str, Any] = {"model": MODEL, "input": "calls", "tools": FLAT, "temperature": 0, "max_tool_calls": most}
    response = api.responses.create(**fields)
    calls = [each for each in response.output if each.type == "function_call"]
    assert [each.name for each in calls] == ["weather", "tides"][:num_calls]
    assert response.max_tool_calls == most
    assert api.responses.retrieve(response.id).to_dict() == response.to_dict()
    events = events_of(http.post("/v1/responses", json={**fields, "stream": True}).text.splitlines())
    assert sum(event["type"] == "response.function_call_arguments.done" for event in events) == num_calls


def test_forced_calls_are_no_more_than_are_asked_for(api: openai.OpenAI) -> None:
    tools: list[Any] = [{**FLAT[0], "parameters": {"type": "object", "additionalProperties": False}}]
    response = api.responses.create(
        model=MODEL, input="calls", tools=tools, tool_choice="required", max_tool_calls=2, max_output_tokens=300
    )
    assert response.status == "completed"
    assert 1 <= sum(each.type == "function_call" for each in response.output) <= 2


def test_a_request_of_codex_is_answered(http: httpx2.Client) -> None:
    fields = {
        "input": [
            {"type": "message", "id": "msg_1", "role": "user", "content": [{"type": "input_text", "text": "call"}]}
        ],
        "reasoning": {"summary": "auto"},
        "store": False,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "key",
        "client_metadata": {"session_id": "1"},
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "stream": True,
    }
    events = events_of(http.post("/v1/responses", json=CALL | fields).text.splitlines())
    assert [item["type"] for item in events[-1]["response"]["output"]] == ["reasoning", "message", "function_call"]


@pytest.mark.parametrize(
    ("extra", "param"),
    [
        ({"tools": [{"type": "web_search"}]}, "tools[0]"),
        ({"tools": [{"type": "custom", "name": "f"}]}, "tools[0]"),
        ({"tools": [*FLAT, {**FISHY, "strict": True}]}, "tools[1].parameters"),
        ({"tools": [*FLAT, FISHY], "tool_choice": {"type": "function", "name": "f"}}, "tools[1].parameters"),
        (
            {"tools": FLAT, "text": {"format": {"type": "json_schema", "name": "f", "schema": {"type": "fish"}}}},
            "text.format.schema",
        ),
        ({"tools": [{"type": "function", "name": "f", "defer_loading": True}]}, "tools[0].defer_loading"),
        ({"tools": FLAT * 129}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": "none", "tools": [{"type": "function", "name": "a b"}]}, "tools[0].name"),
        ({"tools": FLAT, "tool_choice": {"type": "function", "name": "tides"}}, "tool_choice"),
        ({"tools": FLAT, "tool_choice": "required", "structured_outputs": {"regex": "a"}}, "tool_choice"),
        ({"input": [{"type": "function_call", "name": "f", "arguments": "{}"}]}, "input[0].call_id"),
        ({"input": [{"type": "reasoning", "encrypted_content": "x"}]}, "input[0].encrypted_content"),
        ({"input": [{"type": "web_search_call", "id": "x"}]}, "input[0]"),
        ({"max_tool_calls": 0}, "max_tool_calls"),
        ({"input": [{"type": "compaction", "encrypted_content": "gAAAA"}]}, "input[0].encrypted_content"),
        ({"input": [{"type": "compaction", "encrypted_content": "quire:%"}]}, "input[0].encrypted_content"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(http: httpx2.Client, extra: dict[str, Any], param: str) -> None:
    answer = http.post("/v1/responses", json={"input": "hello", **extra})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
