"""Grammars of answers with calls of tools, or JSON behind reasoning, for `lark` of a request; llguidance reads them.

A pure function of the format and the tools. Knows no tokenizer: the ids of markers that are tokens are given.
"""

import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from quire.parsing import deepseek, harmony, hermes, llama3, mistral
from quire.parsing.answer_format import AnswerFormat
from quire.parsing.nested_schema import nested
from quire.parsing.think_tags import TAGS

_STYLE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}  # of templates' tojson
_ANY_ARGUMENTS = {"type": "object"}
_COMPACT = {"whitespace_flexible": False, "item_separator": ",", "key_separator": ":"}  # of content
_TEXT = "/(?s:.*)/"
_SCHEMA_RULE = re.compile(r"(?:arguments|call)_(\d+)|content")
Schema = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class _CallForm:
    """Texts and markers around the parts of a call, and between and around several calls."""

    before: tuple[str, ...]  # the name
    between: tuple[str, ...]  # name and arguments
    after: tuple[str, ...] = ()
    separator: str | None = ""  # None: an answer has one call
    begin: tuple[str, ...] = ()
    end: tuple[str, ...] = ()
    is_marked: bool = True  # else what begins a call may begin other JSON

    @property
    def marker(self) -> str:
        """The text that begins the calls of an answer."""
        return (*self.begin, *self.before)[0]


_OBJECT, _OBJECT_ARGUMENTS = '{"name": "', '", "arguments": '
# By parser; of several forms the model takes the one that it knows.
_FORMS: dict[str, tuple[_CallForm, ...]] = {
    "hermes": (
        _CallForm(
            before=(hermes.BEGIN, f"\n{_OBJECT}"),
            between=(_OBJECT_ARGUMENTS,),
            after=("}\n", hermes.END),
            separator="\n",
        ),
    ),
    "llama3": (
        _CallForm(before=(_OBJECT,), between=('", "parameters": ',), after=("}",), separator="; ", is_marked=False),
    ),
    "mistral": (
        _CallForm(
            begin=(mistral.TOOL_CALLS, "["),
            before=(_OBJECT,),
            between=(_OBJECT_ARGUMENTS,),
            after=("}",),
            separator=", ",
            end=("]",),
        ),
        _CallForm(before=(mistral.TOOL_CALLS,), between=(mistral.ARGS,)),
    ),
    "deepseek": (
        _CallForm(
            begin=(deepseek.CALLS_BEGIN,),
            before=(deepseek.CALL_BEGIN, "function", deepseek.SEPARATOR),
            between=("\n```json\n",),
            after=("\n```", deepseek.CALL_END),
            separator="\n",
            end=(deepseek.CALLS_END,),
        ),
        _CallForm(
            begin=(deepseek.CALLS_BEGIN,),
            before=(deepseek.CALL_BEGIN,),
            between=(deepseek.SEPARATOR,),
            after=(deepseek.CALL_END,),
            end=(deepseek.CALLS_END,),
        ),
    ),
    "harmony": (
        _CallForm(
            before=(harmony.CHANNEL, "commentary to=functions."),
            between=(" ", harmony.CONSTRAIN, "json", harmony.MESSAGE),
            separator=None,
        ),
    ),
}
_ANALYSIS = (harmony.CHANNEL, "analysis", harmony.MESSAGE), (harmony.ENDS[0], harmony.START, "assistant")
_FINAL = (harmony.CHANNEL, "final", harmony.MESSAGE)
_PYTHON_TAG = rf"/(?s:.*){re.escape(llama3.PYTHON_TAG)}(?s:.*)/"


def markers_of(format: AnswerFormat) -> tuple[str, ...]:
    """Texts of which the grammars need the ids, where they are tokens."""
    forms = _FORMS.get(format.tool_parser or "", ())
    of_calls = {part for form in forms for part in (*form.begin, *form.before, *form.between, *form.after, *form.end)}
    of_reasoning = {part for parts in _reasoning_of(format) or () for part in parts}
    return tuple(sorted(each for each in of_calls | of_reasoning if each[0] in "<["))


