"""Requests whose one field is at its bound, or one beyond it, made from descriptors and the table of bounds."""

from collections.abc import Iterator
from typing import Any

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from common.bounds import BOUNDS, WRAPPERS

Path = tuple[FieldDescriptor, ...]


def is_map(field: FieldDescriptor) -> bool:
    return field.message_type is not None and field.message_type.GetOptions().map_entry


def bounded_paths(descriptor: Descriptor, above: Path = ()) -> Iterator[tuple[Path, FieldDescriptor]]:
    """Each field with a bound, and the fields through which it is reached."""
    for each in descriptor.fields:
        if each.full_name in BOUNDS:
            yield above, each
        if each.message_type is not None and not is_map(each):
            yield from bounded_paths(each.message_type, (*above, each))


def beyond(field: FieldDescriptor, *, by: int) -> Any:
    """A value that is longer than its bound by so much: of a list of text, one of its items."""
    bound = BOUNDS[field.full_name]
    if field.type == FieldDescriptor.TYPE_BYTES:
        return b"x" * ((bound.max_bytes or 0) + by)
    if field.is_repeated and bound.max_bytes is not None:
        return ["x" * (bound.max_bytes + by)]
    if bound.max_items is not None:
        num_items = bound.max_items + by
        if is_map(field):
            return dict.fromkeys(range(num_items), 1.0)
        return [GetMessageClass(field.message_type)()] * num_items if field.message_type else [1] * num_items
    return "ü" * (bound.max_chars + by) if bound.max_chars is not None else "x" * ((bound.max_bytes or 0) + by)


def message_at(descriptor: Descriptor, path: Path, field: FieldDescriptor, value: Any) -> tuple[Message, str]:
    """A message with this value there, and the path to it as a user reads it."""
    made = message = GetMessageClass(descriptor)()
    shown = []
    for each in path:
        message = getattr(message, each.name).add() if each.is_repeated else getattr(message, each.name)
        if each.full_name not in WRAPPERS:
            shown.append(f"{each.name}[0]" if each.is_repeated else each.name)
    if is_map(field):
        getattr(message, field.name).update(value)
    elif field.is_repeated:
        getattr(message, field.name).extend(value)
    else:
        setattr(message, field.name, value)
    text_of_list = field.is_repeated and BOUNDS[field.full_name].max_bytes is not None
    return made, ".".join([*shown, f"{field.name}[0]" if text_of_list else field.name])
