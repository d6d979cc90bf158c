"""Grammars that force calls: llguidance takes what the parsers read as calls of these tools, and nothing else."""

import json
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from quire.parsing.answer_format import AnswerFormat
from quire.parsing.answer_parser import AnswerParser
from quire.parsing.deltas import parsed_answer
from quire.parsing.tool_grammar import content_grammar, markers_of, tool_grammar
from tests.quire.spoken_answers import DEEPSEEK, FORMATS, HARMONY, HERMES, LLAMA3, LLAMA3_WITH_TOOLS, MISTRAL

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
                "required": ["city"],
                "additionalProperties": False,
            },
        },
    },
    {"type": "function", "function": {"name": "now"}},
]
PARIS, NOW = '{"city": "Pa\\"r}is", "days": 3}', "{}"
HARMONY_CALL = "<|channel|>commentary to=functions.weather <|constrain|>json<|message|>"
ONE = {
    "hermes": f'<tool_call>\n{{"name": "weather", "arguments": {PARIS}}}\n</tool_call>',
    "llama3": f'{{"name": "weather", "parameters": {PARIS}}}',
    "mistral": f'[TOOL_CALLS][{{"name": "weather", "arguments": {PARIS}}}]',
    "deepseek": (
        f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n{PARIS}\n```"
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
    ),
    "harmony": HARMONY_CALL + PARIS,
}
TWO = {
    "hermes": f'{ONE["hermes"]}\n<tool_call>\n{{"name": "now", "arguments": {NOW}}}\n</tool_call>',
    "llama3": f'{ONE["llama3"]}; {{"name": "now", "parameters": {NOW}}}',
    "mistral": f"[TOOL_CALLS]weather[ARGS]{PARIS}[TOOL_CALLS]now[ARGS]{NOW}",
    "deepseek": (
        f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>{PARIS}<｜tool▁call▁end｜>"
        f"<｜tool▁call▁begin｜>now<｜tool▁sep｜>{NOW}<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
    ),
}
THOUGHTS = {
    "hermes": "<think>\nHm, <x>.\n</think>\n\n",
    "mistral": "[THINK]Hm.[/THINK]",
    "deepseek": "<think>\nHm.\n</think>\n\n",
    "harmony": "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant",
}
BYTES = LLTokenizer("byte")  # a token for each byte: no marker is one


def takes(grammar: str, text: str) -> bool:
    """True if the text is a whole output of the grammar."""
    matcher = LLMatcher(BYTES, json.dumps({"grammars": [{"lark_grammar": grammar}]}), log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    return matcher.consume_tokens(BYTES.tokenize_str(text)) and matcher.is_accepting()


def grammar_for(format: AnswerFormat, *, max_calls: int | None = None, in_reasoning: bool = False) -> str:
    return tool_grammar(format, TOOLS, max_calls=max_calls, token_ids={}, in_reasoning=in_reasoning)


@pytest.mark.parametrize("name", FORMATS)
def test_calls_of_the_tools_are_taken_and_parsed(name: str) -> None:
    format = FORMATS[name]
    for text, names in ((ONE[name], ["weather"]), (TWO.get(name, ONE[name]), ["weather", "now"])):
        assert takes(grammar_for(format), text)
        assert takes(grammar_for(format), THOUGHTS.get(name, "") + text)
        parser = AnswerParser(format, "request")
        answer = parsed_answer([*parser.push(text), *parser.end()])
        assert [call.name for call in answer.tool_calls] == names[: len(answer.tool_calls)]
        assert answer.tool_calls[0].arguments == PARIS and not answer.content


_A = {"properties": {"a": {"const": 1}}, "required": ["a"]}


@pytest.mark.parametrize(
    "schema",
    [
        _A,
        {"anyOf": [_A, {"properties": {"a": {"type": "string"}}}]},
        {"type": ["object", "null"], **_A},
        {"$ref": "#/$defs/a", "$defs": {"a": _A}},
        {"enum": [{"a": 1}, 3]},
        {"description": "Anything."},
    ],
)
@pytest.mark.parametrize("content", [None, {"type": "object"}])
def test_arguments_are_an_object_also_where_the_schema_does_not_say_so(
    schema: dict[str, Any], content: dict[str, Any] | None
) -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": schema, "strict": True}}]
    grammar = tool_grammar(LLAMA3, tools, max_calls=1, token_ids={}, is_forced=content is None, content=content)
    space = " " if content is None else ""
    assert takes(grammar, f'{{"name":{space}"f",{space}"parameters":{space}{{"a":{space}1}}}}')
    if content is None:
        for other in ("1", "true", "null", '"x"', "[]", "3"):
            assert not takes(grammar, f'{{"name": "f", "parameters": {other}}}')


@pytest.mark.parametrize("schema", [{"type": "string"}, {"type": ["array", "null"]}, {"const": 5}, {"type": "fish"}])
def test_a_schema_of_no_object_cannot_be_used(schema: dict[str, Any]) -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
    grammar = tool_grammar(HERMES, tools, max_calls=1, token_ids={})
    matcher = LLMatcher(BYTES, json.dumps({"grammars": [{"lark_grammar": grammar}]}), log_level=0)
    assert "failed to compile JSON schema: " in matcher.get_error()


@pytest.mark.parametrize("name", FORMATS)
def test_anything_else_is_not_taken(name: str) -> None:
    grammar = grammar_for(FORMATS[name])
    wrong = [
        "",
        "Hello.",
        f"Hello. {ONE[name]}",
        f"{ONE[name]} Bye.",
        ONE[name].replace("weather", "whether"),
        ONE[name].replace('"days": 3', '"days": "3"'),
        ONE[name].replace('"days": 3', '"weeks": 3'),
        ONE[name].replace(PARIS, '{"days": 3}'),
        ONE[name].replace(PARIS, "{}"),
    ]
    for text in wrong:
        assert not takes(grammar, text), text


@pytest.mark.parametrize("name", TWO)
def test_several_calls_are_taken_up_to_their_bound(name: str) -> None:
    grammar, call = (
        grammar_for(FORMATS[name], max_calls=3),
        {"llama3": ONE["llama3"], "hermes": ONE["hermes"]}.get(name),
    )
    assert takes(grammar, TWO[name])
    if call is not None:
        separator = {"llama3": "; ", "hermes": "\n"}[name]
        assert takes(grammar, separator.join([call] * 3)) and not takes(grammar, separator.join([call] * 4))


@pytest.mark.parametrize("name", TWO)
def test_several_calls_are_taken_only_where_they_may_come(name: str) -> None:
    assert not takes(grammar_for(FORMATS[name], max_calls=1), TWO[name])
    assert takes(grammar_for(FORMATS[name], max_calls=1), ONE[name])


def test_reasoning_that_the_prompt_opened_is_closed_before_the_calls() -> None:
    grammar = grammar_for(HERMES, in_reasoning=True)
    assert takes(grammar, f"Hm.\n</think>\n\n{ONE['hermes']}")
    assert not takes(grammar, ONE["hermes"])


@pytest.mark.parametrize("format", [HERMES, MISTRAL, HARMONY, DEEPSEEK, LLAMA3])
def test_markers_that_are_tokens_are_taken_as_such(format: AnswerFormat) -> None:
    markers = markers_of(format)
    grammar = tool_grammar(format, TOOLS, max_calls=None, token_ids={each: i for i, each in enumerate(markers)})
    assert all(f"<[{i}]>" in grammar for i in range(len(markers)))
    matcher = LLMatcher(BYTES, json.dumps({"grammars": [{"lark_grammar": grammar}]}), log_level=0)
    assert not matcher.is_error(), matcher.get_error()


@pytest.mark.parametrize("special", [True, False])
@pytest.mark.parametrize("as_token", [True, False])
def test_reasoning_is_closed_by_a_token_or_by_letters(special: bool, as_token: bool) -> None:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE({each: i for i, each in enumerate(alphabet)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(["</s>"])
    made.add_tokens([AddedToken("</think>", special=special, normalized=False)])
    eos, closing = made.token_to_id("</s>"), made.token_to_id("</think>")
    assert eos is not None and closing is not None
    tokenizer = LLTokenizer(made.to_str(), n_vocab=made.get_vocab_size(), eos_token=[eos])
    grammar = tool_grammar(HERMES, TOOLS, max_calls=1, token_ids={"</think>": closing}, in_reasoning=True)
    matcher = LLMatcher(tokenizer, json.dumps({"grammars": [{"lark_grammar": grammar}]}), log_level=0)

    def letters(text: str) -> list[int]:
        return [alphabet.index(each) for each in text.replace("\n", "Ċ").replace(" ", "Ġ")]

    answer = [*letters("Hm. "), *([closing] if as_token else letters("</think>")), *letters(f"\n{ONE['hermes']}")]
    assert matcher.consume_tokens(answer) and matcher.is_accepting()


STRICT_TOOLS = [{**TOOLS[0], "function": {**TOOLS[0]["function"], "strict": True}}, TOOLS[1]]
FINAL = {"harmony": "<|channel|>final<|message|>"}  # before content
FORM = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}


def free_grammar(format: AnswerFormat, *, max_calls: int | None = None, content: dict[str, Any] | None = None) -> str:
    return tool_grammar(format, STRICT_TOOLS, max_calls=max_calls, token_ids={}, is_forced=False, content=content)


@pytest.mark.parametrize("name", FORMATS)
def test_where_no_call_is_forced_text_is_taken_as_well(name: str) -> None:
    grammar, thought, final = free_grammar(FORMATS[name]), THOUGHTS.get(name, ""), FINAL.get(name, "")
    for text in (ONE[name], TWO.get(name, ONE[name]), thought + ONE[name]):
        assert takes(grammar, text), text
    for text in ("Hello, a < b.\n", "", "Say <tool_cal", "[TOOL: x]"):
        assert takes(grammar, final + text) and takes(grammar, thought + final + text), text
    if name not in ("llama3", "harmony"):  # whose calls stand at the beginning, or in messages of their own
        assert takes(grammar, f"Let me see. {ONE[name]}")


@pytest.mark.parametrize("name", FORMATS)
def test_calls_that_are_not_strict_have_any_object(name: str) -> None:
    grammar = free_grammar(FORMATS[name])
    now = ONE[name].replace("weather", "now")
    assert takes(grammar, now) and takes(grammar, now.replace(PARIS, "{}"))
    assert not takes(grammar, now.replace(PARIS, "[1]"))


@pytest.mark.parametrize("name", FORMATS)
def test_what_the_parser_would_take_for_another_call_is_no_text(name: str) -> None:
    grammar, final = free_grammar(FORMATS[name]), FINAL.get(name, "")
    wrong = [
        ONE[name].replace("weather", "whether"),
        ONE[name].replace('"days": 3', '"days": "3"'),
        ONE[name].replace(PARIS, "{}"),
        f"{ONE[name]} Bye.",
    ]
    for text in wrong:
        assert not takes(grammar, text), text
    if not final and name != "llama3":
        assert not takes(grammar, f"Let me see. {wrong[0]}")


@pytest.mark.parametrize("name", FORMATS)
def test_content_of_a_form_stands_in_the_place_of_calls(name: str) -> None:
    grammar = free_grammar(FORMATS[name], content=FORM)
    thought, final = THOUGHTS.get(name, ""), FINAL.get(name, "")
    assert takes(grammar, ONE[name]) and takes(grammar, thought + ONE[name])
    assert takes(grammar, final + '{"a":1}') and takes(grammar, thought + final + '{"a":1}')
    for text in ("", "Hello.", '{"a":"1"}', '{"a":1}' + ONE[name], '{"a": 1}'):
        assert not takes(grammar, final + text), text


@pytest.mark.parametrize("format", [HERMES.without_calls(), MISTRAL.without_calls()])
def test_content_of_a_form_comes_behind_reasoning_that_the_prompt_opened(format: AnswerFormat) -> None:
    [closing, _] = markers_of(format)
    grammar = content_grammar(format, FORM, token_ids={})
    assert takes(grammar, f'Hm, {{"b":2}}.\n{closing}\n\n{{"a":1}}')
    for text in ('{"a":1}', f"{closing}", f'Hm.{closing}{{"a":"1"}}', f'Hm.{closing}{{"a":1}} So.'):
        assert not takes(grammar, text), text
    assert "<[7]>" in content_grammar(format, FORM, token_ids={closing: 7})


def test_text_before_calls_ends_with_the_marker_as_a_token_or_in_letters() -> None:
    grammar = tool_grammar(HERMES, STRICT_TOOLS, max_calls=None, token_ids={"<tool_call>": 7}, is_forced=False)
    assert "opened: found | PLAIN? <[7]>" in grammar
    matcher = LLMatcher(BYTES, json.dumps({"grammars": [{"lark_grammar": grammar}]}), log_level=0)
    assert not matcher.is_error(), matcher.get_error()


def test_llama3s_text_may_be_json_that_names_no_tool() -> None:
    grammar = free_grammar(LLAMA3_WITH_TOOLS)
    for text in (
        '{"name": "Bob", "parameters": {"a": 1}}',
        '{"a": [1, {"b": "weather"}]}',
        " {",
        '{"name": "weather 2"}',
    ):
        assert takes(grammar, text), text
        parser = AnswerParser(LLAMA3_WITH_TOOLS, "request")
        assert not parsed_answer([*parser.push(text), *parser.end()]).tool_calls
    assert takes(grammar, ONE["llama3"])
    wrong = ONE["llama3"].replace('"days": 3', '"days": "3"')
    for text in (wrong, wrong.replace("name", "n\\u0061me"), f" {wrong}", f'{{"a": 1, {wrong[1:]}'):
        assert not takes(grammar, text), text


def test_llama3s_calls_beside_a_form_have_arguments_with_definitions_and_the_form_may_have_a_name() -> None:
    parameters = {"type": "object", "properties": {"a": {"$ref": "#/$defs/n"}}, "required": ["a"]}
    defined = {**parameters, "additionalProperties": False, "$defs": {"n": {"type": "integer"}}}
    tools = [{"type": "function", "function": {"name": "weather", "strict": True, "parameters": defined}}]
    form = {**FORM, "properties": {"name": {"type": "string"}}, "required": ["name"]}
    for content, other in ((form, '{"name":"weather"}'), ({"type": "object"}, '{"b":[{}]}')):
        grammar = tool_grammar(LLAMA3_WITH_TOOLS, tools, max_calls=2, token_ids={}, is_forced=False, content=content)
        call = '{"name": "weather", "parameters": {"a": 1}}'
        for text in (call, f"{call}; {call}", other):
            assert takes(grammar, text), text
        for text in (call.replace("1", '"1"'), f"{call}; {call}; {call}", f"{call}; {other}", "x"):
            assert not takes(grammar, text), text
