"""Bytes as a broken or hostile client would send them for any message, made from its descriptor and a seed.

Wrong values in right fields, lists and strings beyond their bounds, unknown fields at any depth, damaged bytes. It
knows descriptors and the table of bounds, and nothing of what is allowed.
"""

import math
import random
import struct
from typing import Any

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from tests.bounded_fields import beyond, bounded_paths, is_map, message_at

UNKNOWN_FIELD = b"\xaa\xfa\x01\x03abc"  # number 4005
MOST_DEPTH = 5000
_LARGEST = 1_000_000  # bytes of a field at its bound; larger ones take most of the time and find no more

_FLOATS = (math.nan, math.inf, -math.inf, -1.0, -0.0, 0.0, 0.5, 1.0, 1e-45, 3e38)
_INTEGERS = (0, 1, -1, 2, 7, 255, 2**31 - 1, -(2**31), 2**32 - 1, 2**63 - 1, -(2**63), 2**64 - 1)
_STRINGS = (
    "",
    "x",
    "a\x00b",
    "\u202e",
    "👋🏽",
    "../../etc",
    "{{ 7 * 7 }}",
    "x" * 300,
    "<|im_end|>",
    "fuzz-1",
    "fuzz-2",
)
_RANGES = {
    FieldDescriptor.TYPE_INT32: (-(2**31), 2**31 - 1),
    FieldDescriptor.TYPE_ENUM: (-(2**31), 2**31 - 1),
    FieldDescriptor.TYPE_UINT32: (0, 2**32 - 1),
    FieldDescriptor.TYPE_FIXED32: (0, 2**32 - 1),
    FieldDescriptor.TYPE_INT64: (-(2**63), 2**63 - 1),
    FieldDescriptor.TYPE_UINT64: (0, 2**64 - 1),
}


def fuzzed(descriptor: Descriptor, rng: random.Random, valid: Message | None = None) -> bytes:
    """One message of this type, or what is to be taken for one; half of them `valid` but for a field or two."""
    kind = rng.random()
    if kind < 0.15 and (paths := list(bounded_paths(descriptor))):
        path, field = rng.choice(paths)
        value = beyond(field, by=rng.randrange(2))
        if len(value) <= _LARGEST:
            return message_at(descriptor, path, field, value)[0].SerializeToString()
    message = GetMessageClass(descriptor)()
    if valid is not None and rng.random() < 0.5:
        message.CopyFrom(valid)
        fields: Any = descriptor.fields
        for field in rng.sample(list(fields), rng.randrange(min(3, len(fields) + 1))):
            _set(message, field, rng, 0)
    else:
        fill(message, rng)
    data = message.SerializeToString()
    if kind < 0.35:
        return damaged(data, rng)
    return data + unknown(rng) if kind < 0.45 else data


def fill(message: Message, rng: random.Random, depth: int = 0) -> None:
    """Gives some fields any values, short of what takes much memory."""
    descriptor: Any = message.DESCRIPTOR
    for field in descriptor.fields:
        if rng.random() < (0.5 if depth else 0.4):
            _set(message, field, rng, depth)


def damaged(data: bytes, rng: random.Random) -> bytes:
    """The bytes cut, with others put in, with a flipped bit, or with some before or behind them."""
    place = rng.randrange(len(data) + 1)
    match rng.randrange(5):
        case 0:
            return data[:place]
        case 1:
            return data[:place] + rng.randbytes(rng.randrange(1, 5)) + data[place:]
        case 2 if data:
            place = min(place, len(data) - 1)
            return data[:place] + bytes([data[place] ^ 1 << rng.randrange(8)]) + data[place + 1 :]
        case 3:
            return data + UNKNOWN_FIELD
        case _:
            return struct.pack("<I", rng.getrandbits(32)) + data


def unknown(rng: random.Random) -> bytes:
    """A field that no message has: of any wire type, nested, large, or thousands of them."""
    match rng.randrange(5):
        case 0:
            depth = rng.choice((1, 20, 99, 101, MOST_DEPTH))
            return b"\xab\xfa\x01" * depth + b"\xac\xfa\x01" * depth  # groups within groups
        case 1:
            data = b""
            for _ in range(rng.choice((1, 50, 500))):
                data = b"\xaa\xfa\x01" + _varint(len(data)) + data
            return data
        case 2:
            return b"\xa8\xfa\x01\x01" * rng.choice((1, 1000, 100_000))
        case 3:
            size = rng.choice((0, 100, 200_000))
            return b"\xaa\xfa\x01" + _varint(size) + bytes(size)
        case _:
            return b"\xad\xfa\x01" + rng.randbytes(4) + b"\xa9\xfa\x01" + rng.randbytes(8)


def _set(message: Message, field: Any, rng: random.Random, depth: int) -> None:
    value: Any = getattr(message, field.name)
    if is_map(field):
        for _ in range(rng.choice((0, 1, 3, 1100))):
            value[rng.randrange(-2, 600)] = rng.choice(_FLOATS)
    elif field.is_repeated and field.message_type is not None:
        for _ in range(rng.choice((0, 1, 3))):
            fill(value.add(), rng, depth + 1)
    elif field.is_repeated:
        value.extend(_scalar(field, rng) for _ in range(rng.choice((0, 1, 4, 300))))
    elif field.message_type is not None:
        fill(value, rng, depth + 1)
    else:
        setattr(message, field.name, _scalar(field, rng))


def _scalar(field: Any, rng: random.Random) -> Any:
    if field.type == FieldDescriptor.TYPE_STRING:
        return rng.choice(_STRINGS)
    if field.type == FieldDescriptor.TYPE_BYTES:
        return rng.choice(
            (rng.randbytes(rng.randrange(8)), struct.pack("<4i", *(rng.randrange(-1, 9) for _ in "4444")))
        )
    if field.type == FieldDescriptor.TYPE_BOOL:
        return rng.random() < 0.5
    if field.type in (FieldDescriptor.TYPE_FLOAT, FieldDescriptor.TYPE_DOUBLE):
        return rng.choice(_FLOATS)
    low, high = _RANGES[field.type]
    fitting = [each for each in _INTEGERS if low <= each <= high]
    return rng.choice(fitting) if rng.random() < 0.4 else rng.randrange(0, 5)


def _varint(value: int) -> bytes:
    out = b""
    while value > 127:
        out += bytes([value & 127 | 128])
        value >>= 7
    return out + bytes([value])
