"""A chat template in a process of its own: this file is run by path, and imports nothing but jinja2.

The template is a program that came with a model. Jinja's sandbox keeps it from what is around it, and nothing keeps it
from loops, huge strings or deep nesting; so its process has limits of CPU time and memory, and its output of length.
Messages on the pipes are a length and so many bytes: first the template, then one conversation after another, each with
one answer. It knows no tokens and no scheduler.
"""

import json
import re
import resource
import struct
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import datetime
from typing import Any, BinaryIO, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

LENGTH = struct.Struct("<I")
# What an answer begins with; behind NO_JSON are the name of what is something else, a space, and the reason.
TEXT, REFUSED, BROKEN, BEYOND_LIMITS, NO_JSON = b"t", b"r", b"b", b"l", b"j"

MAX_CPU_S = 2  # of one conversation
MAX_MEMORY_BYTES = 768 << 20  # of the whole process, its libraries included
MAX_OUTPUT_CHARS = 16 << 20
_MAX_REASON_CHARS = 2000
_END_OF_CONTENT = "END_OF_FINAL_CONTENT "  # a template that trims contents takes its last space
# How a template asks whether a message has nothing but calls; others would spell None.
_NO_CONTENT = re.compile(r"\bcontent\b['\"]?\]?\s+is\s+none\b")
_TEXT_OF_PART = re.compile(r"""['"]text['"]|\.text\b""")  # whoever writes the parts of a content names it
_WORDS = "Words of a user."
_OWN_VARIABLES = ("messages", "tools", "add_generation_prompt")


class TooLongError(Exception):
    """The text of a conversation is longer than any prompt."""


class NoJsonError(Exception):
    """The tools or the further variables of a chat are not the JSON that they have to be."""


class CompiledTemplate:
    """A template that can be rendered. Raises jinja2.TemplateSyntaxError, or whatever else its source brings about."""

    def __init__(
        self, source: str, special_tokens: Mapping[str, str], *, now: Callable[[], datetime] = datetime.now
    ) -> None:
        self._special_tokens: dict[str, Any] = dict(special_tokens)
        self._template = _environment(now).from_string(source)
        self._knows_no_content = _NO_CONTENT.search(source) is not None
        self._wants_parts = (
            _TEXT_OF_PART.search(source) is not None
            and not self._writes_words(_WORDS)
            and self._writes_words(_as_parts(_WORDS))
        )

    def render(
        self,
        messages: list[dict[str, Any]],
        *,
        add_generation_prompt: bool,
        continue_final_message: bool = False,
        tools: str = "",
        template_kwargs: str = "",
    ) -> str:
        """Text of the conversation. Raises NoJsonError, TooLongError, and any error of the template.

        With `continue_final_message` the text ends behind the content of the final message, as in `transformers`.
        """
        variables = self._variables(add_generation_prompt, tools, template_kwargs)
        if not continue_final_message:
            return self._render(messages, variables)
        *earlier, final = messages
        marked = final | {"content": final["content"] + _END_OF_CONTENT}
        return _continued(self._render([*earlier, marked], variables), final["content"])

    def _render(self, messages: list[dict[str, Any]], variables: dict[str, Any]) -> str:
        return self._written([self._prepared(each) for each in messages], variables)

    def _variables(self, add_generation_prompt: bool, tools: str = "", template_kwargs: str = "") -> dict[str, Any]:
        return {
            "documents": None,
            **self._special_tokens,
            **_further_variables(template_kwargs),
            "tools": _tools(tools),
            "add_generation_prompt": add_generation_prompt,
        }

    def _writes_words(self, content: str | list[dict[str, str]]) -> bool:
        """True if the template writes the words of a user that come in this form."""
        variables = self._variables(add_generation_prompt=True)
        with suppress(Exception):  # a program of others; a chat will show what is wrong with it
            return _WORDS in self._written([{"role": "user", "content": content}], variables)
        return False

    def _written(self, messages: list[dict[str, Any]], variables: dict[str, Any]) -> str:
        pieces, num_chars = [], 0
        for piece in self._template.generate(variables | {"messages": messages}):
            num_chars += len(piece)
            if num_chars > MAX_OUTPUT_CHARS:
                raise TooLongError
            pieces.append(piece)
        return "".join(pieces)

    def _prepared(self, message: dict[str, Any]) -> dict[str, Any]:
        """The message as the template expects it: calls with arguments as objects, and its text as parts or as text.

        Most templates of text models know text alone. A few know parts alone, as that of Llama Guard 3 1B, and would
        leave text out without a word.
        """
        if self._wants_parts:
            message = message | {"content": _as_parts(message["content"])}
        if "tool_calls" not in message:
            return message
        for function in (call["function"] for call in message["tool_calls"]):
            with suppress(ValueError, RecursionError):  # a model may have been cut off: then its words are as good
                arguments = json.loads(function["arguments"])
                if isinstance(arguments, dict):
                    function["arguments"] = arguments
        if self._knows_no_content and not message["content"]:
            message["content"] = None
        return message


