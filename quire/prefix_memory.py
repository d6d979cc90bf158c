"""Memory of prompts by their beginnings: which shard got a prompt that began alike, and so may have its blocks.

Pure. A prompt is cut into pieces of 256 bytes, and each piece is known by a hash of it and everything before it, as the
blocks of the cache are; the server's tokens are not needed for that.
"""

from array import array
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from hashlib import blake2b

from quire.v1 import inference_pb2 as pb

_PIECE_BYTES = 256
_MOST_PIECES = 512  # of a prompt
_MOST_KNOWN = 1 << 16  # pieces of all prompts, about 8 MB


class PrefixMemory:
    """Shards by the pieces that they got; the pieces that were not seen for longest are forgotten."""

    def __init__(self) -> None:
        self._shard_of: OrderedDict[bytes, int] = OrderedDict()

    def find(self, pieces: Sequence[bytes]) -> int | None:
        """Number of the shard that got the longest beginning of these pieces last; None: none got the first one."""
        found = None
        for piece in pieces:
            shard = self._shard_of.get(piece)
            if shard is None:
                break
            found = shard
        return found

    def record(self, pieces: Sequence[bytes], shard: int) -> None:
        """Record that a shard gets a prompt of these pieces."""
        for piece in pieces:
            self._shard_of[piece] = shard
            self._shard_of.move_to_end(piece)
        while len(self._shard_of) > _MOST_KNOWN:
            self._shard_of.popitem(last=False)


def pieces_of(prompt: "str | Sequence[int] | pb.ChatPrompt", salt: str | None) -> list[bytes]:
    """Hashes of a prompt's pieces, whole ones alone, each with everything before it.

    Args:
        prompt: text, token ids or a chat.
        salt: cache_salt of the request: prompts of different salts share nothing.
    """
    state = blake2b((salt or "").encode("utf-8", "surrogatepass"), digest_size=16)
    hashes = []
    for piece in _pieces(prompt):
        state.update(piece)
        hashes.append(state.digest())
    return hashes


def _pieces(prompt: "str | Sequence[int] | pb.ChatPrompt") -> Iterator[bytes]:
    if isinstance(prompt, str):
        data = prompt[: _MOST_PIECES * _PIECE_BYTES].encode("utf-8", "surrogatepass")
    elif isinstance(prompt, pb.ChatPrompt):
        data = _chat(prompt)
    else:
        try:
            data = array("q", prompt[: _MOST_PIECES * _PIECE_BYTES // 8]).tobytes()
        except (TypeError, ValueError, OverflowError):  # no token ids; it will be refused
            return
    for start in range(0, min(len(data), _MOST_PIECES * _PIECE_BYTES) - _PIECE_BYTES + 1, _PIECE_BYTES):
        yield data[start : start + _PIECE_BYTES]


def _chat(prompt: pb.ChatPrompt) -> bytes:
    """Tools and messages in the order in which templates write them."""
    data = bytearray(prompt.tools.encode())
    for message in prompt.messages:
        data += message.SerializeToString(deterministic=True)
        if len(data) >= _MOST_PIECES * _PIECE_BYTES:
            break
    return bytes(data)
