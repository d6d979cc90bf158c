"""Tools and thinking of `/v1/messages` by Anthropic's own client, of a model that recites answers in its format."""

import json
import uuid
from typing import Any

import anthropic
import httpx2
import pytest

import quire
from tests.gateway.reciter import ANSWERS, ARGUMENTS, MODEL, TOOLS, asking
from tests.gateway.reciting_model import cue
from tests.gateway.test_messages import events_of

SCHEMA: dict[str, Any] = TOOLS[0]["function"]["parameters"]
FLAT: list[Any] = [{"name": "weather", "input_schema": SCHEMA}]
GREEDY: dict[str, Any] = {"model": MODEL, "max_tokens": 300, "extra_body": {"temperature": 0}}
CALL: dict[str, Any] = {"messages": asking("call"), "tools": FLAT, **GREEDY}
RAW: dict[str, Any] = {"messages": asking("call"), "tools": FLAT, "max_tokens": 300, "temperature": 0}
ENABLED: dict[str, Any] = {"type": "enabled", "budget_tokens": 1024}
PARIS = json.loads(ARGUMENTS)


@pytest.fixture(scope="module")
def deployment(reciter: tuple[str, str]) -> tuple[str, str]:
    """Addresses of the scheduler and of the gateway."""
    return reciter


def streamed(claude: anthropic.Anthropic, **fields: Any) -> anthropic.types.Message:
    """The message that Anthropic's client makes of a stream."""
    with claude.messages.stream(**fields) as stream:
        return stream.get_final_message()


def blocks_of(message: anthropic.types.Message) -> list[dict[str, Any]]:
    """Content without ids of calls, which differ between requests."""
    blocks = [each.to_dict() for each in message.content]
    return [{name: value for name, value in each.items() if name != "id"} for each in blocks]


def text(content: str) -> dict[str, Any]:
    return {"type": "text", "text": content}


def thinking(reasoning: str, signature: str) -> dict[str, Any]:
    return {"type": "thinking", "thinking": reasoning, "signature": signature}


def use(name: str, given: dict[str, Any]) -> dict[str, Any]:
    return {"type": "tool_use", "name": name, "input": given}


def result(tool_use_id: str, **fields: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": tool_use_id, **fields}


def prompt_of(claude: anthropic.Anthropic, sdk: quire.Client, chat: quire.Chat, **fields: Any) -> str:
    """The prompt of a chat, which has as many tokens as Anthropic's count of the fields."""
    tokens = sdk.tokenize(chat).token_ids
    assert claude.messages.count_tokens(model=MODEL, **fields).input_tokens == len(tokens)
    return sdk.detokenize(tokens, keep_special_tokens=True)


def test_a_call_is_a_block_behind_thinking_and_text(claude: anthropic.Anthropic) -> None:
    message = claude.messages.create(**CALL)
    reasoning, words, call = message.content
    assert reasoning.type == "thinking" and (reasoning.thinking, bool(reasoning.signature)) == ("Which one?", True)
    assert words.type == "text" and words.text == "Let me look."
    assert call.type == "tool_use" and (call.name, call.input) == ("weather", PARIS)
    assert call.id.startswith("toolu_")
    assert (message.stop_reason, message.stop_sequence) == ("tool_use", None)
    again = streamed(claude, **CALL)
    assert blocks_of(again) == blocks_of(message)
    assert (again.stop_reason, again.usage.output_tokens) == ("tool_use", message.usage.output_tokens)


def test_events_come_in_anthropics_order_and_input_in_pieces(http: httpx2.Client) -> None:
    events = events_of(http, RAW)
    found = [
        (name.removeprefix("content_block_"), data.get("index"), (data.get("delta") or {}).get("type"))
        for name, data in events
    ]
    in_order = [each for place, each in enumerate(found) if place == 0 or each != found[place - 1]]
    assert in_order == [
        ("message_start", None, None),
        ("start", 0, None),
        ("ping", None, None),
        ("delta", 0, "thinking_delta"),
        ("delta", 0, "signature_delta"),
        ("stop", 0, None),
        ("start", 1, None),
        ("delta", 1, "text_delta"),
        ("stop", 1, None),
        ("start", 2, None),
        ("delta", 2, "input_json_delta"),
        ("stop", 2, None),
        ("message_delta", None, None),
        ("message_stop", None, None),
    ]
    starts = [data["content_block"] for name, data in events if name == "content_block_start"]
    call_id = starts[2].pop("id")
    assert starts == [thinking("", ""), text(""), use("weather", {})] and call_id.startswith("toolu_")
    pieces = [data["delta"]["partial_json"] for _, data in events if "partial_json" in data.get("delta", {})]
    assert "".join(pieces) == ARGUMENTS and len(pieces) > 2
    assert events[-2][1]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}