def _as_parts(text: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text}]


def _continued(text: str, content: str) -> str:
    """The text up to the end of the final content, which is marked. Raises ValueError if the template changed it."""
    end = text.rfind(_END_OF_CONTENT.strip())
    if end < 0 or content.strip() not in text:
        raise ValueError("the final message cannot be continued: the template changes or omits its content")
    return text[:end] if text.startswith(_END_OF_CONTENT, end) else text[:end].rstrip()


def main(requests: BinaryIO, answers: BinaryIO) -> None:
    """Answers until the other end closes its pipe."""
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    template: CompiledTemplate | None = None
    fault = b""
    while (data := _read(requests)) is not None:
        _allow_cpu()
        if template is None and not fault:
            try:
                template = CompiledTemplate(**json.loads(data))
            except jinja2.TemplateSyntaxError as error:
                fault = _encoded(f"line {error.lineno}: {error.message}")
            except Exception as error:
                fault = _encoded(f"{type(error).__name__}: {error}")
            continue
        answer = BROKEN + fault if template is None else _answer(template, data)
        answers.write(LENGTH.pack(len(answer)) + answer)
        answers.flush()


def _answer(template: CompiledTemplate, data: bytes) -> bytes:
    try:
        return TEXT + template.render(**json.loads(data)).encode("utf-8", "surrogatepass")
    except NoJsonError as error:
        return NO_JSON + _encoded(str(error))
    except (TooLongError, MemoryError):
        return BEYOND_LIMITS
    except Exception as error:  # a program of others: it may raise anything
        return REFUSED + _encoded(str(error) or type(error).__name__)


def _tools(text: str) -> list[Any] | None:
    if not text:
        return None
    tools = _parsed("tools", text)
    if not isinstance(tools, list) or not all(isinstance(each, dict) for each in tools):
        raise NoJsonError("tools is not a JSON array of objects: give one, or leave it out")
    return tools


def _further_variables(text: str) -> dict[str, Any]:
    if not text:
        return {}
    variables = _parsed("template_kwargs", text)
    if not isinstance(variables, dict):
        raise NoJsonError("template_kwargs is not a JSON object: give one, or leave it out")
    for name in _OWN_VARIABLES:
        if name in variables:
            raise NoJsonError(f"template_kwargs has the key {name!r}, which a chat has a field for: use that")
    return variables


def _parsed(name: str, text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise NoJsonError(f"{name} is not JSON: {error}") from None


def _encoded(reason: str) -> bytes:
    return reason[:_MAX_REASON_CHARS].encode("utf-8", "replace")


def _allow_cpu() -> None:
    """Limit the CPU time from now on; the system ends the process at the limit."""
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (int(time.process_time()) + MAX_CPU_S + 1, hard))


def _read(requests: BinaryIO) -> bytes | None:
    head = requests.read(LENGTH.size)
    return requests.read(LENGTH.unpack(head)[0]) if len(head) == LENGTH.size else None


def _environment(now: Callable[[], datetime]) -> jinja2.Environment:
    """Environment with the extensions that authors of chat templates expect."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda format: now().strftime(format)
    return environment


class _GenerationTag(Extension):
    """`{% generation %}` marks the assistant's words for training. Here they are rendered like all others."""

    tags = {"generation"}  # noqa: RUF012  (the base class declares it so)

    def parse(self, parser: Parser) -> nodes.Node:
        lineno = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=lineno)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON; Jinja's own filter escapes it for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


if __name__ == "__main__":
    main(sys.stdin.buffer, sys.stdout.buffer)
