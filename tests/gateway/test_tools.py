"""Tools and reasoning over real HTTP, by OpenAI's own client, of a model that recites answers in its format."""

import json
import re
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest
from typer.testing import CliRunner

import quire
from quire.cli.app import app
from tests.gateway.reciter import ANSWERS, ARGUMENTS, MODEL, TOOLS, asking
from tests.gateway.reciting_model import cue
from tests.quire.spoken_answers import SPOKEN

STRICT: Any = {
    "type": "function",
    "function": {
        "name": "weather",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Paris", "Rome"]}, "unit": {"enum": ["C", "F"]}},
            "required": ["city", "unit"],
            "additionalProperties": False,
        },
    },
}
FISHY = {"name": "f", "schema": {"type": "fish"}}


@pytest.fixture(scope="module")
def deployment(reciter: tuple[str, str]) -> tuple[str, str]:
    """Addresses of the scheduler and of the gateway."""
    return reciter


def test_the_server_tells_the_format_of_its_model(sdk: quire.Client) -> None:
    assert sdk.model().answer_format == quire.AnswerFormat(tool_parser="hermes", reasoning_parser="think")


def test_a_call_comes_back_with_reasoning_and_content(api: openai.OpenAI) -> None:
    answer = api.chat.completions.create(model=MODEL, messages=asking("call"), tools=TOOLS)
    [choice] = answer.choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "Let me look."
    fields = choice.message.to_dict()
    assert fields["reasoning_content"] == fields["reasoning"] == "Which one?"
    assert choice.message.tool_calls is not None
    [call] = choice.message.tool_calls
    assert call.type == "function"
    assert (call.function.name, call.function.arguments) == ("weather", ARGUMENTS)
    assert call.id.startswith("call_")


def test_events_add_up_to_the_message_and_arguments_come_in_pieces(api: openai.OpenAI) -> None:
    fields: dict[str, Any] = {"model": MODEL, "messages": asking("call"), "tools": TOOLS}
    headers = {"Idempotency-Key": "one call"}  # so that both have one id, and so one id of the call
    whole = api.chat.completions.create(**fields, extra_headers=headers).choices[0].message.to_dict()
    made: dict[str, Any] = {"content": "", "reasoning_content": "", "reasoning": ""}
    calls: list[dict[str, Any]] = []
    pieces, reasons = [], []
    with ExitStack() as stack:
        events = stack.enter_context(api.chat.completions.create(**fields, stream=True, extra_headers={}))
        for event in events:
            [choice] = event.choices
            delta = choice.delta.to_dict()
            reasons.append(choice.finish_reason)
            for name in made:
                made[name] += delta.get(name) or ""
            for each in delta.get("tool_calls", ()):
                if each["index"] == len(calls):
                    calls.append({"id": each["id"], "type": each["type"], "function": dict(each["function"])})
                else:
                    assert set(each) == {"index", "function"} and set(each["function"]) == {"arguments"}
                    calls[each["index"]]["function"]["arguments"] += each["function"]["arguments"]
                pieces.append(each["function"]["arguments"])
    assert made == {name: whole[name] for name in made}
    assert [each["function"] for each in calls] == [each["function"] for each in whole["tool_calls"]]
    assert reasons[-1] == "tool_calls" and set(reasons[:-1]) == {None}
    assert len([each for each in pieces if each]) > 2


def test_a_retry_gets_the_same_ids_whole_or_as_events(api: openai.OpenAI) -> None:
    fields: dict[str, Any] = {"model": MODEL, "messages": asking("calls"), "tools": TOOLS, "n": 2, "temperature": 1.0}
    found = []
    for _ in range(2):
        answer = api.chat.completions.create(**fields, extra_headers={"Idempotency-Key": "again"})
        found.append([[call.id for call in choice.message.tool_calls or ()] for choice in answer.choices])
    assert found[0] == found[1]
    assert len({each for ids in found[0] for each in ids}) == 4


