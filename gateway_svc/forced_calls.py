"""Grammars of calls that a request forces, for the served model: its markers' token ids, and what its prompt opens."""

import quire
from gateway_svc.tool_use import ToolUse
from gateway_svc.vocabulary import Vocabulary
from quire.parsing.answer_format import AnswerFormat
from quire.parsing.think_tags import OPENING_TAGS, TAGS
from quire.parsing.tool_grammar import markers_of, tool_grammar

_MOST_TAG_TOKENS = 12  # at the end of a prompt that opens reasoning


class ForcedCalls:
    """Makes grammars; asks the scheduler for what it needs."""

    def __init__(self, client: quire.AsyncClient, vocabulary: Vocabulary) -> None:
        self._client = client
        self._vocabulary = vocabulary

    async def grammar(self, format: AnswerFormat, chat: quire.Chat, tool_use: ToolUse) -> str:
        """Grammar of an answer to the chat that calls some of the forced tools. Raises QuireError."""
        return tool_grammar(
            format,
            tool_use.forced,
            several=tool_use.may_call_several,
            token_ids=await self._vocabulary.token_ids(markers_of(format)),
            in_reasoning=format.reasoning_parser in TAGS and await self._opens_reasoning(chat),
        )

    async def _opens_reasoning(self, chat: quire.Chat) -> bool:
        """True if the prompt opens reasoning: `Accepted.in_reasoning` tells it once the request is accepted."""
        prompt = await self._client.tokenize(chat)
        tail = await self._client.detokenize(prompt.token_ids[-_MOST_TAG_TOKENS:], keep_special_tokens=True)
        return tail.rstrip().endswith(OPENING_TAGS)
