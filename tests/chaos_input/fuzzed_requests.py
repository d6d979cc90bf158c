"""Requests as a broken or hostile client would send them, from a seed: wrong values in right fields, wrong bytes.

It knows the message's descriptor and nothing of what is allowed.
"""

import math
import random
import struct
from collections.abc import Iterator
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from quire.v1 import inference_pb2 as pb

_FLOATS = (math.nan, math.inf, -math.inf, -1.0, -0.0, 0.0, 0.5, 1.0, 1e-45, 3e38)
_INTEGERS = (0, 1, -1, 2, 7, 255, 2**31 - 1, -(2**31), 2**32 - 1, 2**63 - 1, -(2**63), 2**64 - 1)
_STRINGS = ("", "x", "a\x00b", "\u202e", "👋🏽", "../../etc", "{{ 7 * 7 }}", "x" * 300, "<|im_end|>")
_UNKNOWN_FIELD = b"\xaa\xfa\x01\x03abc"  # number 4005


def fuzz(num_requests: int, seed: int) -> Iterator[bytes]:
    """Serialised requests, about a third of them with bytes changed, cut or put in."""
    rng = random.Random(seed)
    for _ in range(num_requests):
        request = pb.GenerateRequest()
        _fill(request, rng, depth=0)
        if request.stopping.max_tokens > 8 or not request.stopping.HasField("max_tokens"):
            request.stopping.max_tokens = rng.randrange(1, 8)  # what is let in should end soon
        data = request.SerializeToString()
        yield _damaged(data, rng) if rng.random() < 0.35 else data


def _fill(message: Message, rng: random.Random, depth: int) -> None:
    for field in message.DESCRIPTOR.fields:
        if rng.random() < (0.5 if depth else 0.4):
            _set(message, field, rng, depth)


def _set(message: Message, field: Any, rng: random.Random, depth: int) -> None:
    value: Any = getattr(message, field.name)
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        for _ in range(rng.choice((0, 1, 3, 1100))):
            value[rng.randrange(-2, 600)] = rng.choice(_FLOATS)
    elif field.is_repeated and field.message_type is not None:
        for _ in range(rng.choice((0, 1, 3))):
            _fill(value.add(), rng, depth + 1)
    elif field.is_repeated:
        value.extend(_scalar(field, rng) for _ in range(rng.choice((0, 1, 4, 300))))
    elif field.message_type is not None:
        _fill(value, rng, depth + 1)
    else:
        setattr(message, field.name, _scalar(field, rng))


def _scalar(field: Any, rng: random.Random) -> Any:
    if field.type == FieldDescriptor.TYPE_STRING:
        return rng.choice(_STRINGS)
    if field.type == FieldDescriptor.TYPE_BYTES:
        return rng.randbytes(rng.randrange(8))
    if field.type == FieldDescriptor.TYPE_BOOL:
        return rng.random() < 0.5
    if field.type in (FieldDescriptor.TYPE_FLOAT, FieldDescriptor.TYPE_DOUBLE):
        return rng.choice(_FLOATS)
    low, high = _RANGES[field.type]
    fitting = [each for each in _INTEGERS if low <= each <= high]
    return rng.choice(fitting) if rng.random() < 0.4 else rng.randrange(0, 5)


_RANGES = {
    FieldDescriptor.TYPE_INT32: (-(2**31), 2**31 - 1),
    FieldDescriptor.TYPE_ENUM: (-(2**31), 2**31 - 1),
    FieldDescriptor.TYPE_UINT32: (0, 2**32 - 1),
    FieldDescriptor.TYPE_INT64: (-(2**63), 2**63 - 1),
    FieldDescriptor.TYPE_UINT64: (0, 2**64 - 1),
}


def _damaged(data: bytes, rng: random.Random) -> bytes:
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
            return data + _UNKNOWN_FIELD
        case _:
            return struct.pack("<I", rng.getrandbits(32)) + data
