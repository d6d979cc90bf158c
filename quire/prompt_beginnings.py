"""Beginnings of prompts, by hashes that clients and schedulers compute alike: so they can say what is cached where.

Pure. The server's tokens are not needed: a hash is of text, token ids or a chat as they are sent, and of the tenant and
salt, without which nothing is shared. There is one for every 256 bytes up to 4 KiB, then for eight lengths
in each doubling, up to 64 KiB.
"""

import struct
from array import array
from collections.abc import Iterable, Sequence
from hashlib import blake2b
from itertools import pairwise
from typing import NamedTuple

from quire.v1 import inference_pb2 as pb

PIECE_BYTES = 256  # the shortest beginning
_MOST_BYTES = 256 * PIECE_BYTES  # the longest
_ID_BYTES = 4
_SHORT = 0xFFFF_FFFF

Prompt = str | Sequence[int] | pb.ChatPrompt


class Beginning(NamedTuple):
    """One beginning of a prompt."""

    num_bytes: int
    hash: int  # 64 bits

    @property
    def short_hash(self) -> int:
        """Hash as summaries of caches have it, of 32 bits."""
        return self.hash & _SHORT


def _lengths() -> list[int]:
    """Lengths of beginnings, in bytes."""
    fine = [*range(1, 16)]
    coarse = [n for step in (1, 2, 4, 8) for n in range(16 * step, 32 * step, 2 * step)]
    return [PIECE_BYTES * n for n in (*fine, *coarse, 256)]


LENGTHS = _lengths()
_STEPS = [(0, LENGTHS[0]), *pairwise(LENGTHS)]


def beginnings_of(prompt: Prompt, salt: str | None, tenant: str | None) -> list[Beginning]:
    """Beginnings of a prompt, the shortest first; none of a prompt that is shorter, or is none.

    Args:
        prompt: text, token ids or a chat.
        salt: cache_salt of the request.
        tenant: tenant of the request.
    """
    data = _first_bytes(prompt)
    if len(data) < PIECE_BYTES:
        return []
    owner = f"{tenant or ''}\0{salt or ''}\0".encode("utf-8", "surrogatepass")
    state = blake2b(owner, digest_size=8)
    found = []
    view = memoryview(data)
    for start, end in _STEPS:
        if end > len(data):
            break
        state.update(view[start:end])
        found.append(Beginning(end, int.from_bytes(state.digest(), "little")))
    return found


def num_bytes_of(prompt: Prompt) -> int:
    """Length of a prompt in the bytes that beginnings are cut from; of a chat about so many."""
    if isinstance(prompt, str):
        return len(prompt) if prompt.isascii() else len(prompt.encode("utf-8", "surrogatepass"))
    return prompt.ByteSize() if isinstance(prompt, pb.ChatPrompt) else _ID_BYTES * len(prompt)


def pack_hashes(hashes: Iterable[int]) -> bytes:
    """Short hashes as summaries carry them."""
    numbers = sorted(hashes)
    return struct.pack(f"<{len(numbers)}I", *numbers)


def unpack_hashes(packed: bytes) -> frozenset[int]:
    """Short hashes of a summary; none of one that is damaged."""
    num_hashes, rest = divmod(len(packed), 4)
    return frozenset() if rest else frozenset(struct.unpack(f"<{num_hashes}I", packed))


def _first_bytes(prompt: Prompt) -> bytes:
    """Bytes of the longest beginning."""
    if isinstance(prompt, str):
        return prompt[:_MOST_BYTES].encode("utf-8", "surrogatepass")[:_MOST_BYTES]
    if isinstance(prompt, pb.ChatPrompt):
        return _first_bytes_of_chat(prompt)
    try:
        return _little_endian(array("i", prompt[: _MOST_BYTES // _ID_BYTES]))
    except (TypeError, ValueError, OverflowError):  # no token ids; it will be refused
        return b""


def _first_bytes_of_chat(prompt: pb.ChatPrompt) -> bytes:
    """Tools and messages, in the order in which templates write them."""
    data = bytearray(prompt.tools.encode())
    for message in prompt.messages:
        if len(data) >= _MOST_BYTES:
            break
        data += message.SerializeToString(deterministic=True)
    return bytes(data[:_MOST_BYTES])


def _little_endian(numbers: "array[int]") -> bytes:
    if struct.pack("=i", 1) != struct.pack("<i", 1):
        numbers.byteswap()
    return numbers.tobytes()
