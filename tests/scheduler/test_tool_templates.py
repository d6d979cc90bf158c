"""Chats with tools as the SDK sends them, rendered as transformers renders the same ones."""

import json
from typing import Any

import pytest

from quire.errors import InvalidRequestError
from quire.params import Chat, ChatMessage
from quire.parsing.answer_format import AnswerFormat
from quire.parsing.answer_parser import AnswerParser
from quire.parsing.deltas import ToolCall, parsed_answer
from quire.scheduler_settings import SchedulerSettings
from quire.wire_chat import chat_to_pb
from scheduler_svc.part_settings import parsers_given
from scheduler_svc.requests.params.chat_prompt import messages_of
from scheduler_svc.text.answer_format import answer_format_of
from scheduler_svc.text.chat_template import ChatTemplate
from tests.scheduler.text_tokenizers import SPECIAL_TOKENS, byte_level_json, theirs
from tests.scheduler.tool_templates import HERMES_LIKE, MISTRAL_LIKE, TEMPLATES, WITH_DOCUMENTS

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": 'Wetter für eine Stadt, z. B. "Köln" <b>',
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}, "unit": {"type": "string", "enum": ["C", "F"]}},
                "required": ["city"],
            },
        },
    }
]
ARGUMENTS = {"unit": "C", "city": "Köln <3"}
CALL = ToolCall("a1b2c3d4e", "weather", json.dumps(ARGUMENTS, ensure_ascii=False))
USER = ChatMessage("user", "Wie ist das Wetter?")
ASKED = ChatMessage("assistant", tool_calls=[CALL], reasoning="Which city?")
TOLD = ChatMessage("tool", '{"degrees": 21}', tool_call_id=CALL.id, name="weather")
CHATS: dict[str, list[ChatMessage]] = {
    "question": [ChatMessage("system", "Be brief."), USER],
    "called": [USER, ASKED, TOLD],
    "answered": [USER, ASKED, TOLD, ChatMessage("assistant", "21 °C."), ChatMessage("user", "And now?")],
}
VARIABLES: list[dict[str, Any]] = [
    {},
    {"enable_thinking": False, "thinking": False, "reasoning_effort": "high", "date_string": "1 May", "extra": "e"},
    {"documents": [{"title": "T", "text": "Ünicode"}], "eos_token": "<eos>"},
]


def as_transformers_gets_it(message: ChatMessage) -> dict[str, Any]:
    """The message as a user of transformers writes it."""
    made: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.name:
        made["name"] = message.name
    if message.tool_call_id:
        made["tool_call_id"] = message.tool_call_id
    if message.tool_calls:
        made["tool_calls"] = [
            {
                "id": each.id,
                "type": "function",
                "function": {"name": each.name, "arguments": json.loads(each.arguments)},
            }
            for each in message.tool_calls
        ]
    if message.reasoning:
        made["reasoning_content"] = message.reasoning
    return made


def rendered(source: str, chat: Chat, *, add_generation_prompt: bool = True) -> str:
    return render(ChatTemplate(source, SPECIAL_TOKENS), chat, add_generation_prompt=add_generation_prompt)


def render(template: ChatTemplate, chat: Chat, *, add_generation_prompt: bool) -> str:
    sent = chat_to_pb(chat)
    return template.render(
        messages_of(sent),
        add_generation_prompt=add_generation_prompt,
        tools=sent.tools,
        template_kwargs=sent.template_kwargs,
    )


@pytest.mark.parametrize("name", TEMPLATES)
def test_chats_with_tools_look_as_transformers_renders_them(name: str) -> None:
    tokenizer, template = theirs(byte_level_json(), TEMPLATES[name]), ChatTemplate(TEMPLATES[name], SPECIAL_TOKENS)
    for messages in CHATS.values():
        tools: Any
        for tools in (TOOLS, None):
            for variables in VARIABLES:
                for add_generation_prompt in (True, False):
                    expected = tokenizer.apply_chat_template(
                        [as_transformers_gets_it(each) for each in messages],
                        tools=tools,
                        add_generation_prompt=add_generation_prompt,
                        tokenize=False,
                        **variables,
                    )
                    chat = Chat(messages=messages, tools=tools, template_kwargs=variables)
                    assert render(template, chat, add_generation_prompt=add_generation_prompt) == expected


@pytest.mark.parametrize(
    ("name", "expected"),
    {
        "hermes": ("hermes", "think"),
        "llama3": ("llama3", None),
        "mistral": ("mistral", None),
        "harmony": ("harmony", "harmony"),
        "deepseek": ("deepseek", "think"),
        "documents": (None, None),
    }.items(),
)
def test_a_template_shows_how_its_model_answers(name: str, expected: tuple[str | None, str | None]) -> None:
    found = answer_format_of(TEMPLATES[name], {"<|python_tag|>"} if name == "llama3" else ())
    assert (found.tool_parser, found.reasoning_parser) == expected


