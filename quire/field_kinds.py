"""Descriptions of what a protobuf field can hold, for errors about other values. Knows descriptors, no requests.

A field is a FieldDescriptor of the implementation that protobuf has chosen, which is a class of its own.
"""

from typing import Any

from google.protobuf.descriptor import FieldDescriptor

_INTEGERS = {
    FieldDescriptor.CPPTYPE_INT32: (-(2**31), 2**31 - 1),
    FieldDescriptor.CPPTYPE_INT64: (-(2**63), 2**63 - 1),
    FieldDescriptor.CPPTYPE_UINT32: (0, 2**32 - 1),
    FieldDescriptor.CPPTYPE_UINT64: (0, 2**64 - 1),
}
# One value, and several.
_NOUNS = {
    **dict.fromkeys(_INTEGERS, ("a whole number", "whole numbers")),
    FieldDescriptor.CPPTYPE_BOOL: ("True or False", "booleans"),
    FieldDescriptor.CPPTYPE_FLOAT: ("a number", "numbers"),
    FieldDescriptor.CPPTYPE_DOUBLE: ("a number", "numbers"),
    FieldDescriptor.CPPTYPE_STRING: ("a text", "texts"),
}
_MOST_SHOWN = 80  # characters of a value


def why_not(field: Any, value: Any, error: Exception) -> str:
    """Say what is wrong with a value that a field did not take, and what it takes."""
    if isinstance(error, UnicodeError):
        return "has characters that UTF-8 cannot encode, as text read with a wrong encoding has: give valid text"
    bounds = None if field.is_repeated else _INTEGERS.get(field.cpp_type)
    if bounds is not None and isinstance(value, int) and not isinstance(value, bool):
        low, high = bounds
        return f"is {value}: give " + (f"at most {high:,}" if value > high else f"at least {low:,}")
    return f"cannot be {repr(value)[:_MOST_SHOWN]}: give {kind_of(field)}"


def kind_of(field: Any) -> str:
    """Describe the values of a field: "a whole number", "a list of texts", "a dict of whole numbers to numbers"."""
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        entry = field.message_type.fields_by_name
        return f"a dict of {_nouns(entry['key'])[1]} to {_nouns(entry['value'])[1]}"
    one, several = _nouns(field)
    if not field.is_repeated:
        return one
    bounds = _INTEGERS.get(field.cpp_type)
    return f"a list of {several}" + ("" if bounds is None else f" from {bounds[0]:,} to {bounds[1]:,}")


def _nouns(field: Any) -> tuple[str, str]:
    if field.type == FieldDescriptor.TYPE_BYTES:
        return "bytes", "bytes"
    return _NOUNS.get(field.cpp_type, ("another value", "other values"))