def tool_grammar(
    format: AnswerFormat,
    tools: Sequence[Mapping[str, Any]],
    *,
    max_calls: int | None,
    token_ids: Mapping[str, int],
    in_reasoning: bool = False,
    is_forced: bool = True,
    content: Schema | None = None,
) -> str:
    """Grammar of an answer with calls of these tools, after reasoning if the model likes.

    Args:
        format: with a known tool parser.
        tools: one or more, in OpenAI's form. Arguments follow their schemas; where no call is forced, those of strict
            tools do, and others are any objects.
        max_calls: most calls that come; None: any number.
        token_ids: of the markers that are tokens.
        in_reasoning: the prompt ends within reasoning.
        is_forced: some call comes, and nothing else. Otherwise the answer may be text, also before its calls.
        content: JSON schema of such text, which then has no calls behind it; None: any text.
    """
    writer = _Writer(token_ids)
    functions = [each["function"] for each in tools]
    if not is_forced:
        functions = [each if each.get("strict") else {**each, "parameters": None} for each in functions]
    takes_text = not is_forced and content is None and format.tool_parser not in ("llama3", "harmony")
    kinds = [
        writer.json_calls(form, functions, max_calls=max_calls)
        if content is not None and not form.is_marked
        else writer.calls(form, functions, max_calls=max_calls, after_text=takes_text)
        for form in _FORMS[format.tool_parser or ""]
    ]
    if not is_forced:
        kinds.append(writer.content(format, content))
    reasoning = writer.reasoning(_reasoning_of(format), is_open=in_reasoning)
    rules = [f"arguments_{i}: %json {_schema(each)}" for i, each in enumerate(functions)]
    return "\n".join([f"start: {reasoning}({' | '.join(kinds)})", *writer.rules, *rules])


def content_grammar(format: AnswerFormat, content: Schema, *, token_ids: Mapping[str, int]) -> str:
    """Grammar of content of a JSON schema behind reasoning that the prompt has opened, without a call.

    Args:
        format: with a known reasoning parser.
        content: the JSON schema.
        token_ids: of the markers that are tokens.
    """
    writer = _Writer(token_ids)
    reasoning = writer.reasoning(_reasoning_of(format), is_open=True)
    return "\n".join([f"start: {reasoning}{writer.content(format, content)}", *writer.rules])


def schema_of_rule(name: str) -> int | Literal["content"] | None:
    """Owner of the schema that a rule of a grammar has: a tool, by its number, or the content; None: it has none."""
    found = _SCHEMA_RULE.fullmatch(name)
    return None if found is None else int(found[1]) if found[1] else "content"


def _reasoning_of(format: AnswerFormat) -> tuple[tuple[str, ...], tuple[str, ...]] | None:
    """Parts before reasoning and behind it; None for a format without."""
    if format.tool_parser == "harmony":
        return _ANALYSIS
    tags = TAGS.get(format.reasoning_parser or "")
    return None if tags is None else ((tags[0],), (tags[1],))


def _schema(function: Mapping[str, Any]) -> str:
    return json.dumps({**_of_arguments(function), "x-guidance": _STYLE}, ensure_ascii=False)


def _of_arguments(function: Mapping[str, Any]) -> Schema:
    """Schema of a function's arguments, which are an object also where the function's own schema does not say so."""
    given = function.get("parameters") or _ANY_ARGUMENTS
    kinds = given.get("type", "object")
    if kinds == "object" or (isinstance(kinds, list) and "object" in kinds):
        return {**given, "type": "object"}
    return {"allOf": [given, _ANY_ARGUMENTS]}  # which cannot be met, or read, and is refused for that


def _call_schema(function: Mapping[str, Any]) -> str:
    """Schema of a call of LLaMA 3 as a whole, within which that of the arguments means the same as alone."""
    head, arguments = nested(_of_arguments(function), "/properties/parameters")
    named = {"name": {"const": function["name"]}, "parameters": arguments}
    whole = {"type": "object", "properties": named, "required": [*named], "additionalProperties": False}
    return json.dumps({**head, **whole, "x-guidance": _STYLE}, ensure_ascii=False)


def _llama3_text(names: Collection[str] | None) -> str:
    """Text that the parser does not take for a call: it has no marker, and is no JSON that may name a tool.

    A name may be spelled with escapes, which are left out, too.
    """
    if names is None:
        return rf"{_TEXT} & ~/\s*\{{(?s:.*)/ & ~{_PYTHON_TAG}"
    named = "|".join(map(re.escape, sorted(names)))
    return rf'{_TEXT} & ~/\s*\{{(?s:.*)"name"\s*:\s*"({named})"(?s:.*)/ & ~/\s*\{{(?s:.*)\\u(?s:.*)/ & ~{_PYTHON_TAG}'


