"""Flags of the running command by the SDK's keywords, so that errors name flags."""

import re
from contextvars import ContextVar
from typing import Any

from typer.core import TyperCommand

import quire
from quire.cli.plain_help import PlainCommand

_flags: ContextVar[dict[str, str]] = ContextVar("flags")
_KEYWORD = re.compile(r"(?<![-\w])[a-z]+(?:_[a-z]+)+(?!\w)")  # of several words: nothing else in a text looks like one
_FIELD = re.compile(r"(\w*)(.*)", re.DOTALL)


class Command(PlainCommand):
    """A command whose errors name its flags instead of keywords."""

    def invoke(self, ctx: Any) -> Any:
        """Runs the command."""
        token = _flags.set(flags_of(self))
        try:
            return super().invoke(ctx)
        finally:
            _flags.reset(token)


def flags_of(command: TyperCommand) -> dict[str, str]:
    """Flags of a command by keyword."""
    options = (each for each in command.params if each.param_type_name == "option")
    return {str(each.name): max(each.opts, key=len) for each in options}


def name_field(field: str, flag: str) -> None:
    """Has errors of the running command name a field of the wire by this flag."""
    if (flags := _flags.get(None)) is not None:
        flags[field] = flag


def in_flags(error: "quire.InvalidRequestError") -> str:
    """The message of an invalid request, with flags of the running command."""
    flags = _flags.get({})

    def flag_of(field: str) -> str:
        found = _FIELD.fullmatch(field)
        return field if found is None else flags.get(found[1], found[1]) + found[2]

    return with_flags(error.renamed(flag_of).message)


def with_flags(text: str) -> str:
    """A text with flags in place of keywords of several words."""
    flags = _flags.get({})
    return _KEYWORD.sub(lambda found: flags.get(found[0], found[0]), text)
