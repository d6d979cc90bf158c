"""Input items of a response: messages of text, reasoning, calls of functions, their outputs, compacted conversations.

Knows no conversation; an item or a part of another type is refused.
"""

import base64
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import AliasChoices, Discriminator, Field, Tag, field_validator
from pydantic_core import PydanticCustomError

from gateway_svc.openai.chat_messages import RefusalPart
from gateway_svc.openai.tools import CalledFunction
from gateway_svc.request_fields import ApiModel, Ignored, Items, Unsupported, by_type

_ItemId = Annotated[str | None, Field(max_length=128)]
_COMPACTION_MARK = "quire:"


class InputText(ApiModel):
    """A piece of text that is given to the model."""

    type: Literal["input_text"]
    text: str
    prompt_cache_breakpoint: Ignored
    cache_control: Ignored


class OutputText(ApiModel):
    """A piece of text that a model gave."""

    type: Literal["output_text"]
    text: str
    annotations: Ignored
    logprobs: Ignored
    parsed: Ignored  # OpenAI's client adds it to an answer


Part = Annotated[
    Annotated[InputText, Tag("InputText")]
    | Annotated[OutputText, Tag("OutputText")]
    | Annotated[RefusalPart, Tag("RefusalPart")],
    by_type({"input_text": "InputText", "output_text": "OutputText", "refusal": "RefusalPart"}, "parts"),
]


class InputMessage(ApiModel):
    """A message of a conversation: text, or parts of text. An output item of an earlier response is one, too."""

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: str | Items[Part]
    id: _ItemId = None
    status: Ignored
    phase: Ignored
    cache_control: Ignored

    @property
    def text(self) -> str:
        """The text; parts are lines of their own."""
        return _text(self.content)

    def to_item(self, item_id: str) -> dict[str, Any]:
        """The item of a listing, with this id."""
        parts = [self.content] if isinstance(self.content, str) else self.content
        return {
            "type": "message",
            "id": item_id,
            "status": "completed",
            "role": self.role,
            "content": [self._listed(part) for part in parts],
        }

    def _listed(self, part: str | Part) -> dict[str, Any]:
        if isinstance(part, RefusalPart):
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
    summary: Items[ReasoningText] = Field(default_factory=list)
    content: Items[ReasoningText] | None = None
    id: _ItemId = None
    status: Ignored
    encrypted_content: Unsupported

    @property
    def text(self) -> str:
        """The reasoning; parts are lines of their own."""
        return _text(self.content or self.summary)

    def to_item(self, item_id: str) -> dict[str, Any]:
        """The item of a listing, with this id."""
        made = self.model_dump(include={"type", "summary", "content"})
        return {**made, "id": item_id, "status": "completed"}


class InputCall(CalledFunction):
    """A call of a function by the model."""

    type: Literal["function_call"]
    call_id: str
    id: _ItemId = None
    status: Ignored
    namespace: Unsupported
    caller: Unsupported
    # OpenAI's client names it in both ways.
    async_: Unsupported = Field(None, alias="async", validation_alias=AliasChoices("async", "async_"))

    def to_item(self, item_id: str) -> dict[str, Any]:
        """The item of a listing, with this id."""
        made = self.model_dump(include={"type", "call_id", "name", "arguments"})
        return {**made, "id": item_id, "status": "completed"}


class InputCallOutput(ApiModel):
    """The output of a function that was called: text, or parts of text."""

    type: Literal["function_call_output"]
    call_id: str
    output: str | Items[InputText]
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
        """The item of a listing, with this id."""
        made = self.model_dump(include={"type", "call_id", "output"})
        return {**made, "id": item_id, "status": "completed"}


class InputCompaction(ApiModel):
    """A conversation that was compacted: its summary in base64, behind a mark."""

    type: Literal["compaction"]
    encrypted_content: str
    id: _ItemId = None
    created_by: Ignored

    @field_validator("encrypted_content")
    @classmethod
    def _ours(cls, value: str) -> str:
        try:
            _decoded(value)
        except ValueError:
            raise PydanticCustomError("unsupported", "is of another server: give what this one has written") from None
        return value

    @classmethod
    def of(cls, summary: str) -> "InputCompaction":
        """The item of a summary."""
        content = base64.b64encode(summary.encode()).decode()
        return cls.model_validate({"type": "compaction", "encrypted_content": _COMPACTION_MARK + content})

    @property
    def text(self) -> str:
        """The summary."""
        return _decoded(self.encrypted_content)

    def to_item(self, item_id: str) -> dict[str, Any]:
        """The item of a listing, with this id."""
        return {"type": "compaction", "id": item_id, "encrypted_content": self.encrypted_content}


class ItemReference(ApiModel):
    """An item of a stored response by its id, in place of the item."""

    type: Literal["item_reference"] | None = None
    id: str = Field(max_length=128)


def _tag_of(item: Any) -> Any:
    """Tag of an item by its type; one without a type is a message, or a reference if it has but an id."""
    if not isinstance(item, dict):
        return type(item).__name__
    kind = item.get("type")
    if kind is None:
        kind = "item_reference" if "id" in item and "role" not in item else "message"
    return _TAGS.get(kind) if isinstance(kind, str) else None


_TAGS = {
    "message": "InputMessage",
    "reasoning": "InputReasoning",
    "function_call": "InputCall",
    "function_call_output": "InputCallOutput",
    "compaction": "InputCompaction",
    "item_reference": "ItemReference",
}
_BY_TYPE = Discriminator(
    _tag_of,
    custom_error_type="unsupported",
    custom_error_message=f"this server supports items of the types {', '.join(_TAGS)}",
)
InputItem = Annotated[
    Annotated[InputMessage, Tag("InputMessage")]
    | Annotated[InputReasoning, Tag("InputReasoning")]
    | Annotated[InputCall, Tag("InputCall")]
    | Annotated[InputCallOutput, Tag("InputCallOutput")]
    | Annotated[InputCompaction, Tag("InputCompaction")],
    _BY_TYPE,
]
# An item of a request.
GivenItem = Annotated[
    Annotated[InputMessage, Tag("InputMessage")]
    | Annotated[InputReasoning, Tag("InputReasoning")]
    | Annotated[InputCall, Tag("InputCall")]
    | Annotated[InputCallOutput, Tag("InputCallOutput")]
    | Annotated[InputCompaction, Tag("InputCompaction")]
    | Annotated[ItemReference, Tag("ItemReference")],
    _BY_TYPE,
]


def items_of(given: str | Sequence[GivenItem]) -> list[GivenItem]:
    """The items of an input; a text alone is the user's message."""
    return [InputMessage.model_validate({"role": "user", "content": given})] if isinstance(given, str) else list(given)


def _text(content: str | Sequence[InputText | OutputText | RefusalPart | ReasoningText]) -> str:
    return content if isinstance(content, str) else "\n".join(part.text for part in content)


def _decoded(content: str) -> str:
    """The summary in the content of a compaction. Raises ValueError if it is of another server."""
    if not content.startswith(_COMPACTION_MARK):
        raise ValueError("it has another mark")
    return base64.b64decode(content.removeprefix(_COMPACTION_MARK), validate=True).decode()