class _Writer:
    """Writes the expressions of one grammar, and the rules that they need."""

    def __init__(self, token_ids: Mapping[str, int]) -> None:
        self._token_ids = token_ids
        self.rules: list[str] = []

    def calls(
        self,
        form: _CallForm,
        functions: Sequence[Mapping[str, Any]],
        *,
        max_calls: int | None,
        after_text: bool = False,
    ) -> str:
        if not form.is_marked:
            one = self._one_of(form.before, form, functions)
            return f"({one}){self._more(form, one, max_calls)}"
        opening = self._text_until(form.marker) if after_text else self._part(form.marker)
        first = self._one_of(form.before if form.begin else form.before[1:], form, functions)
        more = self._more(form, self._one_of(form.before, form, functions), max_calls)
        return f"{opening} {self._sequence(*form.begin[1:])} ({first}){more} {self._sequence(*form.end)}"

    def json_calls(self, form: _CallForm, functions: Sequence[Mapping[str, Any]], *, max_calls: int | None) -> str:
        """Calls where the answer may be other JSON: as JSON, too, since no text tells them apart at once."""
        self.rules += [f"call_{i}: %json {_call_schema(each)}" for i, each in enumerate(functions)]
        one = " | ".join(f"call_{i}" for i in range(len(functions)))
        return f"({one}){self._more(form, one, max_calls)}"

    def _more(self, form: _CallForm, one: str, max_calls: int | None) -> str:
        """Further calls behind the first."""
        if max_calls == 1 or form.separator is None:
            return ""
        times = "*" if max_calls is None else f"{{0,{max_calls - 1}}}"
        return f" ({self._sequence(form.separator)} ({one})){times}"

    def content(self, format: AnswerFormat, schema: Schema | None) -> str:
        """Text of an answer without a call, whether or not it has a schema."""
        before = self._sequence(*_FINAL) if format.tool_parser == "harmony" else ""
        if schema is not None:
            self._add_rule(f"content: %json {json.dumps({'x-guidance': _COMPACT, **schema}, ensure_ascii=False)}")
            return f"{before} content"
        match format.tool_parser:
            case "harmony":
                return f"{before} {_TEXT}"
            case "llama3":
                self._add_rule(f"PLAIN: {_llama3_text(format.tool_names)}")
                return "PLAIN?"
        return f"{self._text_without(_FORMS[format.tool_parser or ''][0].marker)}?"

    def _one_of(self, before: Sequence[str], form: _CallForm, functions: Sequence[Mapping[str, Any]]) -> str:
        """One call; without a marker its beginning is one text, which no other text begins with."""

        def begin(name: str) -> str:
            parts = (*before, name, *form.between)
            return self._sequence(*parts) if form.is_marked else self._part("".join(parts))

        return " | ".join(
            f"{begin(function['name'])} arguments_{i} {self._sequence(*form.after)}"
            for i, function in enumerate(functions)
        )

    def _text_until(self, marker: str) -> str:
        """Text up to a marker, in both of its forms, and with it."""
        plain = self._text_without(marker)
        as_token = f" | {plain}? <[{self._token_ids[marker]}]>" if marker in self._token_ids else ""
        self._add_rule(f"opened: found{as_token}")
        self._add_rule(f"found[suffix={json.dumps(marker)}]: {_TEXT}")
        return "opened"

    def _text_without(self, marker: str) -> str:
        self._add_rule(f"PLAIN: {_TEXT} & ~/(?s:.*){re.escape(marker)}(?s:.*)/")
        return "PLAIN"

    def _add_rule(self, rule: str) -> None:
        if rule not in self.rules:
            self.rules.append(rule)

    def reasoning(self, around: tuple[tuple[str, ...], tuple[str, ...]] | None, *, is_open: bool) -> str:
        if around is None:
            return ""
        opening, (closing, *rest) = around
        as_token = f" | {_TEXT} <[{self._token_ids[closing]}]>" if closing in self._token_ids else ""
        self.rules.append(f"thought: (closed{as_token}) {self._sequence(*rest)}")
        self.rules.append(f"closed[suffix={json.dumps(closing)}]: {_TEXT}")
        return "thought /\\s{0,4}/ " if is_open else f"({self._sequence(*opening)} thought /\\s{{0,4}}/)? "

    def _sequence(self, *parts: str) -> str:
        return " ".join(self._part(each) for each in parts if each)

    def _part(self, part: str) -> str:
        """A text, or a marker in both of its forms: as a token, and as the tokens of its letters."""
        text = json.dumps(part, ensure_ascii=False)
        return f"({text} | <[{self._token_ids[part]}]>)" if part in self._token_ids else text
