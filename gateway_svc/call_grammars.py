"""Grammars of answers with calls, for the served model: its markers' token ids, and what its prompt opens."""

import json
from typing import Any

import quire
from gateway_svc.tool_use import ToolUse
from gateway_svc.vocabulary import Vocabulary
from quire.params import GenerateParams
from quire.parsing.answer_format import AnswerFormat
from quire.parsing.think_tags import OPENING_TAGS, TAGS
from quire.parsing.tool_grammar import markers_of, tool_grammar

_MOST_TAG_TOKENS = 12  # at the end of a prompt that opens reasoning
_ANY_OBJECT = {"type": "object"}


class CallGrammars:
    """Makes grammars where calls are forced, strict, or possible beside JSON; asks the scheduler for what it needs."""

    def __init__(self, client: quire.AsyncClient, vocabulary: Vocabulary) -> None:
        self._client = client
        self._vocabulary = vocabulary

    async def constrain(
        self, keywords: GenerateParams, format: AnswerFormat, chat: quire.Chat, tool_use: ToolUse
    ) -> None:
        """Put the grammar of the answer to a chat into its keywords, if one is needed. Raises QuireError.

        JSON as the form of the content becomes a part of the grammar, so that the model may call instead.
        """
        content = _json_form(keywords)
        if not tool_use.is_forced:
            is_constrained = "structured_output" in keywords
            if not tool_use.offered or is_constrained or (content is None and not tool_use.is_strict):
                return
            if content is not None and format.tool_parser == "llama3":
                return  # its calls are JSON without a marker: the content's form is all that an answer may be
            keywords.pop("json_schema", None)
            keywords.pop("json_object", None)
        keywords["lark"] = tool_grammar(
            format,
            tool_use.usable,
            several=tool_use.may_call_several,
            token_ids=await self._vocabulary.token_ids(markers_of(format)),
            in_reasoning=format.reasoning_parser in TAGS and await self._opens_reasoning(chat),
            is_forced=tool_use.is_forced,
            content=content,
        )

    async def _opens_reasoning(self, chat: quire.Chat) -> bool:
        """True if the prompt opens reasoning: `Accepted.in_reasoning` tells it once the request is accepted."""
        prompt = await self._client.tokenize(chat)
        tail = await self._client.detokenize(prompt.token_ids[-_MOST_TAG_TOKENS:], keep_special_tokens=True)
        return tail.rstrip().endswith(OPENING_TAGS)


def _json_form(keywords: GenerateParams) -> dict[str, Any] | None:
    """Schema of the content, if it has to be JSON."""
    schema = keywords.get("json_schema")
    if isinstance(schema, str):
        schema = json.loads(schema)
    if schema is None:
        return _ANY_OBJECT if keywords.get("json_object") else None
    return dict(schema)