def test_a_vocabulary_shows_reasoning_too_and_other_formats_are_not_taken_for_known_ones() -> None:
    assert answer_format_of("", {"<think>", "</think>"}) == AnswerFormat(reasoning_parser="think")
    assert answer_format_of("", {"[THINK]", "[/THINK]"}) == AnswerFormat(reasoning_parser="mistral")
    assert answer_format_of("{{ '<|python_tag|>' }}", ()).tool_parser == "llama3"
    assert answer_format_of("{{ '<tool_call>\n<function=' }}", ()).tool_parser is None


def test_settings_say_parsers_instead_of_what_was_found() -> None:
    assert parsers_given(SchedulerSettings()) == {}
    settings = SchedulerSettings(tool_parser="mistral", reasoning_parser="none")
    assert parsers_given(settings) == {"tool_parser": "mistral", "reasoning_parser": ""}


@pytest.mark.parametrize("name", ["hermes", "harmony", "deepseek"])
def test_a_parser_reads_back_what_the_template_writes_of_a_call(name: str) -> None:
    """Templates write an earlier answer as the model wrote it, behind the prompt for it."""
    chat = CHATS["called"][:2]
    before = rendered(TEMPLATES[name], Chat(messages=chat[:1], tools=TOOLS, template_kwargs={"thinking": False}))
    whole = rendered(TEMPLATES[name], Chat(messages=chat, tools=TOOLS), add_generation_prompt=False)
    answer = whole[len(before.removesuffix("</think>")) :]
    parser = AnswerParser(answer_format_of(TEMPLATES[name], ()), "request")
    [call] = parsed_answer([*parser.push(answer), *parser.end()]).tool_calls
    assert (call.name, json.loads(call.arguments)) == ("weather", ARGUMENTS)


def test_arguments_that_are_no_object_reach_the_template_as_the_model_wrote_them() -> None:
    cut_off = ChatMessage("assistant", tool_calls=[ToolCall("", "weather", '{"city": "Kö')])
    assert '"arguments": {"city": "Kö}' in rendered(HERMES_LIKE, Chat(messages=[USER, cut_off]))


def test_a_template_that_asks_for_no_content_gets_none_and_others_a_text() -> None:
    chat = Chat(messages=[ChatMessage("assistant", tool_calls=[CALL])])
    assert rendered("{{ messages[0].content is none }}", chat) == "True"
    assert rendered("{{ messages[0]['content'] is not none }}", chat) == "True"
    assert rendered("{{ messages[0]['content'] | trim }}", chat) == ""


def test_a_template_refuses_calls_in_its_own_words() -> None:
    with pytest.raises(InvalidRequestError, match="alphanumeric strings with length 9"):
        rendered(MISTRAL_LIKE, Chat(messages=[ChatMessage("assistant", tool_calls=[ToolCall("x", "f", "{}")])]))


@pytest.mark.parametrize(
    ("tools", "variables", "field", "said"),
    [
        ('{"a": 1}', "", "chat.tools", "not a JSON array of objects"),
        ("[1]", "", "chat.tools", "not a JSON array of objects"),
        ("[" * 100_000, "", "chat.tools", "not JSON"),
        ("nothing", "", "chat.tools", "not JSON"),
        ("", "[]", "chat.template_kwargs", "not a JSON object"),
        ("", '{"a": ', "chat.template_kwargs", "not JSON"),
        ("", '{"messages": []}', "chat.template_kwargs", "'messages'"),
        ("", '{"add_generation_prompt": false}', "chat.template_kwargs", "'add_generation_prompt'"),
    ],
)
def test_tools_and_variables_of_another_form_are_refused_by_field(
    tools: str, variables: str, field: str, said: str
) -> None:
    with pytest.raises(InvalidRequestError, match=said) as caught:
        ChatTemplate(WITH_DOCUMENTS, SPECIAL_TOKENS).render(
            [{"role": "user", "content": "Hi"}],
            add_generation_prompt=True,
            tools=tools,
            template_kwargs=variables,
        )
    assert [each.field for each in caught.value.violations] == [field]


def test_a_variable_may_have_any_name() -> None:
    variables = {"self": 1, "class": 2, "context": 3}
    chat = Chat(messages=[USER], template_kwargs=variables)
    assert rendered("{{ self }}{{ messages[0].role }}{{ context }}", chat).endswith("user3")
