"""Parsers of answers: what each format means, however its text is cut, and that nothing else is lost or raised."""

import json
import re
import tracemalloc
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import quire
from quire.parsing.answer_format import AnswerFormat, names_of_tools
from quire.parsing.answer_parser import AnswerParser
from quire.parsing.deltas import ArgumentsDelta, ContentDelta, Delta, ParsedAnswer, ToolCallBegun, parsed_answer
from quire.parsing.source import MAX_HELD_CHARS
from tests.quire.spoken_answers import FORMATS, HARMONY, HERMES, LLAMA3, LLAMA3_WITH_TOOLS, MISTRAL, SPOKEN, Spoken
from tests.services import ROOT

MARKERS = [
    *("<think>", "</think>", "<tool_call>", "</tool_call>", "[THINK]", "[/THINK]", "<|python_tag|>", "<|im_end|>"),
    *("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "<|channel|>", "analysis", "commentary to=functions.f", "final"),
    *(
        "<|message|>",
        "<|end|>",
        "<|start|>",
        "<|call|>",
        "assistant",
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁call▁begin｜>",
    ),
    *("<｜tool▁sep｜>", "```json\n", "```", "<｜tool▁call▁end｜>", '{"name": "f", ', '"arguments": ', '"parameters": '),
    *('{"name": "f", "arguments": {"a": 1}}', '{"name": "g", "parameters": {}}', "{}", "}", "[", "]", ",", ";", " "),
    *('"', "\\", '\\"', "\\ud83d", "\\ude00", "\n", "x", "é", "f", "<", "[TOOL", '"name"', ":"),
]
texts = st.lists(st.sampled_from(MARKERS), max_size=24).map("".join)
formats = st.sampled_from(
    [*FORMATS.values(), LLAMA3.offering("f"), *(each.without_calls() for each in FORMATS.values()), AnswerFormat()]
)


def deltas_of(format: AnswerFormat, pieces: list[str], *, in_reasoning: bool = False) -> list[Delta]:
    parser = AnswerParser(format, "request", in_reasoning=in_reasoning)
    return [*(delta for each in pieces for delta in parser.push(each)), *parser.end()]


def parsed(spoken: Spoken, pieces: list[str]) -> ParsedAnswer:
    return parsed_answer(deltas_of(spoken.format, pieces, in_reasoning=spoken.in_reasoning))


@pytest.mark.parametrize("name", SPOKEN)
@pytest.mark.parametrize("size", [1, 2, 3, 5, 16, 4096])
def test_an_answer_means_the_same_in_pieces_of_any_size(name: str, size: int) -> None:
    spoken = SPOKEN[name]
    answer = parsed(spoken, [spoken.text[i : i + size] for i in range(0, len(spoken.text), size)])
    assert (answer.content, answer.reasoning) == (spoken.content, spoken.reasoning)
    assert tuple((call.name, call.arguments) for call in answer.tool_calls) == spoken.calls


@given(formats, texts, st.lists(st.integers(0, 400)), st.booleans())
def test_any_text_in_any_pieces_is_the_whole_and_never_an_error(
    format: AnswerFormat, text: str, cuts: list[int], in_reasoning: bool
) -> None:
    places = sorted({0, len(text), *(each for each in cuts if each < len(text))})
    pieces = [text[begin:end] for begin, end in pairwise(places)]
    whole = parsed_answer(deltas_of(format, [text], in_reasoning=in_reasoning))
    assert parsed_answer(deltas_of(format, pieces, in_reasoning=in_reasoning)) == whole
    assert parsed_answer(deltas_of(format, list(text), in_reasoning=in_reasoning)) == whole


@pytest.mark.long
@pytest.mark.parametrize("name", [name for name, spoken in SPOKEN.items() if spoken.calls])
@given(texts)
@example("")
def test_calls_begin_in_order_and_arguments_follow_their_call(name: str, more: str) -> None:
    spoken = SPOKEN[name]
    num_begun = 0
    for each in deltas_of(spoken.format, list(spoken.text + more), in_reasoning=spoken.in_reasoning):
        if isinstance(each, ToolCallBegun):
            assert each.index == num_begun
            num_begun += 1
        elif isinstance(each, ArgumentsDelta):
            assert each.index == num_begun - 1
    assert num_begun == len(spoken.calls) or more


@given(st.sampled_from(sorted(FORMATS)), st.text(st.characters(exclude_categories=["Cs"])))
def test_text_without_markers_is_content(name: str, text: str) -> None:
    text = "A" + "".join(each for each in text if each not in "<[{")
    answer = parsed_answer(deltas_of(FORMATS[name], list(text)))
    assert answer == ParsedAnswer(content=text, reasoning="", tool_calls=())


@pytest.mark.parametrize("name", ["hermes: reasoning, content, two calls", "harmony: analysis, commentary, a call"])
def test_words_and_arguments_come_as_soon_as_they_are_certain(name: str) -> None:
    spoken = SPOKEN[name]
    parser = AnswerParser(spoken.format, "request")
    texts = []
    for char in spoken.text:
        texts += [each.text for each in parser.push(char) if hasattr(each, "text")]
    assert max(map(len, texts)) <= len("</think")  # what may begin a marker is held, and whitespace
    assert len(texts) > 40


def test_ids_of_calls_are_the_same_again_and_differ_by_request_sample_and_index() -> None:
    spoken = SPOKEN["hermes: reasoning, content, two calls"]
    found = []
    for request_id, sample in (("a", 0), ("a", 1), ("b", 0), ("a", 0)):
        parser = AnswerParser(HERMES, request_id, sample)
        answer = parsed_answer([*parser.push(spoken.text), *parser.end()])
        found.append(tuple(call.id for call in answer.tool_calls))
    assert found[3] == found[0]
    assert len({each for ids in found for each in ids}) == 6
    assert all(each.startswith("call_") for each in found[0])
    [call] = parsed(SPOKEN["mistral: a name without a mark"], ['[TOOL_CALLS]f{"a": 1}']).tool_calls
    assert len(call.id) == 9 and call.id.isalnum()  # its templates take no others


def test_only_tools_with_a_text_as_name_are_offered() -> None:
    given = [{"function": {"name": "f"}}, {"function": {}}, {"function": {"name": 5}}, {"function": None}, {}, 5, None]
    assert names_of_tools(given) == ["f"]


def test_without_tools_calls_are_content() -> None:
    text = '<tool_call>{"name": "f"}</tool_call>'
    assert parsed_answer(deltas_of(HERMES.without_calls(), [text])).content == text
    message = "<|channel|>commentary to=functions.f<|message|>{}"
    assert parsed_answer(deltas_of(HARMONY.without_calls(), [message])).content == "{}"


@pytest.mark.parametrize(
    ("format", "begun"),
    [
        (HERMES, '<tool_call>{"name": "'),
        (HERMES, "<tool_call>" + " " * 9),
        (HERMES, '<tool_call>{"arguments": "'),
        (LLAMA3, '{"a": "'),
        (MISTRAL, "[TOOL_CALLS]"),
        (HARMONY, ""),
    ],
)
def test_little_is_held_of_a_text_that_never_becomes_a_call(format: AnswerFormat, begun: str) -> None:
    parser = AnswerParser(format, "request")
    found = [*parser.push(begun)]
    filler = " \t" if begun.endswith(" ") else "ab"
    num_held = 0
    for _ in range(2 * MAX_HELD_CHARS // 64):
        found += parser.push(filler * 32)
        text = "".join(each.text for each in found if isinstance(each, ContentDelta))
        num_held = len(begun) + 64 * (_ + 1) - len(text)
        assert num_held <= MAX_HELD_CHARS + 4200
    found += parser.end()
    assert parsed_answer(found).content == begun + filler * (MAX_HELD_CHARS // 64 * 2 * 32)


def test_a_parser_keeps_nothing_of_what_it_gave() -> None:
    parser = AnswerParser(HERMES, "request")
    parser.push('<tool_call>{"name": "f", "arguments": {"text": "')
    tracemalloc.start()
    for _ in range(2000):
        parser.push("some words and more " * 10)
    assert tracemalloc.get_traced_memory()[0] < 20_000
    tracemalloc.stop()


def test_many_false_beginnings_cost_no_more_than_their_share() -> None:
    text = '<tool_call>{"name": "' * 4000
    assert parsed_answer(deltas_of(HERMES, [text])).content == text


def test_brackets_nested_beyond_reason_are_content() -> None:
    answer = parsed_answer(deltas_of(HERMES, ['<tool_call>{"name": "f", "arguments": ' + "[" * 100_000]))
    assert answer.tool_calls[0].arguments + answer.content == "[" * 100_000


def test_a_parser_of_a_later_version_leaves_the_text_as_it_is() -> None:
    format = AnswerFormat(tool_parser="klingon", reasoning_parser="telepathy")
    assert format.is_plain
    assert parsed_answer(deltas_of(format, ["<think> nuqneH "])).content == "<think> nuqneH "


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.text('a"{}\\', max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["name", "parameters", "a"]), inner),
    max_leaves=6,
)


@given(st.dictionaries(st.sampled_from(["name", "parameters", "arguments", "a"]), json_values, max_size=4))
def test_json_that_names_no_tool_is_content_as_it_is_and_with_a_tools_name_and_arguments_a_call(
    value: dict[str, object],
) -> None:
    text = json.dumps(value)
    answer = parsed_answer(deltas_of(LLAMA3_WITH_TOOLS, [text]))
    assert (answer.content, answer.tool_calls) == (text, ())
    if "parameters" in value or "arguments" in value:
        named = parsed_answer(deltas_of(LLAMA3_WITH_TOOLS, [json.dumps({**value, "name": "now"})]))
        assert [call.name for call in named.tool_calls] == ["now"]


class Calling:
    """A client whose model answers every chat with two calls."""

    def __enter__(self) -> "Calling":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def model(self) -> SimpleNamespace:
        return SimpleNamespace(answer_format=HERMES)

    def chat(self, messages: quire.Messages, **_: object) -> SimpleNamespace:
        calls = [quire.ToolCall(id, "weather", "{}") for id in ("1", "2")]
        return SimpleNamespace(message=quire.ChatMessage("assistant", tool_calls=calls))


def test_the_example_of_the_documentation_sends_an_answer_once_whatever_calls_it_has() -> None:
    """Regression: an answer with two calls was sent twice, which the model reads as four calls."""
    page = (ROOT / "docs/tools.md").read_text()
    example = re.search(r"```python\nimport quire\n(.*?)```", page, re.DOTALL)
    assert example is not None
    names: dict[str, Any] = {"quire": SimpleNamespace(ChatMessage=quire.ChatMessage, Client=Calling)}
    exec(example[1], names)
    assert [each.role for each in names["asked"]] == ["user", "assistant", "tool", "tool"]
    assert [each.tool_call_id for each in names["asked"]] == ["", "", "1", "2"]