def test_a_stream_with_calls_resumes_at_any_event_with_the_same_ids(http: httpx2.Client) -> None:
    body = {"messages": asking("call"), "tools": TOOLS, "stream": True}
    headers = {"Idempotency-Key": "resumed call"}

    def events(**more: str) -> list[str]:
        answer = http.post("/v1/chat/completions", json=body, headers={**headers, **more})
        assert answer.status_code == 200, answer.text
        return [each for each in answer.text.split("\n\n") if each.startswith("id: ")]

    def without_time(found: list[str]) -> list[str]:
        return [re.sub(r'"created":\d+', "", each) for each in found]

    first = events()
    ids = [each.split("\n")[0].removeprefix("id: ") for each in first]
    for place in (0, len(ids) // 2, len(ids) - 2):
        assert without_time(events(**{"Last-Event-ID": ids[place]})) == without_time(first[place + 1 :])
    whole = http.post("/v1/chat/completions", json={**body, "stream": False}, headers=headers).json()
    [call] = whole["choices"][0]["message"]["tool_calls"]
    assert sum(f'"id":"{call["id"]}"' in each for each in first) == 1


def test_a_conversation_goes_on_with_the_result_of_a_call(api: openai.OpenAI, sdk: quire.Client) -> None:
    first = api.chat.completions.create(model=MODEL, messages=asking("call"), tools=TOOLS).choices[0].message
    assert first.tool_calls is not None
    call_id = first.tool_calls[0].id
    sent: list[Any] = [
        *asking("call"),
        first.to_dict(),
        {"role": "tool", "tool_call_id": call_id, "content": "hello", "name": "weather"},
    ]
    second = api.chat.completions.create(model=MODEL, messages=sent, tools=TOOLS)
    assert second.choices[0].message.content == "Hello, <b>you</b> there."
    seen = sdk.detokenize(
        sdk.tokenize(
            quire.Chat(
                messages=[
                    quire.ChatMessage("user", "call"),
                    quire.ChatMessage(
                        "assistant",
                        "Let me look.",
                        tool_calls=[quire.ToolCall(call_id, "weather", ARGUMENTS)],
                        reasoning="Which one?",
                    ),
                    quire.ChatMessage("tool", "hello", tool_call_id=call_id, name="weather"),
                ],
                tools=TOOLS,
            )
        ).token_ids,
        keep_special_tokens=True,
    )
    assert second.usage is not None
    assert "<think>Which one?</think><tool_call>weather Paris</tool_call>" in seen
    assert f"tool: hello answers {call_id}※hello※" in seen
    assert seen.startswith('tool weather {"type": "object"')


def test_several_calls_or_only_the_first(api: openai.OpenAI) -> None:
    fields: dict[str, Any] = {"model": MODEL, "messages": asking("calls"), "tools": TOOLS}
    for parallel, names in ((None, ["weather", "tides"]), (True, ["weather", "tides"]), (False, ["weather"])):
        extra: dict[str, Any] = {} if parallel is None else {"parallel_tool_calls": parallel}
        message = api.chat.completions.create(**fields, **extra).choices[0].message
        assert message.content is None
        assert [call.function.name for call in message.tool_calls or ()] == names
        streamed = [
            call.function.name
            for event in api.chat.completions.create(**fields, **extra, stream=True)
            for call in event.choices[0].delta.tool_calls or ()
            if call.function is not None and call.function.name
        ]
        assert streamed == names


@pytest.mark.parametrize("without", [{}, {"tools": TOOLS, "tool_choice": "none"}])
def test_without_tools_the_text_is_content(api: openai.OpenAI, without: dict[str, Any]) -> None:
    [choice] = api.chat.completions.create(model=MODEL, messages=asking("calls"), **without).choices
    assert choice.message.content == ANSWERS[cue("calls")][0]
    assert choice.message.tool_calls is None and choice.finish_reason == "stop"


def test_text_that_is_no_call_is_content(api: openai.OpenAI) -> None:
    [choice] = api.chat.completions.create(model=MODEL, messages=asking("broken"), tools=TOOLS).choices
    assert choice.message.content == ANSWERS[cue("broken")][0]
    assert choice.finish_reason == "stop"


def test_a_call_that_is_cut_off_ends_by_its_length(api: openai.OpenAI) -> None:
    whole = api.chat.completions.create(model=MODEL, messages=asking("call"), tools=TOOLS)
    assert whole.usage is not None
    fields: dict[str, Any] = {"max_completion_tokens": whole.usage.completion_tokens - 6}
    [choice] = api.chat.completions.create(model=MODEL, messages=asking("call"), tools=TOOLS, **fields).choices
    assert choice.finish_reason == "length"
    assert choice.message.tool_calls is not None
    arguments = choice.message.tool_calls[0].function.arguments
    assert arguments and arguments != ARGUMENTS and ARGUMENTS.startswith(arguments)


@pytest.mark.parametrize(
    ("stop", "reason", "arguments"), [('"unit"', "stop", '{"city": "Paris", '), ("}\n", None, ARGUMENTS)]
)
def test_a_call_that_a_stop_string_cuts_off_is_not_to_be_made(
    api: openai.OpenAI, stop: str, reason: str | None, arguments: str
) -> None:
    fields: dict[str, Any] = {"model": MODEL, "messages": asking("call"), "tools": TOOLS, "stop": stop}
    [choice] = api.chat.completions.create(**fields).choices
    assert choice.finish_reason == (reason or "tool_calls")
    assert choice.message.tool_calls is not None
    assert choice.message.tool_calls[0].to_dict()["function"] == {"name": "weather", "arguments": arguments}
    *_, last = api.chat.completions.create(**fields, stream=True)
    assert last.choices[0].finish_reason == choice.finish_reason


def test_reasoning_that_the_prompt_opened_is_told_from_the_answer(api: openai.OpenAI, sdk: quire.Client) -> None:
    extra: dict[str, Any] = {"chat_template_kwargs": {"enable_thinking": True}}
    message = api.chat.completions.create(model=MODEL, messages=asking("?"), extra_body=extra).choices[0].message
    assert (message.content, message.to_dict()["reasoning_content"]) == ("Four.", "Hm: 2 + 2 it is.")
    extra["include_reasoning"] = False
    message = api.chat.completions.create(model=MODEL, messages=asking("?"), extra_body=extra).choices[0].message
    assert message.content == "Four." and "reasoning_content" not in message.to_dict()
    events = api.chat.completions.create(model=MODEL, messages=asking("?"), extra_body=extra, stream=True)
    deltas = [event.choices[0].delta.to_dict() for event in events]
    assert "".join(str(each.get("content") or "") for each in deltas) == "Four."
    assert not [each for each in deltas if "reasoning" in each]
    with sdk.stream_chat(asking("?"), template_kwargs={"enable_thinking": True}, request_id="thinks") as stream:
        assert stream.accepted().in_reasoning
        text = stream.completion().text
    with sdk.attach("thinks") as stream:  # from its record
        assert stream.accepted().in_reasoning
        assert stream.completion().text == text


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
@pytest.mark.parametrize("answer", ["atlantis", "call", None])
def test_a_call_is_forced_and_its_arguments_follow_the_schema(
    api: openai.OpenAI, answer: str | None, choice: Any
) -> None:
    """The grammar keeps the model from going another way; its reasoning is its own."""
    fields: dict[str, Any] = {
        "model": MODEL,
        "messages": asking(answer or "?"),
        "tools": [STRICT],
        "tool_choice": choice,
        "parallel_tool_calls": False,
        "temperature": 0,
        "max_completion_tokens": 300,
        "extra_body": {"chat_template_kwargs": {"enable_thinking": answer is None}},
    }
    [made] = api.chat.completions.create(**fields).choices
    assert made.finish_reason == "tool_calls" and made.message.content is None
    assert made.message.tool_calls is not None
    [call] = made.message.tool_calls
    arguments = json.loads(call.function.arguments)
    assert call.function.name == "weather"
    assert arguments["city"] in ("Paris", "Rome") and arguments["unit"] in ("C", "F") and len(arguments) == 2
    reasoning = {"atlantis": None, "call": "Which one?", None: "Hm: 2 + 2 it is."}[answer]
    assert made.message.to_dict().get("reasoning") == reasoning
    if answer == "call":
        assert arguments == json.loads(ARGUMENTS)


@pytest.mark.parametrize("answer", ["plain", "call", "atlantis"])
def test_strict_arguments_follow_the_schema_where_the_model_decides_to_call(api: openai.OpenAI, answer: str) -> None:
    """Text is as without a grammar, with reasoning or without, and so are arguments that follow the schema."""
    fields: dict[str, Any] = {"model": MODEL, "messages": asking(answer), "temperature": 0}
    free = api.chat.completions.create(**fields, tools=TOOLS).choices[0].message
    fields |= {"tools": [STRICT], "parallel_tool_calls": False, "max_completion_tokens": 300}
    made = api.chat.completions.create(**fields).choices[0].message
    assert (made.content, made.to_dict().get("reasoning")) == (free.content, free.to_dict().get("reasoning"))
    arguments = [call.function.arguments for call in made.tool_calls or () if call.type == "function"]
    assert arguments == {"plain": [], "call": [ARGUMENTS], "atlantis": arguments[:1]}[answer]
    if answer == "atlantis":
        [found] = map(json.loads, arguments)
        assert found["city"] in ("Paris", "Rome") and found["unit"] in ("C", "F") and len(found) == 2
    events = [event.choices[0].delta for event in api.chat.completions.create(**fields, stream=True)]
    assert "".join(each.content or "" for each in events) == (made.content or "")
    pieces = [call.function.arguments for each in events for call in each.tool_calls or () if call.function]
    assert "".join(each or "" for each in pieces) == "".join(arguments)


def test_where_content_has_a_form_the_model_may_call_instead(api: openai.OpenAI) -> None:
    schema = {
        "type": "object",
        "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 9}},
        "required": ["n"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
    fields: dict[str, Any] = {"model": MODEL, "tools": [STRICT], "response_format": form, "temperature": 0}
    fields |= {"parallel_tool_calls": False, "max_completion_tokens": 300}
    said = api.chat.completions.create(messages=asking("number"), **fields).choices[0]
    assert (said.finish_reason, said.message.content) == ("stop", '{"n":7}')
    made = api.chat.completions.create(messages=asking("atlantis"), **fields).choices[0]
    assert made.message.content is None and made.message.tool_calls is not None
    [call] = made.message.tool_calls
    assert call.type == "function"
    assert json.loads(call.function.arguments)["city"] in ("Paris", "Rome")


@pytest.mark.parametrize("form", [{"type": "json_object"}, {"type": "json_schema", "json_schema": {"name": "n"}}])
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
def test_a_form_of_content_does_not_keep_a_call_from_being_forced(api: openai.OpenAI, choice: Any, form: Any) -> None:
    fields: dict[str, Any] = {"model": MODEL, "messages": asking("number"), "tools": [STRICT], "temperature": 0}
    fields |= {"tool_choice": choice, "parallel_tool_calls": False, "max_completion_tokens": 300}
    alone = api.chat.completions.create(**fields).choices[0].message
    formed = api.chat.completions.create(**fields, response_format=form).choices[0].message
    assert formed.content is None and formed.tool_calls is not None and alone.tool_calls is not None
    assert formed.tool_calls[0].to_dict()["function"] == alone.tool_calls[0].to_dict()["function"]


@pytest.mark.parametrize("most", range(1, 40, 3))
def test_a_forced_call_that_is_cut_off_leaves_no_marker_as_content(api: openai.OpenAI, most: int) -> None:
    fields: dict[str, Any] = {"model": MODEL, "messages": asking("plain"), "tools": [STRICT], "temperature": 0}
    fields |= {"tool_choice": "required", "max_completion_tokens": most}
    whole = api.chat.completions.create(**fields).choices[0]
    assert whole.finish_reason == "length" and not whole.message.content
    deltas = [each.choices[0].delta for each in api.chat.completions.create(**fields, stream=True)]
    assert {each.content for each in deltas} == {None}  # an empty text would be a part of the answer for AI SDK
    assert any(each.tool_calls for each in deltas) == (whole.message.tool_calls is not None)


@pytest.mark.parametrize("mode", ["auto", "required"])
def test_only_tools_that_are_allowed_are_called(api: openai.OpenAI, http: httpx2.Client, mode: str) -> None:
    tides = {"type": "function", "function": {**STRICT["function"], "name": "tides"}}
    named = [{"type": "function", "function": {"name": "tides"}}]
    choice = {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": named}}
    fields: dict[str, Any] = {"model": MODEL, "tools": [STRICT, tides], "tool_choice": choice, "temperature": 0}
    fields |= {"parallel_tool_calls": False, "max_completion_tokens": 300}
    made = api.chat.completions.create(messages=asking("atlantis"), **fields).choices[0].message
    assert made.tool_calls is not None
    [call] = made.tool_calls
    assert call.type == "function" and call.function.name == "tides"
    assert json.loads(call.function.arguments)["city"] in ("Paris", "Rome")
    message = api.chat.completions.create(messages=asking("plain"), **fields).choices[0].message
    assert (message.content == "It rains: 3 < 4.") == (mode == "auto")
    prompt = http.post("/tokenize", json={"messages": asking("plain"), "tools": [STRICT, tides]}).json()
    answer = http.post("/v1/chat/completions", json=fields | {"messages": asking("plain")}).json()
    assert answer["usage"]["prompt_tokens"] == prompt["count"]  # the model sees all tools


def test_logprobs_are_of_all_tokens_also_of_those_of_calls(api: openai.OpenAI) -> None:
    fields: dict[str, Any] = {"model": MODEL, "messages": asking("call"), "tools": TOOLS, "logprobs": True}
    answer = api.chat.completions.create(**fields)
    assert answer.usage is not None
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None and logprobs.content is not None
    assert len(logprobs.content) == answer.usage.completion_tokens
    text = "".join(each.token for each in logprobs.content)
    assert text == "".join(ANSWERS[cue("call")]) + "</s>"
    streamed = [
        each
        for event in api.chat.completions.create(**fields, stream=True)
        if event.choices[0].logprobs is not None
        for each in event.choices[0].logprobs.content or ()
    ]
    assert streamed == logprobs.content


def test_variables_and_documents_reach_the_template(api: openai.OpenAI, http: httpx2.Client) -> None:
    fields: dict[str, Any] = {"documents": [{"text": "Read me."}], "chat_template_kwargs": {"say": "hello"}}
    message = api.chat.completions.create(model=MODEL, messages=asking("?"), extra_body=fields).choices[0].message
    assert message.content == "Hello, <b>you</b> there."
    body = {"messages": asking("?"), "tools": TOOLS, "chat_template_kwargs": {"documents": fields["documents"]}}
    tokens = http.post("/tokenize", json=body).json()["tokens"]
    prompt = http.post("/detokenize", json={"tokens": tokens}).json()["prompt"]
    assert prompt.startswith("tool weather") and prompt.endswith("Read me.※?※")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "tides"}}}, "tool_choice"),
        (
            {
                "tools": TOOLS,
                "tool_choice": {
                    "type": "allowed_tools",
                    "allowed_tools": {"mode": "auto", "tools": [{"type": "function", "function": {"name": "tides"}}]},
                },
            },
            "tool_choice",
        ),
        ({"tools": TOOLS, "tool_choice": "required", "structured_outputs": {"regex": "a"}}, "tool_choice"),
        (
            {
                "tools": [*TOOLS, {"type": "function", "function": {"name": "f", "parameters": {"type": "fish"}}}],
                "tool_choice": "required",
            },
            "tools[1].function.parameters",
        ),
        (
            {
                "tools": [
                    {"type": "function", "function": {"name": "f", "strict": True, "parameters": {"type": "fish"}}}
                ]
            },
            "tools[0].function.parameters",
        ),
        (
            {"tools": [STRICT], "response_format": {"type": "json_schema", "json_schema": FISHY}},
            "response_format.json_schema",
        ),
        ({"tools": [{"type": "custom", "function": {"name": "f"}}]}, "tools[0].type"),
        ({"tools": [{"type": "function", "function": {"name": ""}}]}, "tools[0].function.name"),
        ({"tools": [TOOLS[0]] * 129}, "tools"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"id": "x", "type": "function"}]}]}, None),
    ],
)
def test_fields_that_are_not_supported_are_refused_by_name(
    http: httpx2.Client, fields: dict[str, Any], param: str | None
) -> None:
    answer = http.post("/v1/chat/completions", json={"messages": asking("hello"), **fields})
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["param"] == (param or "messages[0].tool_calls[0].function")


