"""Input items of a response, and the turns of a conversation that they stand for.

Knows messages of text; an item or a part of another type is refused.
"""

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

import quire
from gateway_svc.request_fields import ApiModel, Ignored

_SYSTEM_ROLES = ("system", "developer")  # chat templates know the first


class InputText(ApiModel):
    """A piece of text that is given to the model."""

    type: Literal["input_text"]
    text: str
    prompt_cache_breakpoint: Ignored


class OutputText(ApiModel):
    """A piece of text that a model gave."""

    type: Literal["output_text"]
    text: str
    annotations: Ignored
    logprobs: Ignored


Part = Annotated[InputText | OutputText, Field(discriminator="type")]


class InputMessage(ApiModel):
    """A message of a conversation: text, or parts of text. An output item of an earlier response is one, too."""

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[Part]
    id: str | None = Field(None, max_length=128)
    status: Ignored
    phase: Ignored

    @property
    def text(self) -> str:
        """The text; parts are lines of their own."""
        return self.content if isinstance(self.content, str) else "\n".join(part.text for part in self.content)

    @property
    def turn(self) -> quire.ChatMessage:
        """The message as the chat template takes it."""
        return quire.ChatMessage("system" if self.role in _SYSTEM_ROLES else self.role, self.text)

    def to_item(self, item_id: str) -> dict[str, Any]:
        """The item of a listing; `item_id` is for a message without one."""
        kind = "output_text" if self.role == "assistant" else "input_text"
        extra: dict[str, Any] = {"annotations": [], "logprobs": []} if self.role == "assistant" else {}
        texts = [self.content] if isinstance(self.content, str) else [part.text for part in self.content]
        return {
            "type": "message",
            "id": self.id or item_id,
            "status": "completed",
            "role": self.role,
            "content": [{"type": kind, "text": text, **extra} for text in texts],
        }


def messages_of(given: str | Sequence[InputMessage]) -> list[InputMessage]:
    """The items of an input; a text alone is the user's message."""
    return [InputMessage.model_validate({"role": "user", "content": given})] if isinstance(given, str) else list(given)