def test_a_retry_gets_the_same_ids_whole_or_as_events(claude: anthropic.Anthropic) -> None:
    fields = CALL | {"messages": asking("calls"), "extra_headers": {"Idempotency-Key": uuid.uuid4().hex}}
    messages = [claude.messages.create(**fields), streamed(claude, **fields), streamed(claude, **fields)]
    found = [(each.id, [block.to_dict() for block in each.content]) for each in messages]
    assert found[0] == found[1] == found[2]
    assert len({block["id"] for block in found[0][1]}) == 2


def test_a_stream_that_is_left_in_a_call_is_read_again_with_the_same_id(
    http: httpx2.Client, claude: anthropic.Anthropic
) -> None:
    key = {"idempotency-key": uuid.uuid4().hex}
    body = RAW | {"stream": True, "on_disconnect": "continue"}
    with http.stream("POST", "/v1/messages", json=body, headers=key) as answer:
        begun = next(line for line in answer.iter_lines() if '"tool_use"' in line)
    call_id = json.loads(begun.removeprefix("data: "))["content_block"]["id"]
    more = {"temperature": 0, "on_disconnect": "continue"}
    again = streamed(claude, **CALL | {"extra_body": more, "extra_headers": key})
    assert again.content[-1].to_dict() == {**use("weather", PARIS), "id": call_id}


def test_a_conversation_goes_on_with_results_over_several_turns(claude: anthropic.Anthropic, sdk: quire.Client) -> None:
    sent: list[Any] = asking("call")
    turns = [quire.ChatMessage("user", "call")]
    for told in ("call", "hello"):
        message = claude.messages.create(**CALL | {"messages": sent})
        call = message.content[-1]
        assert call.type == "tool_use"
        sent = [*sent, message.to_param(), {"role": "user", "content": [result(call.id, content=told)]}]
        calls = [quire.ToolCall(call.id, "weather", ARGUMENTS)]
        turns.append(quire.ChatMessage("assistant", "Let me look.", tool_calls=calls, reasoning="Which one?"))
        turns.append(quire.ChatMessage("tool", told, tool_call_id=call.id, name="weather"))
    seen = prompt_of(claude, sdk, quire.Chat(messages=turns, tools=TOOLS), messages=sent, tools=FLAT)
    assert seen.startswith('tool weather {"type": "object"')
    assert seen.count("<think>Which one?</think><tool_call>weather Paris</tool_call>") == 2
    assert f"tool: hello answers {turns[-1].tool_call_id}※hello※" in seen
    last = claude.messages.create(**CALL | {"messages": sent})
    assert blocks_of(last) == [text("Hello, <b>you</b> there.")] and last.stop_reason == "end_turn"
    usage = last.usage
    assert usage.input_tokens + (usage.cache_read_input_tokens or 0) == len(
        sdk.tokenize(quire.Chat(messages=turns, tools=TOOLS)).token_ids
    )


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"content": "hello"}, "hello"),
        ({"content": [text("hel"), {**text("lo"), "cache_control": {"type": "ephemeral"}}]}, "hel\nlo"),
        ({}, ""),
        ({"content": []}, ""),
        ({"content": "no such city", "is_error": True}, "Error: no such city"),
        ({"content": "Error: none", "is_error": True, "cache_control": {"type": "ephemeral"}}, "Error: none"),
        ({"is_error": True}, "Error"),
        ({"content": "fine", "is_error": False}, "fine"),
    ],
)
def test_the_model_sees_a_result_as_text(
    claude: anthropic.Anthropic, sdk: quire.Client, fields: dict[str, Any], told: str
) -> None:
    calls = [{**use("weather", {"city": "Rome"}), "id": each} for each in ("toolu_a", "toolu_b")]
    messages: list[Any] = [
        *asking("calls"),
        {"role": "assistant", "content": calls},
        {"role": "user", "content": [result("toolu_a", **fields), result("toolu_b", content="x"), text("hello")]},
    ]
    turns = [
        quire.ChatMessage("user", "calls"),
        quire.ChatMessage(
            "assistant",
            tool_calls=[quire.ToolCall(each, "weather", '{"city": "Rome"}') for each in ("toolu_a", "toolu_b")],
        ),
        quire.ChatMessage("tool", told, tool_call_id="toolu_a", name="weather"),
        quire.ChatMessage("tool", "x", tool_call_id="toolu_b", name="weather"),
        quire.ChatMessage("user", "hello"),
    ]
    seen = prompt_of(claude, sdk, quire.Chat(messages=turns, tools=TOOLS), messages=messages, tools=FLAT)
    assert f"\ntool: {told} answers toolu_a\ntool: x answers toolu_b\nuser: hello" in seen
    assert blocks_of(claude.messages.create(**CALL | {"messages": messages})) == [text("Hello, <b>you</b> there.")]


