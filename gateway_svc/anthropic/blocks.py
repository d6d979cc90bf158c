"""Content blocks of a request in Anthropic's form: text, thinking, uses of tools and their results.

Knows no conversation; a block of another type, such as an image, is refused by it.
"""

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag
from pydantic.functional_validators import BeforeValidator
from pydantic_core import PydanticCustomError

from gateway_svc.request_fields import ApiModel, Ignored, Items, Unsupported
from gateway_svc.tool_use import CALLED_NAME

ToolUseId = Annotated[str, Field(min_length=1, max_length=128)]


def _text_alone(kind: Any) -> Any:
    if isinstance(kind, str) and kind != "text":
        reason = "this server does not support content of type {kind}; send text"
        raise PydanticCustomError("unsupported", reason, {"kind": repr(kind[:40])})
    return kind


def _as_blocks(content: Any) -> Any:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


class TextBlock(ApiModel):
    """A piece of text."""

    type: Annotated[Literal["text"], BeforeValidator(_text_alone)]
    text: str
    cache_control: Ignored
    citations: Unsupported


TextContent = Annotated[Items[TextBlock], BeforeValidator(_as_blocks, str | Items[TextBlock])]


class ThinkingBlock(ApiModel):
    """Reasoning of an answer, as it came; its signature has it if it was omitted."""

    type: Literal["thinking"]
    thinking: str
    signature: str | None = None


class RedactedThinkingBlock(ApiModel):
    """Reasoning that another server has encrypted, so that it cannot be read here."""

    type: Literal["redacted_thinking"]
    data: str


class ToolUseBlock(ApiModel):
    """A call of a tool by the model."""

    type: Literal["tool_use"]
    id: ToolUseId
    name: str = CALLED_NAME
    input: dict[str, Any]
    cache_control: Ignored
    caller: Ignored
    toolset_name: Unsupported


class ToolResultBlock(ApiModel):
    """The result of a call, which may be none."""

    type: Literal["tool_result"]
    tool_use_id: ToolUseId
    content: TextContent | None = None
    is_error: bool | None = Field(None, description="The result is a failure; the model sees it marked as one.")
    cache_control: Ignored
    toolset_name: Unsupported


_TAGS = {
    "thinking": "ThinkingBlock",
    "redacted_thinking": "RedactedThinkingBlock",
    "tool_use": "ToolUseBlock",
    "tool_result": "ToolResultBlock",
}


def _tag_of(block: Any) -> str:
    """Tag of a block by its type; any other is taken for text, which refuses what it is not."""
    kind = block.get("type") if isinstance(block, dict) else getattr(block, "type", None)
    return _TAGS.get(kind, "TextBlock") if isinstance(kind, str) else "TextBlock"


Block = Annotated[
    Annotated[TextBlock, Tag("TextBlock")]
    | Annotated[ThinkingBlock, Tag("ThinkingBlock")]
    | Annotated[RedactedThinkingBlock, Tag("RedactedThinkingBlock")]
    | Annotated[ToolUseBlock, Tag("ToolUseBlock")]
    | Annotated[ToolResultBlock, Tag("ToolResultBlock")],
    Discriminator(_tag_of),
]
Content = Annotated[Items[Block], BeforeValidator(_as_blocks, str | Items[Block])]
