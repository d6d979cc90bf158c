"""Answers in the formats of models, with what they mean, for tests of parsers and of those who use them."""

from dataclasses import dataclass

from quire.parsing.answer_format import AnswerFormat

HERMES = AnswerFormat(tool_parser="hermes", reasoning_parser="think")
LLAMA3 = AnswerFormat(tool_parser="llama3")
LLAMA3_WITH_TOOLS = LLAMA3.offering(["weather", "now"])
MISTRAL = AnswerFormat(tool_parser="mistral", reasoning_parser="mistral")
HARMONY = AnswerFormat(tool_parser="harmony", reasoning_parser="harmony")
DEEPSEEK = AnswerFormat(tool_parser="deepseek", reasoning_parser="think")
FORMATS = {str(each.tool_parser): each for each in (HERMES, LLAMA3, MISTRAL, HARMONY, DEEPSEEK)}


@dataclass(frozen=True, kw_only=True)
class Spoken:
    """An answer as a model writes it, and its meaning."""

    format: AnswerFormat
    text: str
    content: str = ""
    reasoning: str = ""
    calls: tuple[tuple[str, str], ...] = ()  # names and arguments
    in_reasoning: bool = False


PARIS = '{"city": "Paris", "tags": ["}", {"a": "\\"]"}]}'
OSLO = '{"city": "Oslo \\u00f8"}'

