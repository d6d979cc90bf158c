"""Tools and their calls in OpenAI's form: fields of a request, and the objects of an answer."""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import Field, Tag

import quire
from gateway_svc.request_fields import ApiModel, Ignored, Items, by_type
from gateway_svc.tool_use import CALLED_NAME, MAX_TOOLS, TOOL_NAME, ToolUse
from quire.parsing.deltas import Delta


class FunctionDefinition(ApiModel):
    """A function that the model may call."""

    name: str = TOOL_NAME
    description: str | None = None
    parameters: dict[str, Any] | None = Field(None, description="A JSON schema.")
    strict: bool | None = Field(None, description="Arguments follow their schema.")
    cache_control: Ignored  # Anthropic's, which clients of several APIs send to all; every prefix is cached


class Tool(ApiModel):
    """A tool; functions are the only kind."""

    type: Literal["function"]
    function: FunctionDefinition
    cache_control: Ignored = None  # as in a function


Tools = Annotated[Items[Tool], Field(max_length=MAX_TOOLS)]


class CalledFunction(ApiModel):
    """Function of a call, and its arguments."""

    name: str = CALLED_NAME
    arguments: str
    parsed_arguments: Ignored  # OpenAI's client adds them to an answer
    provider_specific_fields: Ignored  # so does LiteLLM


class SentCall(ApiModel):
    """A call in a message of the conversation so far."""

    id: str
    index: Ignored  # in events
    cache_control: Ignored
    provider_specific_fields: Ignored  # LiteLLM adds them to an answer
    extra_content: Ignored  # Google's answers have it
    type: Literal["function"] = "function"
    function: CalledFunction

    def call(self) -> quire.ToolCall:
        """The call for the SDK."""
        return quire.ToolCall(self.id, self.function.name, self.function.arguments)


class NamedFunction(ApiModel):
    """A function by its name."""

    name: str = TOOL_NAME


class NamedChoice(ApiModel):
    """The choice of one function."""

    type: Literal["function"]
    function: NamedFunction


class AllowedTools(ApiModel):
    """Some of the tools."""

    mode: Literal["auto", "required"]
    tools: Annotated[Items[NamedChoice], Field(min_length=1, max_length=MAX_TOOLS)]


class AllowedChoice(ApiModel):
    """The choice among some of the tools; the model sees all of them."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


ToolChoice = (
    Literal["none", "auto", "required"]
    | Annotated[
        Annotated[NamedChoice, Tag("NamedChoice")] | Annotated[AllowedChoice, Tag("AllowedChoice")],
        by_type({"function": "NamedChoice", "allowed_tools": "AllowedChoice"}, "choices"),
    ]
)


def template_tools(tools: Iterable[Tool]) -> list[dict[str, Any]]:
    """Tools as the chat template gets them: what the client sent, but for marks of caching."""
    unseen: Any = {"cache_control": True, "function": {"cache_control"}}
    return [each.model_dump(exclude_unset=True, exclude=unseen) for each in tools]


def tool_use_of(tools: Iterable[Tool], choice: ToolChoice | None, *, parallel: bool | None) -> ToolUse:
    """Rules for the calls of a request; see ToolUse."""
    rules = ToolUse(tools=template_tools(tools), parallel=parallel)
    match choice:
        case NamedChoice(function=function):  # one call, whatever is said of several
            return replace(rules, choice="required", allowed=[function.name], parallel=False)
        case AllowedChoice(allowed_tools=allowed):
            return replace(rules, choice=allowed.mode, allowed=[each.function.name for each in allowed.tools])
    return replace(rules, choice=choice or "auto")


def call_object(call: quire.ToolCall) -> dict[str, Any]:
    """A whole call in an answer."""
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


class MessageDelta:
    """The object `delta` of an event: what some deltas add to a message, as fields."""

    def __init__(self, deltas: Sequence[Delta], *, parallel_calls: bool, has_reasoning: bool) -> None:
        """Add the deltas up; without `parallel_calls` those of the first call, without `has_reasoning` no reasoning."""
        self.fields: dict[str, Any] = {}
        self._calls: dict[int, dict[str, Any]] = {}  # by index
        for each in deltas:
            match each:
                case quire.ContentDelta(text):
                    self._append("content", text)
                case quire.ReasoningDelta(text) if has_reasoning:
                    self._append("reasoning_content", text)
                    self._append("reasoning", text)
                case quire.ToolCallBegun(index) if parallel_calls or index == 0:
                    self._begin(each)
                case quire.ArgumentsDelta(index, text) if parallel_calls or index == 0:
                    self._call(index)["function"]["arguments"] += text

    @property
    def calls(self) -> Collection[dict[str, Any]]:
        """Calls that begin, which have an id, or go on here, in their order."""
        return self._calls.values()

    def _append(self, name: str, text: str) -> None:
        self.fields[name] = self.fields.get(name, "") + text

    def _begin(self, begun: quire.ToolCallBegun) -> None:
        call = self._call(begun.index)
        call |= {"id": begun.id, "type": "function"}
        call["function"] = {"name": begun.name, **call["function"]}

    def _call(self, index: int) -> dict[str, Any]:
        if index not in self._calls:
            self._calls[index] = {"index": index, "function": {"arguments": ""}}
            self.fields.setdefault("tool_calls", []).append(self._calls[index])
        return self._calls[index]


def message_object(message: quire.ChatMessage, *, parallel_calls: bool, has_reasoning: bool) -> dict[str, Any]:
    """The message of an answer."""
    calls = message.tool_calls if parallel_calls else message.tool_calls[:1]
    made: dict[str, Any] = {
        "role": "assistant",
        "content": message.content or (None if calls or message.reasoning else ""),
        "refusal": None,
        "annotations": [],
    }
    if has_reasoning and message.reasoning:
        made |= {"reasoning_content": message.reasoning, "reasoning": message.reasoning}
    if calls:
        made["tool_calls"] = [call_object(each) for each in calls]
    return made
