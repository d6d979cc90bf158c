"""The flags of the command that runs, by the keywords that they set: errors name what the user typed."""

import re
from contextvars import ContextVar
from typing import Any

from typer.core import TyperCommand

import quire

_flags: ContextVar[dict[str, str]] = ContextVar("flags")
_KEYWORD = re.compile(r"(?<![-\w])[a-z]+(?:_[a-z]+)+(?!\w)")  # of several words: nothing else in a text looks so
_FIELD = re.compile(r"(\w*)(.*)", re.DOTALL)


class Command(TyperCommand):
    """A command during which keywords are spoken of as its flags."""

    def invoke(self, ctx: Any) -> Any:
        """Runs it."""
        token = _flags.set(flags_of(self))
        try:
            return super().invoke(ctx)
        finally:
            _flags.reset(token)


def flags_of(command: TyperCommand) -> dict[str, str]:
    """By keyword."""
    options = (each for each in command.params if each.param_type_name == "option")
    return {str(each.name): max(each.opts, key=len) for each in options}


def in_flags(error: "quire.InvalidRequestError") -> str:
    """What is wrong with a request, by the flags of the command that runs."""
    flags = _flags.get({})

    def flag_of(field: str) -> str:
        found = _FIELD.fullmatch(field)
        return field if found is None else flags.get(found[1], found[1]) + found[2]

    return with_flags(error.renamed(flag_of).message)


def with_flags(text: str) -> str:
    """A text with flags in place of keywords of several words."""
    flags = _flags.get({})
    return _KEYWORD.sub(lambda found: flags.get(found[0], found[0]), text)