@pytest.mark.parametrize(
    ("choice", "names"),
    [
        (None, ["weather", "tides"]),
        ({"type": "auto"}, ["weather", "tides"]),
        ({"type": "auto", "disable_parallel_tool_use": False}, ["weather", "tides"]),
        ({"type": "auto", "disable_parallel_tool_use": True}, ["weather"]),
    ],
)
def test_several_calls_or_only_the_first(claude: anthropic.Anthropic, choice: Any, names: list[str]) -> None:
    fields = CALL | {"messages": asking("calls")} | ({} if choice is None else {"tool_choice": choice})
    for message in (claude.messages.create(**fields), streamed(claude, **fields)):
        assert [each["name"] for each in blocks_of(message)] == names
        assert message.stop_reason == "tool_use"


@pytest.mark.parametrize(
    "choice",
    [
        {"type": "any", "disable_parallel_tool_use": True},
        {"type": "tool", "name": "weather"},
        {"type": "tool", "name": "weather", "disable_parallel_tool_use": False},
    ],
)
@pytest.mark.parametrize("answer", ["atlantis", "call", None])
def test_a_call_is_forced_and_its_input_follows_the_schema(
    claude: anthropic.Anthropic, answer: str | None, choice: Any
) -> None:
    """The grammar keeps the model from going another way; its reasoning is its own, also where the prompt opens it."""
    properties = {"city": {"enum": ["Paris", "Rome"]}, "unit": {"enum": ["C", "F"]}}
    schema = {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}
    tools: list[Any] = [{"name": "tides", "input_schema": SCHEMA}] if choice["type"] == "tool" else []
    tools.append({"name": "weather", "strict": True, "input_schema": schema})
    fields = CALL | {"messages": asking(answer or "?"), "tools": tools, "tool_choice": choice}
    fields |= {} if answer else {"thinking": ENABLED}
    for message in (claude.messages.create(**fields), streamed(claude, **fields)):
        *reasoning, call = blocks_of(message)
        assert (call["type"], call["name"], message.stop_reason) == ("tool_use", "weather", "tool_use")
        assert call["input"]["city"] in ("Paris", "Rome") and call["input"]["unit"] in ("C", "F")
        expected = {"atlantis": [], "call": ["Which one?"], None: ["Hm: 2 + 2 it is."]}[answer]
        assert [each["thinking"] for each in reasoning] == expected


def test_a_form_of_content_does_not_keep_a_call_from_being_forced(claude: anthropic.Anthropic) -> None:
    city = {"city": {"enum": ["Paris", "Rome"]}}
    schema = {"type": "object", "properties": city, "required": ["city"], "additionalProperties": False}
    choice = {"type": "any", "disable_parallel_tool_use": True}
    form = {"format": {"type": "json_schema", "schema": {"type": "object"}}}
    fields = {"tools": [{"name": "weather", "input_schema": schema}], "tool_choice": choice, "output_config": form}
    *_, call = blocks_of(claude.messages.create(**CALL | {"messages": asking("plain")} | fields))
    assert call["type"] == "tool_use" and call["input"]["city"] in ("Paris", "Rome")