SPOKEN = {
    "hermes: reasoning, content, two calls": Spoken(
        format=HERMES,
        text=(
            "<think>\nWhich city?\n</think>\n\nI look.\n<tool_call>\n"
            f'{{"name": "weather", "arguments": {PARIS}}}\n</tool_call>\n<tool_call>\n'
            f'{{"name": "weather", "arguments": {OSLO}}}\n</tool_call>'
        ),
        reasoning="Which city?",
        content="I look.",
        calls=(("weather", PARIS), ("weather", OSLO)),
    ),
    "hermes: only content": Spoken(format=HERMES, text="4 < 5, <tool> it is.\n", content="4 < 5, <tool> it is.\n"),
    "hermes: the prompt opened the reasoning": Spoken(
        format=HERMES, text="Hm.\n</think>\n\nYes.", reasoning="Hm.", content="Yes.", in_reasoning=True
    ),
    "hermes: reasoning that was cut off": Spoken(format=HERMES, text="<think>\nWell, <", reasoning="Well, <"),
    "hermes: arguments first, as text, or missing": Spoken(
        format=HERMES,
        text=(
            '<tool_call>{"arguments": {"x": 1}, "name": "f"}</tool_call>'
            '<tool_call>{"name": "g", "arguments": "{\\"y\\": \\"\\ud83d\\ude00\\\\n\\"}"}</tool_call>'
            '<tool_call>{"id": 7, "name": "h"}</tool_call>'
        ),
        calls=(("f", '{"x": 1}'), ("g", '{"y": "😀\\n"}'), ("h", "{}")),
    ),
    "hermes: no closing tag, and a token that is dropped": Spoken(
        format=HERMES, text='<tool_call>{"name": "f", "arguments": {}}<|im_end|>\n', calls=(("f", "{}"),)
    ),
    "hermes: arguments that were cut off": Spoken(
        format=HERMES, text='<tool_call>\n{"name": "f", "arguments": {"city": "Par', calls=(("f", '{"city": "Par'),)
    ),
    "hermes: no call": Spoken(
        format=HERMES,
        text='Use <tool_call>{"nom": 1}</tool_call>\nor <tool_call>[]',
        content='Use <tool_call>{"nom": 1}</tool_call>\nor <tool_call>[]',
    ),
    "hermes: brackets that do not match": Spoken(
        format=HERMES,
        text='<tool_call>{"name": "f", "arguments": {"a": ]}}</tool_call>',
        content="]}}</tool_call>",
        calls=(("f", '{"a": '),),
    ),
    "hermes: words between calls": Spoken(
        format=HERMES,
        text='One: <tool_call>{"name": "f"}</tool_call>\nTwo: <tool_call>{"name": "g"}</tool_call>\n',
        content="One: Two:",
        calls=(("f", "{}"), ("g", "{}")),
    ),
    "llama3: a call": Spoken(
        format=LLAMA3, text=f'{{"name": "weather", "parameters": {PARIS}}}', calls=(("weather", PARIS),)
    ),
    "llama3: several behind the tag": Spoken(
        format=LLAMA3,
        text=f'<|python_tag|>{{"name": "f", "parameters": {OSLO}}}; {{"name": "g", "parameters": {{}}}}<|eom_id|>',
        calls=(("f", OSLO), ("g", "{}")),
    ),
    "llama3: words before the tag": Spoken(
        format=LLAMA3,
        text='Let me look. <|python_tag|>{"type": "function", "name": "f", "parameters": {"a": null}}',
        content="Let me look.",
        calls=(("f", '{"a": null}'),),
    ),
    "llama3: JSON that is no call": Spoken(
        format=LLAMA3, text='{"name": "Bob", "age": 3}', content='{"name": "Bob", "age": 3}'
    ),
    "llama3: a program": Spoken(
        format=LLAMA3, text="<|python_tag|>print({1: 2})", content="<|python_tag|>print({1: 2})"
    ),
    "mistral: a list": Spoken(
        format=MISTRAL,
        text=(
            "[THINK]Hm.[/THINK]I look. [TOOL_CALLS]"
            f'[{{"name": "f", "arguments": {PARIS}}}, {{"name": "g", "arguments": {{}}}}]'
        ),
        reasoning="Hm.",
        content="I look.",
        calls=(("f", PARIS), ("g", "{}")),
    ),
    "mistral: names": Spoken(
        format=MISTRAL,
        text=f"[TOOL_CALLS]f[ARGS]{PARIS}[TOOL_CALLS]g[CALL_ID]a1b2c3d4e[ARGS]{OSLO}",
        calls=(("f", PARIS), ("g", OSLO)),
    ),
    "mistral: a name without a mark": Spoken(format=MISTRAL, text='[TOOL_CALLS]f{"a": 1}', calls=(("f", '{"a": 1}'),)),
    "mistral: no call": Spoken(format=MISTRAL, text="[TOOL_CALLS] is a token.", content="[TOOL_CALLS] is a token."),
    "harmony: analysis, commentary, a call": Spoken(
        format=HARMONY,
        text=(
            "<|channel|>analysis<|message|>Which city?<|end|><|start|>assistant<|channel|>commentary<|message|>I look."
            "<|end|><|start|>assistant<|channel|>commentary to=functions.weather <|constrain|>json<|message|>"
            f"{PARIS}<|call|>"
        ),
        reasoning="Which city?",
        content="I look.",
        calls=(("weather", PARIS),),
    ),
    "harmony: the recipient first": Spoken(
        format=HARMONY,
        text=f" to=functions.weather<|channel|>commentary json<|message|>{OSLO}",
        calls=(("weather", OSLO),),
    ),
    "harmony: final": Spoken(
        format=HARMONY,
        text="<|channel|>analysis<|message|>Easy.<|end|><|start|>assistant<|channel|>final<|message|>Four.<|return|>",
        reasoning="Easy.",
        content="Four.",
    ),
    "harmony: no message": Spoken(format=HARMONY, text="Four, <|not|> five.", content="Four, <|not|> five."),
    "deepseek: blocks": Spoken(
        format=DEEPSEEK,
        text=(
            "Which city?\n</think>\n\nI look.\n"
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n"
            f"```json\n{PARIS}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n"
            f"{OSLO}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
        ),
        reasoning="Which city?",
        content="I look.",
        calls=(("weather", PARIS), ("weather", OSLO)),
        in_reasoning=True,
    ),
    "deepseek: names": Spoken(
        format=DEEPSEEK,
        text=(
            f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{PARIS}<｜tool▁call▁end｜>"
            f"<｜tool▁call▁begin｜>g<｜tool▁sep｜>{OSLO}<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
        ),
        calls=(("f", PARIS), ("g", OSLO)),
    ),
    "deepseek: no call": Spoken(
        format=DEEPSEEK, text="<｜tool▁call▁begin｜>what?", content="<｜tool▁call▁begin｜>what?"
    ),
    "llama3: JSON in the form of a call that names no tool": Spoken(
        format=LLAMA3_WITH_TOOLS,
        text=f'{{"name": "Bob", "parameters": {PARIS}}}',
        content=f'{{"name": "Bob", "parameters": {PARIS}}}',
    ),
    "llama3: such JSON with the arguments first, behind space": Spoken(
        format=LLAMA3_WITH_TOOLS,
        text='\n{"parameters": {"name": "weather"}, "name": "weather 2"} yes',
        content='\n{"parameters": {"name": "weather"}, "name": "weather 2"} yes',
    ),
    "llama3: a list and an object within": Spoken(
        format=LLAMA3_WITH_TOOLS,
        text='{"person": {"name": "weather", "parameters": {}}}',
        content='{"person": {"name": "weather", "parameters": {}}}',
    ),
    "llama3: a call by a name that is spelled with an escape": Spoken(
        format=LLAMA3_WITH_TOOLS,
        text=f'{{"n\\u0061me": "we\\u0061ther", "parameters": {PARIS}}}',
        calls=(("weather", PARIS),),
    ),
    "llama3: a call, and behind it what names no tool": Spoken(
        format=LLAMA3_WITH_TOOLS,
        text='{"name": "now", "parameters": {}}; {"name": "then", "parameters": {}}',
        content='; {"name": "then", "parameters": {}}',
        calls=(("now", "{}"),),
    ),
    "llama3: any name behind the tag": Spoken(
        format=LLAMA3_WITH_TOOLS,
        text='<|python_tag|>{"name": "then", "parameters": {}}',
        calls=(("then", "{}"),),
    ),
}
