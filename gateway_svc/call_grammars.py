"""Grammars of answers with calls or reasoning for the served model: ids of its markers, and what its prompt opens."""

import json
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

import quire
from gateway_svc.tool_use import ToolUse
from gateway_svc.vocabulary import Vocabulary
from quire.params import GenerateParams
from quire.parsing.answer_format import AnswerFormat
from quire.parsing.think_tags import OPENING_TAGS, TAGS
from quire.parsing.tool_grammar import content_grammar, markers_of, tool_grammar

_MOST_TAG_TOKENS = 12  # at the end of a prompt that opens reasoning
_ANY_OBJECT = {"type": "object"}


class CallGrammars:
    """Makes grammars where calls are forced, strict, or possible beside JSON, or JSON comes behind reasoning.

    Asks the scheduler for what it needs.
    """

    def __init__(self, client: quire.AsyncClient, vocabulary: Vocabulary) -> None:
        self._client = client
        self._vocabulary = vocabulary

    async def constrain(
        self, keywords: GenerateParams, format: AnswerFormat, chat: quire.Chat, tool_use: ToolUse
    ) -> AnswerFormat:
        """Put the grammar of the answer to a chat into its keywords, if one is needed. Returns the answer's format.

        JSON as the form of the content becomes a part of the grammar, so that the model may call instead. It may not
        where calls have no marker, have to follow rules, and could not be told from the form: then all is content.
        Where a call is forced there is no content, and its form has no effect, as in OpenAI's API and in vLLM.
        Reasoning that the prompt opens comes before JSON. Other constraints hold from the first token on, so that it
        could not end: then all is content.
        Raises QuireError.
        """
        content = None if tool_use.is_forced else _json_form(keywords)
        if not tool_use.is_forced:
            if "structured_output" in keywords:
                in_reasoning = await self._opens_reasoning(format, chat)
                return replace(format, reasoning_parser=None) if in_reasoning else format
            if content is None and not tool_use.is_strict:
                return format
            is_unmarked = content is not None and format.tool_parser == "llama3"
            is_mistaken = is_unmarked and tool_use.is_strict and _is_mistakable(content, format.tool_names or ())
            if content is not None and (is_mistaken or not tool_use.offered):
                return await self._constrain_content(keywords, format.without_calls(), chat, content)
        _leave_out_form(keywords)
        keywords["lark"] = tool_grammar(
            format,
            tool_use.usable,
            max_calls=tool_use.max_calls,
            token_ids=await self._vocabulary.token_ids(markers_of(format)),
            in_reasoning=await self._opens_reasoning(format, chat),
            is_forced=tool_use.is_forced,
            content=content,
        )
        return replace(format, is_forced=tool_use.is_forced)

    async def _constrain_content(
        self, keywords: GenerateParams, format: AnswerFormat, chat: quire.Chat, content: dict[str, Any]
    ) -> AnswerFormat:
        """Let the model end reasoning that the prompt opens before JSON. Without such, the form holds as it is."""
        if await self._opens_reasoning(format, chat):
            _leave_out_form(keywords)
            token_ids = await self._vocabulary.token_ids(markers_of(format))
            keywords["lark"] = content_grammar(format, content, token_ids=token_ids)
        return format

    async def _opens_reasoning(self, format: AnswerFormat, chat: quire.Chat) -> bool:
        """True if the prompt opens reasoning: `Accepted.in_reasoning` tells it once the request is accepted."""
        if format.reasoning_parser not in TAGS:
            return False
        prompt = await self._client.tokenize(chat)
        tail = await self._client.detokenize(prompt.token_ids[-_MOST_TAG_TOKENS:], keep_special_tokens=True)
        return tail.rstrip().endswith(OPENING_TAGS)


def _leave_out_form(keywords: GenerateParams) -> None:
    """Leave the form of the content to a grammar."""
    keywords.pop("json_schema", None)
    keywords.pop("json_object", None)


def _json_form(keywords: GenerateParams) -> dict[str, Any] | None:
    """Schema of the content, if it has to be JSON."""
    schema = keywords.get("json_schema")
    if isinstance(schema, str):
        schema = json.loads(schema)
    if schema is None:
        return _ANY_OBJECT if keywords.get("json_object") else None
    return dict(schema)


def _is_mistakable(schema: Any, names: Collection[str]) -> bool:
    """True if JSON of the schema may have the name of a tool and arguments; so, too, where that is hard to see."""
    if not isinstance(schema, Mapping):
        return True
    kinds, branches = schema.get("type"), schema.get("anyOf")
    if isinstance(kinds, str | list) and "object" not in kinds:
        return False
    if isinstance(branches, list) and not any(_is_mistakable(each, names) for each in branches):
        return False
    properties = schema.get("properties", {})
    if not isinstance(properties, Mapping) or schema.get("additionalProperties") is not False:
        return True
    is_call = "name" in properties and not properties.keys().isdisjoint(("arguments", "parameters"))
    return "patternProperties" in schema or (is_call and _may_be_one_of(properties["name"], names))


def _may_be_one_of(schema: Any, names: Collection[str]) -> bool:
    values = (
        schema.get("enum", [schema["const"]] if "const" in schema else None) if isinstance(schema, Mapping) else None
    )
    return not isinstance(values, list) or any(each in names for each in values if isinstance(each, str))
