"""Output of a response, and the items that it makes: one message with one part of text.

Knows chunks of the SDK, and no events.
"""

from typing import Any, Literal

import quire
from gateway_svc.openai.logprobs import chat_logprobs
from gateway_svc.vocabulary import Vocabulary, ids_of

ItemStatus = Literal["in_progress", "completed", "incomplete"]


class Output:
    """Output so far, from the beginning on, as its chunks are added."""

    def __init__(self, vocabulary: Vocabulary, num_top: int) -> None:
        self._vocabulary = vocabulary
        self._num_top = num_top
        self._pieces: list[str] = []
        self.num_tokens = 0
        self.logprobs: list[dict[str, Any]] = []  # one for each token, if asked for
        self.reason: quire.FinishReason | None = None

    @property
    def text(self) -> str:
        return "".join(self._pieces)

    async def add(self, chunk: quire.Chunk) -> list[dict[str, Any]]:
        """Add a chunk. Returns its log-probabilities."""
        await self._vocabulary.load(ids_of(chunk.logprobs))
        logprobs = chat_logprobs(chunk.logprobs, self._num_top, self._vocabulary)
        self._pieces.append(chunk.text)
        self.logprobs += logprobs
        self.num_tokens += chunk.num_tokens
        self.reason = chunk.finish.reason if chunk.finish else None
        return logprobs


def text_part(text: str, logprobs: list[dict[str, Any]]) -> dict[str, Any]:
    """The part of a message with its text."""
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}


def message_item(item_id: str, status: ItemStatus, parts: list[dict[str, Any]]) -> dict[str, Any]:
    """The message of a response."""
    return {"type": "message", "id": item_id, "status": status, "role": "assistant", "content": parts}
