"""Tools of a response, whose form is flat where that of chat completions nests, and options of reasoning."""

from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, Tag
from pydantic_core import PydanticCustomError

from gateway_svc.openai.tools import (
    AllowedChoice,
    AllowedTools,
    FunctionDefinition,
    NamedChoice,
    NamedFunction,
    Tool,
    ToolChoice,
    tool_use_of,
)
from gateway_svc.request_fields import ApiModel, Items, Unsupported, by_type
from gateway_svc.tool_use import MAX_TOOLS, ToolUse


class FunctionTool(FunctionDefinition):
    """A function that the model may call; functions are the only kind of tools."""

    type: Literal["function"]
    allowed_callers: Unsupported
    async_: Unsupported = Field(None, alias="async")
    defer_loading: Unsupported
    output_schema: Unsupported

    @property
    def nested(self) -> Tool:
        """The tool in the form of chat completions."""
        given = self.model_dump(include={*FunctionDefinition.model_fields}, exclude_unset=True)
        return Tool(type="function", function=FunctionDefinition.model_validate(given))

    def echo(self, *, is_enforced: bool) -> dict[str, Any]:
        """The tool as the response object has it; `is_enforced`: a grammar has its arguments follow their schema."""
        return {**self.model_dump(include={"type", "name", "description", "parameters"}), "strict": is_enforced}


def _refuse_other_types(tool: Any) -> Any:
    if isinstance(tool, dict) and (kind := tool.get("type")) != "function":
        raise PydanticCustomError(
            "unsupported", "this server does not support tools of type {kind}", {"kind": str(kind)[:40]}
        )
    return tool


FunctionTools = Annotated[
    Items[Annotated[FunctionTool, BeforeValidator(_refuse_other_types)]], Field(max_length=MAX_TOOLS)
]


class FunctionChoice(NamedFunction):
    """The choice of one function."""

    type: Literal["function"]


class AllowedToolsChoice(ApiModel):
    """The choice among some of the tools; the model sees all of them."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[Items[FunctionChoice], Field(min_length=1, max_length=MAX_TOOLS)]


def _refuse_other_choices(choice: Any) -> Any:
    if isinstance(choice, dict) and (kind := choice.get("type", "function")) not in ("function", "allowed_tools"):
        raise PydanticCustomError(
            "unsupported", "this server does not support the choice of {kind}", {"kind": str(kind)[:40]}
        )
    return choice


Choice = Annotated[
    Literal["none", "auto", "required"]
    | Annotated[
        Annotated[FunctionChoice, Tag("FunctionChoice")] | Annotated[AllowedToolsChoice, Tag("AllowedToolsChoice")],
        by_type({"function": "FunctionChoice", "allowed_tools": "AllowedToolsChoice"}, "choices"),
    ],
    BeforeValidator(_refuse_other_choices),
]


class Reasoning(ApiModel):
    """Options of reasoning, of which no summary is made."""

    effort: str | None = Field(
        None, max_length=64, description="For the chat template, as reasoning_effort; none: no thinking."
    )
    summary: Literal["auto", "concise", "detailed"] | None = Field(None, description="Without effect.")
    generate_summary: Literal["auto", "concise", "detailed"] | None = Field(None, description="Old name of summary.")


def rules_for_calls(
    tools: list[FunctionTool] | None, choice: Choice | None, *, parallel: bool | None, most: int | None
) -> ToolUse:
    """Rules for calls."""
    rules = tool_use_of([each.nested for each in tools or ()], _nested(choice), parallel=parallel)
    return replace(rules, most=most, schema_path="parameters")


def _nested(choice: Choice | None) -> ToolChoice | None:
    """The choice in the form of chat completions."""
    match choice:
        case FunctionChoice():
            return _named(choice)
        case AllowedToolsChoice(mode=mode, tools=tools):
            allowed = AllowedTools(mode=mode, tools=[_named(each) for each in tools])
            return AllowedChoice(type="allowed_tools", allowed_tools=allowed)
    return choice


def _named(choice: FunctionChoice) -> NamedChoice:
    return NamedChoice(type="function", function=NamedFunction(name=choice.name))
