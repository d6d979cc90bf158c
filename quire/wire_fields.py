"""Fields of requests: set from values of any kind, or refused by the keyword that the caller typed."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from google.protobuf.message import Message

from quire.errors import FieldViolation, InvalidRequestError
from quire.field_kinds import why_not
from quire.keywords import keyword_of


def set_field(message: Message, path: str, name: str, value: Any) -> None:
    """Sets one field of any kind; None leaves it absent."""
    if value is None:
        return
    if name == "stop" and isinstance(value, str):
        value = [value]
    try:
        if isinstance(value, Mapping):
            getattr(message, name).update(value)
        elif isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
            getattr(message, name).extend(value)
        else:
            setattr(message, name, value)
    except (TypeError, ValueError, AttributeError, OverflowError) as error:
        raise invalid_field(path + name, why_not(message.DESCRIPTOR.fields_by_name[name], value, error)) from error


def json_field(field: str, value: object) -> str:
    """JSON of the value of a field; keys keep their order."""
    try:
        return json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise invalid_field(field, f"is no JSON: {error}") from error


def invalid_field(field: str, description: str) -> InvalidRequestError:
    """The error for a field by its path; it names the keyword."""
    return InvalidRequestError.of([FieldViolation(keyword_of(field, "prompt"), description)])
