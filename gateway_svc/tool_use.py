"""Rules of a request for its calls: the tools that the model sees, those that it has to call, and how many calls come.

All APIs share them. Tools are in the form in which chat templates get them, which is OpenAI's; knows no other field.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from pydantic import Field

import quire
from gateway_svc.api_error import invalid
from quire.params import Tools
from quire.parsing.answer_format import TOOL_PARSERS, AnswerFormat

MAX_TOOLS = 128
TOOL_NAME = Field(pattern=r"^[A-Za-z0-9_.-]{1,128}$")
CALLED_NAME = Field(min_length=1, max_length=128)  # in a call that comes back, which a model may have written by itself


def ends_within_call(cause: quire.StopCause | None, arguments: str) -> bool:
    """True if a stop string or stop token ended an output within the arguments of its last call."""
    if cause is None or (cause.stop_string is None and cause.stop_token_id is None):
        return False
    try:
        json.loads(arguments)
    except (ValueError, RecursionError):
        return True
    return False


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolUse:
    """Tools of a request, and which of them an answer may or must call."""

    tools: Tools
    choice: Literal["none", "auto", "required"] = "auto"
    allowed: Sequence[str] | None = None  # names of the tools that may be called; None: all of them
    parallel: bool | None = None  # False: only the first call comes back
    most: int | None = None  # calls that come back; None: any number
    schema_path: str = "function.parameters"  # of a tool, in the request

    @property
    def offered(self) -> Tools:
        """Tools that the model gets to see."""
        return self.tools if self.choice != "none" else []

    @property
    def is_forced(self) -> bool:
        """True if the model has to call."""
        return self.choice == "required"

    @property
    def max_calls(self) -> int | None:
        """Most calls that come back; None: any number."""
        return 1 if self.parallel is False else self.most

    @property
    def may_call_several(self) -> bool:
        """True if more than one call may come back."""
        return self.max_calls != 1

    @property
    def usable(self) -> Tools:
        """Tools that the model may call, of those that it gets to see."""
        return [each for each in self.offered if self.allowed is None or each["function"]["name"] in self.allowed]

    @property
    def is_strict(self) -> bool:
        """True if a call must be of some tools, or the arguments of some follow their schema, though none is forced."""
        is_limited = len(self.usable) < len(self.offered)
        return is_limited or any(each["function"].get("strict") for each in self.offered)

    def enforces(self, name: str) -> bool:
        """True if the arguments of the tool of this name must follow their schema."""
        return self.is_forced or any(
            each["function"].get("strict") for each in self.offered if each["function"]["name"] == name
        )

    @property
    def names(self) -> Mapping[str, str]:
        """Fields that a refused grammar is due to, by the SDK's keywords."""
        return dict.fromkeys(("structured_output", "lark"), "tools") if self.is_forced or self.is_strict else {}

    def schema_field(self, number: int) -> str:
        """Field of the schema of the usable tool of this number."""
        names = [each["function"]["name"] for each in self.offered]
        usable = [index for index, name in enumerate(names) if self.allowed is None or name in self.allowed]
        return f"tools[{usable[number]}].{self.schema_path}"

    def check(self, *, has_structure: bool) -> None:
        """Raises ApiError for fields that contradict each other; `has_structure`: structured_outputs is given."""
        known = {each["function"]["name"] for each in self.tools}
        if not known.issuperset(self.allowed or ()) or (self.is_forced and not self.usable):
            raise invalid("tool_choice", "asks for a tool that tools does not have")
        if self.is_forced and has_structure:
            raise invalid("tool_choice", "give auto or none where structured_outputs is given")

    def format(self, of_model: AnswerFormat) -> AnswerFormat:
        """The format of the answers. Raises ApiError if that of calls is not known."""
        if not self.offered:
            return of_model.without_calls()
        if of_model.tool_parser not in TOOL_PARSERS:
            raise invalid("tools", "the format in which this model calls tools is not known: see --tool-parser")
        return of_model.offering(each["function"]["name"] for each in self.offered)