@pytest.mark.parametrize("most", [1, 5, 12])
def test_a_forced_call_that_is_cut_off_leaves_no_marker_as_text(claude: anthropic.Anthropic, most: int) -> None:
    fields = CALL | {"messages": asking("plain"), "tool_choice": {"type": "any"}, "max_tokens": most}
    for message in (claude.messages.create(**fields), streamed(claude, **fields)):
        assert message.stop_reason == "max_tokens"
        assert "text" not in [each.type for each in message.content]


@pytest.mark.parametrize("without", [{"tools": []}, {"tool_choice": {"type": "none"}}])
def test_without_tools_the_text_is_content(claude: anthropic.Anthropic, without: dict[str, Any]) -> None:
    message = claude.messages.create(**CALL | {"messages": asking("calls")} | without)
    assert blocks_of(message) == [text(ANSWERS[cue("calls")][0])] and message.stop_reason == "end_turn"


def test_text_that_is_no_call_is_content(claude: anthropic.Anthropic) -> None:
    message = claude.messages.create(**CALL | {"messages": asking("broken")})
    assert blocks_of(message) == [text(ANSWERS[cue("broken")][0])] and message.stop_reason == "end_turn"


def test_a_call_that_is_cut_off_has_the_input_so_far(claude: anthropic.Anthropic) -> None:
    cut = claude.messages.create(**CALL).usage.output_tokens - 4
    message = claude.messages.create(**CALL | {"max_tokens": cut})
    assert message.stop_reason == "max_tokens"
    assert blocks_of(message)[-1] == use("weather", {"city": "Paris"})
    again = streamed(claude, **CALL | {"max_tokens": cut})
    assert (blocks_of(again), again.stop_reason) == (blocks_of(message), "max_tokens")


def test_a_stop_sequence_within_a_call_ends_the_message(claude: anthropic.Anthropic) -> None:
    fields = CALL | {"stop_sequences": ['"unit"']}
    for message in (claude.messages.create(**fields), streamed(claude, **fields)):
        assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", '"unit"')
        assert blocks_of(message)[-1] == use("weather", {"city": "Paris"})


@pytest.mark.parametrize(
    ("last", "reason", "given"), [('"Paris"', "end_turn", {"city": "Paris"}), ("}\n", "tool_use", PARIS)]
)
def test_a_call_that_a_stop_token_cuts_off_is_not_to_be_made(
    claude: anthropic.Anthropic, sdk: quire.Client, last: str, reason: str, given: dict[str, Any]
) -> None:
    """Regression: it was told as a call to be made, with the part of its input that had come."""
    told = sdk.chat(asking("call"), tools=TOOLS, temperature=0, keep_special_tokens=True).samples[0].token_ids
    texts = [sdk.detokenize(told[: number + 1], keep_special_tokens=True) for number in range(len(told))]
    number = next(number for number, each in enumerate(texts) if last in each)  # the first token behind is the end
    extra = {"temperature": 0, "stop_token_ids": [told[number + 1]]}
    fields: dict[str, Any] = CALL | {"extra_body": extra}
    for message in (claude.messages.create(**fields), streamed(claude, **fields)):
        assert (message.stop_reason, message.stop_sequence) == (reason, None)
        assert blocks_of(message)[-1] == use("weather", given)


def test_anthropics_tool_runner_calls_a_function_and_goes_on(claude: anthropic.Anthropic) -> None:
    given: list[tuple[str, str]] = []

    @anthropic.beta_tool
    def weather(city: str, unit: str) -> str:
        """Tell the weather of a city."""
        given.append((city, unit))
        return "hello"

    fields: dict[str, Any] = {"messages": asking("call"), "tools": [weather], "model": MODEL, "max_tokens": 300}
    last = claude.beta.messages.tool_runner(**fields).until_done()
    for _ in claude.beta.messages.tool_runner(**fields, stream=True):
        pass
    assert given == [("Paris", "C")] * 2
    assert [each.to_dict() for each in last.content] == [text("Hello, <b>you</b> there.")]
