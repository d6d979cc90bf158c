"""Input items of a response: messages of text, reasoning, calls of functions and their outputs.

Knows no conversation; an item or a part of another type is refused.
"""

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag
from pydantic_core import PydanticCustomError

from gateway_svc.openai.tools import CalledFunction
from gateway_svc.request_fields import ApiModel, Ignored, Unsupported

_ItemId = Annotated[str | None, Field(max_length=128)]


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


class Refusal(ApiModel):
    """Words of a model that declined to answer."""

    type: Literal["refusal"]
    refusal: str

    @property
    def text(self) -> str:
        """Words of the model."""
        return self.refusal


_PART_TYPES = ("input_text", "output_text", "refusal")


def _refuse_other_parts(part: Any) -> Any:
    if isinstance(part, dict) and part.get("type") not in _PART_TYPES:
        types = ", ".join(_PART_TYPES)
        raise PydanticCustomError("unsupported", "this server supports parts of the types {types}", {"types": types})
    return part


Part = Annotated[
    Annotated[InputText | OutputText | Refusal, Field(discriminator="type")], BeforeValidator(_refuse_other_parts)
]


class InputMessage(ApiModel):
    """A message of a conversation: text, or parts of text. An output item of an earlier response is one, too."""

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[Part]
    id: _ItemId = None
    status: Ignored
    phase: Ignored

    @property
    def text(self) -> str:
        """The text; parts are lines of their own."""
        return _text(self.content)

    def to_item(self, item_id: str) -> dict[str, Any]:
        """The item of a listing; `item_id` is for one without an id."""
        parts = [self.content] if isinstance(self.content, str) else self.content
        return {
            "type": "message",
            "id": self.id or item_id,
            "status": "completed",
            "role": self.role,
            "content": [self._listed(part) for part in parts],
        }

    def _listed(self, part: str | Part) -> dict[str, Any]:
        if isinstance(part, Refusal):
            return part.model_dump()
        text = part if isinstance(part, str) else part.text
        if self.role == "assistant":
            return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
        return {"type": "input_text", "text": text}


class ReasoningText(ApiModel):
    """A piece of reasoning, or of its summary."""

    type: Literal["reasoning_text", "summary_text"]
    text: str


class InputReasoning(ApiModel):
    """Reasoning of an earlier response; the summary counts where the reasoning itself is missing."""

    type: Literal["reasoning"]
    summary: list[ReasoningText] = Field(default_factory=list)
    content: list[ReasoningText] | None = None
    id: _ItemId = None
    status: Ignored
    encrypted_content: Unsupported

    @property
    def text(self) -> str:
        """The reasoning; parts are lines of their own."""
        return _text(self.content or self.summary)

    def to_item(self, item_id: str) -> dict[str, Any]:
        """The item of a listing; `item_id` is for one without an id."""
        made = self.model_dump(include={"type", "summary", "content"})
        return {**made, "id": self.id or item_id, "status": "completed"}


class InputCall(CalledFunction):
    """A call of a function by the model."""

    type: Literal["function_call"]
    call_id: str
    id: _ItemId = None
    status: Ignored
    namespace: Unsupported
    caller: Unsupported
    async_: Unsupported = Field(None, alias="async")

    def to_item(self, item_id: str) -> dict[str, Any]:
        """The item of a listing; `item_id` is for one without an id."""
        made = self.model_dump(include={"type", "call_id", "name", "arguments"})
        return {**made, "id": self.id or item_id, "status": "completed"}


class InputCallOutput(ApiModel):
    """The output of a function that was called: text, or parts of text."""

    type: Literal["function_call_output"]
    call_id: str
    output: str | list[InputText]
    name: str | None = Field(None, description="Of the function, for the chat template.")
    id: _ItemId = None
    status: Ignored
    namespace: Unsupported
    caller: Unsupported

    @property
    def text(self) -> str:
        """The text; parts are lines of their own."""
        return _text(self.output)

    def to_item(self, item_id: str) -> dict[str, Any]:
        """The item of a listing; `item_id` is for one without an id."""
        made = self.model_dump(include={"type", "call_id", "output"})
        return {**made, "id": self.id or item_id, "status": "completed"}


def _tag_of(item: Any) -> Any:
    """Tag of an item by its type; one without a type is a message."""
    if not isinstance(item, dict):
        return type(item).__name__
    kind = item.get("type", "message")
    return _TAGS.get(kind) if isinstance(kind, str) else None


_TAGS = {
    "message": "InputMessage",
    "reasoning": "InputReasoning",
    "function_call": "InputCall",
    "function_call_output": "InputCallOutput",
}
InputItem = Annotated[
    Annotated[InputMessage, Tag("InputMessage")]
    | Annotated[InputReasoning, Tag("InputReasoning")]
    | Annotated[InputCall, Tag("InputCall")]
    | Annotated[InputCallOutput, Tag("InputCallOutput")],
    Discriminator(
        _tag_of,
        custom_error_type="unsupported",
        custom_error_message=f"this server supports items of the types {', '.join(_TAGS)}",
    ),
]


def items_of(given: str | Sequence[InputItem]) -> list[InputItem]:
    """The items of an input; a text alone is the user's message."""
    return [InputMessage.model_validate({"role": "user", "content": given})] if isinstance(given, str) else list(given)


def _text(content: str | Sequence[InputText | OutputText | Refusal | ReasoningText]) -> str:
    return content if isinstance(content, str) else "\n".join(part.text for part in content)
