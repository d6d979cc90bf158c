"""Format of a model's answers: the parsers of its calls and of its reasoning, by the names that a server tells."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Literal, get_args

ToolParserName = Literal["deepseek", "harmony", "hermes", "llama3", "mistral"]
ReasoningParserName = Literal["harmony", "mistral", "think"]
TOOL_PARSERS: frozenset[str] = frozenset(get_args(ToolParserName))
REASONING_PARSERS: frozenset[str] = frozenset(get_args(ReasoningParserName))


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerFormat:
    """Parsers by name. None, and a name that this version does not know: the text is content."""

    tool_parser: str | None = None
    reasoning_parser: str | None = None
    tool_names: frozenset[str] | None = None  # of what may be called: other JSON is no call; None: any name
    is_forced: bool = False  # a grammar allows calls and nothing else: other text begins a call that was cut off

    @property
    def is_plain(self) -> bool:
        """True if every answer is content as it is."""
        return self.tool_parser not in TOOL_PARSERS and self.reasoning_parser not in REASONING_PARSERS

    def offering(self, names: Iterable[str]) -> "AnswerFormat":
        """The format of answers to requests that offer the tools of these names."""
        return replace(self, tool_names=frozenset(names))

    def without_calls(self) -> "AnswerFormat":
        """The format of answers to requests that offer no tools."""
        return AnswerFormat(reasoning_parser=self.reasoning_parser)


def names_of_tools(tools: Iterable[object]) -> list[str]:
    """Names of the tools in OpenAI's form that have one; whether others may be offered is the server's to say."""
    functions = [each.get("function") for each in tools if isinstance(each, Mapping)]
    names = [each.get("name") for each in functions if isinstance(each, Mapping)]
    return [each for each in names if isinstance(each, str)]
