"""Blocks on their way from one worker to another: the key of a read, and the frames that carry the blocks.

A frame is a `ReadBlocksResponse`, made and opened by hand: protobuf takes 6 ms for each megabyte, and holds the
interpreter's lock meanwhile, which steps need. Knows nothing of what is in a block.
"""

import hashlib
import hmac
from typing import NamedTuple
from zlib import crc32

from quire.checksum import SEAL_BYTES, is_intact, seal_of, tag_of
from quire.errors import DataLossError
from quire.v1 import worker_pb2 as pb

FRAME_BYTES = 1 << 20  # of the blocks in a frame, or one block

_VARINT, _LENGTH = 0, 2  # wire types
_SEAL_TAG = tag_of(pb.ReadBlocksResponse.DESCRIPTOR)
_FIRST_TAG = pb.ReadBlocksResponse.FIRST_FIELD_NUMBER << 3 | _VARINT
_BLOCKS_TAG = pb.ReadBlocksResponse.BLOCKS_FIELD_NUMBER << 3 | _LENGTH


class BlockFrame(NamedTuple):
    """Some blocks, one after the other."""

    first: int  # index in the request of the first one
    blocks: memoryview


def read_key(step_key: str, epoch: int, incarnation: str, block_ids: bytes) -> str:
    """The `read_key` of a request: only who knows the source's step key can make it, for these blocks alone."""
    text = f"read:{epoch}:{incarnation}:".encode() + block_ids
    return hmac.new(step_key.encode(), text, hashlib.sha256).hexdigest()


def has_read_key(request: pb.ReadBlocksRequest, step_key: str) -> bool:
    """True if a request has the right key; how long the answer takes says nothing of the right one."""
    right = read_key(step_key, request.epoch, request.incarnation, request.block_ids)
    return hmac.compare_digest(request.read_key.encode(), right.encode())


def make_frame(first: int, blocks: bytes | memoryview) -> bytes:
    """Serialise a frame. The blocks are copied once."""
    head = _varint_field(_FIRST_TAG, first) if first else b""
    head += _varint_field(_BLOCKS_TAG, len(blocks))
    return b"".join([head, blocks, seal_of(crc32(blocks, crc32(head)), _SEAL_TAG)])


def open_frame(data: bytes) -> BlockFrame:
    """Check a frame and parse it, without a copy. Raises DataLossError."""
    if not is_intact(data, _SEAL_TAG):
        raise DataLossError(f"a frame of {len(data):,} bytes does not match its checksum, or has none")
    first, at = 0, 0
    if data[0] == _FIRST_TAG:
        first, at = _read_varint(data, 1)
    length, begin = _read_varint(data, at + 1)
    end = len(data) - SEAL_BYTES
    if data[at] != _BLOCKS_TAG or begin + length != end:
        raise DataLossError(f"a frame of {len(data):,} bytes is not what a worker sends")
    return BlockFrame(first, memoryview(data)[begin:end])


def _varint_field(tag: int, value: int) -> bytes:
    made = bytearray([tag])
    while value > 0x7F:
        made.append(value & 0x7F | 0x80)
        value >>= 7
    made.append(value)
    return bytes(made)


def _read_varint(data: bytes, at: int) -> tuple[int, int]:
    """The number at this place, and the place behind it; 0 where none is."""
    value = 0
    for shift, byte in zip(range(0, 35, 7), data[at : at + 5], strict=False):
        value |= (byte & 0x7F) << shift
        at += 1
        if byte < 0x80:
            return value, at
    return 0, at
