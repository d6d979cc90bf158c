"""Tools in Anthropic's form: their definitions and the choice among them, and ids of their calls."""

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field
from pydantic.functional_validators import BeforeValidator
from pydantic_core import PydanticCustomError

from gateway_svc.api_error import invalid
from gateway_svc.request_fields import ApiModel, Ignored, Items, Unsupported
from gateway_svc.tool_use import MAX_TOOLS, TOOL_NAME, ToolUse

_CHOICES: dict[str, Literal["none", "auto", "required"]] = {
    "auto": "auto",
    "any": "required",
    "tool": "required",
    "none": "none",
}


def _custom_alone(kind: Any) -> Any:
    if isinstance(kind, str) and kind != "custom":
        reason = "this server does not support tools of type {kind}; send tools with an input_schema"
        raise PydanticCustomError("unsupported", reason, {"kind": repr(kind[:40])})
    return kind


class ClientTool(ApiModel):
    """A tool that the client runs; those that a server would run are refused."""

    type: Annotated[Literal["custom"] | None, BeforeValidator(_custom_alone)] = None
    name: str = TOOL_NAME
    description: str | None = None
    input_schema: dict[str, Any] = Field(description="A JSON schema.")
    strict: bool | None = Field(None, description="Arguments follow their schema.")
    cache_control: Ignored
    eager_input_streaming: Ignored
    allowed_callers: Unsupported
    defer_loading: Unsupported
    input_examples: Unsupported

    @property
    def function(self) -> dict[str, Any]:
        """The tool as the chat template gets it."""
        made: dict[str, Any] = {"name": self.name}
        if self.description is not None:
            made["description"] = self.description
        made["parameters"] = self.input_schema
        return {"type": "function", "function": made | ({"strict": True} if self.strict else {})}


Tools = Annotated[Items[ClientTool], Field(max_length=MAX_TOOLS)]


class ToolChoice(ApiModel):
    """The choice of tools that an answer may or must use."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = Field(None, description="Of the tool that must be used, with the type tool.")
    disable_parallel_tool_use: bool | None = Field(None, description="True: only the first call comes back.")

    def check(self) -> None:
        """Raises ApiError if the name is missing or superfluous."""
        if (self.type == "tool") != (self.name is not None):
            raise invalid("tool_choice.name", "belongs to the type tool, and is required there")


def tool_use_of(tools: Sequence[ClientTool], choice: ToolChoice | None) -> ToolUse:
    """Rules for the calls of a request."""
    return ToolUse(
        tools=[each.function for each in tools],
        choice="auto" if choice is None else _CHOICES[choice.type],
        allowed=None if choice is None or choice.name is None else [choice.name],
        parallel=None if choice is None else not (choice.disable_parallel_tool_use or choice.type == "tool"),
        schema_path="input_schema",
    )


def tool_use_id(call_id: str) -> str:
    """Id of a call in an answer, in Anthropic's form; the same for the same id of the SDK."""
    return f"toolu_{call_id.removeprefix('call_')}"