@pytest.mark.parametrize("name", [name for name, spoken in SPOKEN.items() if not spoken.in_reasoning])
def test_every_format_is_parsed_over_the_wire(sdk: quire.Client, name: str) -> None:
    spoken = SPOKEN[name]
    names = spoken.format.tool_names or {name for name, _ in spoken.calls}
    tools = [{**TOOLS[0], "function": {**TOOLS[0]["function"], "name": each}} for each in sorted(names)]
    with sdk.stream_chat(asking(name), tools=tools, answer_format=spoken.format, temperature=0) as stream:
        chunks = list(stream)
        message = stream.completion().message
    assert message is not None
    assert (message.content, message.reasoning) == (spoken.content, spoken.reasoning)
    assert tuple((call.name, call.arguments) for call in message.tool_calls) == spoken.calls
    begun = [each.id for chunk in chunks for each in chunk.deltas if isinstance(each, quire.ToolCallBegun)]
    assert begun == [call.id for call in message.tool_calls]


def test_the_command_line_parts_an_answer_too(deployment: tuple[str, str], tmp_path: Path) -> None:
    tools = tmp_path / "tools.json"
    tools.write_text(json.dumps(TOOLS))
    result = CliRunner().invoke(app, ["chat", "-m", "call", "--tools", str(tools), "-a", deployment[0]])
    assert not result.exit_code, result.stderr
    assert (result.exit_code, result.stdout) == (0, f"Let me look.\nweather {ARGUMENTS}\n")
    assert "Which one?" in result.stderr


