"""Messages of models that write calls and reasoning in each format, by Anthropic's own client.

The gateway is told another format than that of the model which recites the answers, and runs within the test.
"""

import json
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import anthropic
import pytest

import quire
from gateway_svc.anthropic.content import MessageContent, input_of
from gateway_svc.app import create_app
from quire.parsing.answer_format import AnswerFormat
from quire.parsing.answer_parser import AnswerParser, template_call_id
from tests.gateway.raw_http import served
from tests.gateway.reciter import MODEL, asking
from tests.gateway.test_message_tools import FLAT, blocks_of
from tests.patience import patient
from tests.quire.spoken_answers import FORMATS, SPOKEN, Spoken

WHOLE = [name for name, spoken in SPOKEN.items() if not spoken.in_reasoning]  # as the reciter's prompts are


class ToldClient(quire.AsyncClient):
    """A client whose server tells another format of its model's answers."""

    def __init__(self, address: str, format: AnswerFormat) -> None:
        super().__init__(address)
        self._format = format

    async def model(self) -> quire.Model:
        """The model, with the format."""
        tool_parser, reasoning_parser = self._format.tool_parser or "", self._format.reasoning_parser or ""
        return replace(await super().model(), tool_parser=tool_parser, reasoning_parser=reasoning_parser)


@pytest.fixture
async def claude(reciter: tuple[str, str], format: AnswerFormat) -> AsyncIterator[anthropic.AsyncAnthropic]:
    async with (
        ToldClient(reciter[0], format) as client,
        served(create_app(client, max_body_bytes=1 << 20)) as port,
        anthropic.AsyncAnthropic(
            base_url=f"http://127.0.0.1:{port}", api_key="none", max_retries=0, timeout=patient(60)
        ) as found,
    ):
        yield found


async def both(claude: anthropic.AsyncAnthropic, **fields: Any) -> list[anthropic.types.Message]:
    """The message, whole and of a stream."""
    given: dict[str, Any] = {"model": MODEL, "max_tokens": 200, "extra_body": {"temperature": 0}, **fields}
    async with claude.messages.stream(**given) as stream:
        return [await claude.messages.create(**given), await stream.get_final_message()]


def parts(blocks: list[dict[str, Any]]) -> tuple[str, str, list[tuple[str, Any]]]:
    """Text, reasoning, and names and inputs of calls."""
    return (
        "".join(each["text"] for each in blocks if each["type"] == "text"),
        "".join(each["thinking"] for each in blocks if each["type"] == "thinking"),
        [(each["name"], each["input"]) for each in blocks if each["type"] == "tool_use"],
    )


def meaning(spoken: Spoken) -> tuple[str, str, list[tuple[str, Any]]]:
    return spoken.content, spoken.reasoning, [(name, input_of(arguments)) for name, arguments in spoken.calls]


@pytest.mark.parametrize(("format", "name"), [(SPOKEN[name].format, name) for name in WHOLE], ids=WHOLE)
async def test_every_format_is_parsed_whole_and_as_events(claude: anthropic.AsyncAnthropic, name: str) -> None:
    spoken = SPOKEN[name]
    names = spoken.format.tool_names or {name for name, _ in spoken.calls}
    tools: dict[str, Any] = {"tools": [FLAT[0] | {"name": each} for each in sorted(names)]} if names else {}
    whole, streamed = await both(claude, messages=asking(name), **tools)
    assert blocks_of(whole) == blocks_of(streamed)
    assert parts(blocks_of(whole)) == meaning(spoken)
    assert whole.stop_reason == streamed.stop_reason == ("tool_use" if spoken.calls else "end_turn")


@pytest.mark.parametrize(
    ("format", "answer"),
    [
        (FORMATS["hermes"], "atlantis"),
        (FORMATS["llama3"], "hello"),
        (FORMATS["mistral"], "mistral: names"),
        (FORMATS["harmony"], "hello"),
        (FORMATS["deepseek"], "deepseek: names"),
    ],
    ids=FORMATS,
)
async def test_a_call_is_forced_in_every_format(claude: anthropic.AsyncAnthropic, answer: str) -> None:
    """The model would answer otherwise: it has another city, or no call at all."""
    schema = {"type": "object", "properties": {"city": {"enum": ["Rome"]}}, "required": ["city"]}
    tools = [{"name": "weather", "input_schema": schema | {"additionalProperties": False}, "strict": True}]
    choice = {"type": "any", "disable_parallel_tool_use": True}
    for message in await both(claude, messages=asking(answer), tools=tools, tool_choice=choice):
        calls = [each for each in blocks_of(message) if each["type"] == "tool_use"]
        assert [(each["name"], each["input"]) for each in calls] == [("weather", {"city": "Rome"})]
        assert message.stop_reason == "tool_use"


