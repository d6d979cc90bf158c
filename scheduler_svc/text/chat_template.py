"""Renders a conversation with the model's own chat template, as the template's authors expect of it.

The template is a program that came with the model: it runs in a sandbox, and whatever goes wrong in it is a
refusal of the chat, never a failure of the scheduler. It knows no tokens.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from common.native_faults import CONTROL_FLOW, shortened
from quire.errors import FailedPreconditionError, FieldViolation, InvalidRequestError


class ChatTemplate:
    """A compiled template. A source that is not Jinja is reported when a chat is rendered: text still works."""

    def __init__(
        self,
        source: str,
        special_tokens: Mapping[str, str],
        *,
        now: Callable[[], datetime] = datetime.now,
    ) -> None:
        self._special_tokens = dict(special_tokens)
        self._template: jinja2.Template | None = None
        self._fault = ""
        try:
            self._template = _environment(now).from_string(source)
        except jinja2.TemplateSyntaxError as error:
            self._fault = f"line {error.lineno}: {error.message}"

    def render(self, messages: Sequence[Mapping[str, str]], *, add_generation_prompt: bool) -> str:
        """The text of the conversation, special tokens included.

        Raises:
            InvalidRequestError: The template refused the messages; its own message is passed on.
            FailedPreconditionError: The template is broken.
        """
        if self._template is None:
            raise FailedPreconditionError(
                f"the model's chat template is not valid Jinja ({self._fault}): send the prompt as text"
            )
        try:
            return self._template.render(
                **self._special_tokens,
                messages=[dict(each) for each in messages],
                tools=None,
                documents=None,
                add_generation_prompt=add_generation_prompt,
            )
        except CONTROL_FLOW:
            raise
        except BaseException as error:  # a program of others: it may raise anything
            raise _refusal(error) from error


def _refusal(error: BaseException) -> InvalidRequestError:
    description = f"the model's chat template refuses them: {shortened(error)}"
    return InvalidRequestError.of([FieldViolation("chat.messages", description)])


def _environment(now: Callable[[], datetime]) -> jinja2.Environment:
    """What the authors of chat templates take for granted."""
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