def test_without_a_format_a_chat_is_text_alone(sdk: quire.Client) -> None:
    completion = sdk.chat(asking("call"), tools=TOOLS)
    assert completion.message is None
    assert "weather" in completion.text and "<tool_call>" not in completion.text  # here they are special tokens
    assert json.loads(completion.text.split("look.")[1])["name"] == "weather"


def test_a_call_by_a_name_that_no_tool_can_have_comes_back(http: httpx2.Client) -> None:
    """Regression: what a model had called by itself was refused in the next turn, with its result."""
    name, say = "get weather", asking("plain")
    call = {"id": "c", "type": "function", "function": {"name": name, "arguments": '{"city": "Oslo"}'}}
    told: list[Any] = [{"role": "assistant", "content": "", "tool_calls": [call]}]
    told += [{"role": "tool", "tool_call_id": "c", "content": "no such tool"}]
    answer = http.post("/v1/chat/completions", json={"model": MODEL, "messages": [*asking("x"), *told, *say]})
    assert answer.status_code == 200

    told = [
        {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": name, "input": {"city": "Oslo"}}]}
    ]
    told += [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": "no such tool"}]}]
    body: dict[str, Any] = {"model": MODEL, "messages": [*asking("x"), *told, *say], "max_tokens": 300}
    assert http.post("/v1/messages", json=body).status_code == 200

    told = [{"type": "function_call", "call_id": "c", "name": name, "arguments": '{"city": "Oslo"}'}]
    told += [{"type": "function_call_output", "call_id": "c", "output": "no such tool"}]
    stored = http.post("/v1/responses", json={"model": MODEL, "input": [*asking("x"), *told, *say]})
    assert stored.status_code == 200
    items = http.get(f"/v1/responses/{stored.json()['id']}/input_items").json()["data"]
    [item] = [each["id"] for each in items if each["type"] == "function_call"]
    referred = [*asking("x"), {"type": "item_reference", "id": item}, told[1], *say]
    assert http.post("/v1/responses", json={"model": MODEL, "input": referred}).status_code == 200