@pytest.mark.parametrize("format", [FORMATS["llama3"]])
@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize(
    ("answer", "form", "expected"),
    [
        ("number", {"n": {"type": "integer"}}, '{"n":7}'),
        ("llama3: a call", {"n": {"type": "integer"}}, [("weather", {"city": "Paris"})]),
        ("llama3: JSON that is no call", {"name": {"enum": ["Bob"]}}, '{"name":"Bob"}'),
    ],
)
async def test_llama3_calls_or_answers_json_of_a_form(
    claude: anthropic.AsyncAnthropic, answer: str, form: dict[str, Any], expected: Any, strict: bool
) -> None:
    """The model would write other arguments, and spaces in its JSON, where no grammar holds it."""
    closed = {"type": "object", "additionalProperties": False}
    arguments = closed | {"properties": {"city": {"enum": ["Paris"]}}, "required": ["city"]}
    tools = [{"name": "weather", "input_schema": arguments, "strict": strict}]
    config = {"format": {"type": "json_schema", "schema": closed | {"properties": form, "required": [*form]}}}
    use = {"tools": tools, "tool_choice": {"type": "auto", "disable_parallel_tool_use": True}}
    for message in await both(claude, messages=asking(answer), output_config=config, **use):
        text, _, calls = parts(blocks_of(message))
        if isinstance(expected, str):
            assert (text, calls) == (expected, [])
        else:
            assert text == "" and [name for name, _ in calls] == ["weather"]
            assert not strict or calls == expected


@pytest.mark.parametrize("format", [FORMATS["mistral"]])
async def test_mistrals_templates_see_ids_of_their_length_whatever_was_sent(
    claude: anthropic.AsyncAnthropic, reciter: tuple[str, str], format: AnswerFormat
) -> None:
    [whole, _] = await both(claude, messages=asking("mistral: a name without a mark"), tools=FLAT)
    [call] = [each for each in whole.content if each.type == "tool_use"]
    assert template_call_id(format, call.id) == call.id.removeprefix("toolu_")
    async with quire.AsyncClient(reciter[0]) as sdk:
        for sent in (call.id, "toolu_of_another_server"):
            used = {"type": "tool_use", "id": sent, "name": "weather", "input": {"city": "Rome"}}
            told = {"type": "tool_result", "tool_use_id": sent, "content": "hello"}
            messages: list[Any] = [{"role": "assistant", "content": [used]}, {"role": "user", "content": [told]}]
            counted = await claude.messages.count_tokens(model=MODEL, messages=messages)
            seen = template_call_id(format, sent)
            assert len(seen) == 9
            turns = [
                quire.ChatMessage("assistant", tool_calls=[quire.ToolCall(seen, "weather", '{"city": "Rome"}')]),
                quire.ChatMessage("tool", "hello", tool_call_id=seen, name="weather"),
            ]
            assert counted.input_tokens == len((await sdk.tokenize(turns)).token_ids)


@pytest.mark.parametrize("name", SPOKEN)
def test_blocks_do_not_depend_on_the_pieces_in_which_the_text_comes(name: str) -> None:
    spoken = SPOKEN[name]
    found = []
    for size in (1, 3, 7, len(spoken.text)):
        content = MessageContent(may_call_several=True, has_thinking=True, omits_thinking=False)
        parser = AnswerParser(spoken.format, "msg_1", in_reasoning=spoken.in_reasoning)
        events = []
        for start in range(0, len(spoken.text), size):
            events += content.add(parser.push(spoken.text[start : start + size]))
        events += content.add(parser.end()) + content.end()
        assert added_up(events) == content.blocks
        found.append(content.blocks)
    assert all(each == found[0] for each in found)
    assert parts(found[0]) == meaning(spoken)


def added_up(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The blocks of some events, each of which starts and stops once, in order."""
    blocks: list[dict[str, Any]] = []
    arguments: list[str] = []
    is_open = False
    for event in events:
        match event["type"], event.get("delta"):
            case "content_block_start", _:
                assert not is_open and event["index"] == len(blocks)
                blocks.append(dict(event["content_block"]))
                arguments.append("")
            case "content_block_delta", {"type": "input_json_delta", "partial_json": piece}:
                arguments[-1] += piece
            case "content_block_delta", {"type": "signature_delta", "signature": piece}:
                blocks[-1]["signature"] = piece
            case "content_block_delta", {"type": "thinking_delta", "thinking": piece}:
                blocks[-1]["thinking"] += piece
            case "content_block_delta", {"type": "text_delta", "text": piece}:
                blocks[-1]["text"] += piece
        is_open = event["type"] != "content_block_stop"
        assert event["index"] == len(blocks) - 1
    assert not is_open
    return [
        {**each, "input": input_of(text)} if each["type"] == "tool_use" else each
        for each, text in zip(blocks, arguments, strict=True)
    ]


@pytest.mark.parametrize(
    ("arguments", "found"),
    [
        ("", {}),
        ('{"a": 1', {"a": 1}),
        ('{"a": "x', {}),
        ('{"a": [1, {"b": tru', {"a": [1, {}]}),
        ('{"a": 1}', {"a": 1}),
        (f'{{"a": {10**40}}}', {"a": 10**40}),
        *((each, {"INVALID_JSON": each}) for each in ("[1]", '{"a": ]}', '{"a": NaN}', '{"a": 1e999}', '{"a": True}')),
    ],
)
def test_an_input_is_an_object_whatever_the_model_wrote(arguments: str, found: dict[str, Any]) -> None:
    assert input_of(arguments) == found
    assert json.loads(json.dumps(found)) == found
