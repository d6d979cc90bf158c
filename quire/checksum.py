"""Checksums within messages: CRC-32 of a message's bytes as its last field on the wire.

The checksum is appended to the serialised message and read from the raw bytes, so that nothing is serialised twice and
nothing damaged is parsed. CRC-32 finds every single flipped bit. Knows messages only by their field `checksum`.
"""

import struct
from typing import Any
from zlib import crc32

from google.protobuf.descriptor import Descriptor

_FIXED32 = 5  # the wire type
_CHECKSUM = struct.Struct("<BI")  # the field's tag, one byte below number 16, and its value
SEAL_BYTES = _CHECKSUM.size


def tag_of(descriptor: Descriptor) -> int:
    """The tag of a message's field `checksum`. Raises KeyError if it has none."""
    return descriptor.fields_by_name["checksum"].number << 3 | _FIXED32


def sealed(message: Any, tag: int) -> bytes:
    """Serialise a message that has no checksum yet, and append it."""
    data: bytes = message.SerializeToString()
    return data + seal_of(crc32(data), tag)


def seal_of(checksum: int, tag: int) -> bytes:
    """The field that follows bytes with this checksum."""
    return _CHECKSUM.pack(tag, checksum)


def has_seal(data: bytes, tag: int) -> bool:
    """True if the bytes end as a sealed message does; bytes of an unsealed message may, too."""
    return len(data) >= _CHECKSUM.size and data[-_CHECKSUM.size] == tag


def is_intact(data: bytes, tag: int) -> bool:
    """True if the bytes are a sealed message with the right checksum."""
    covered = len(data) - _CHECKSUM.size
    return covered >= 0 and _CHECKSUM.unpack_from(data, covered) == (tag, crc32(memoryview(data)[:covered]))
