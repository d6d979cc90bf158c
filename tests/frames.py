"""HTTP/2 frames within a piece of a connection's bytes: finds and damages one. Knows a piece that begins with one."""

from collections.abc import Iterator
from dataclasses import dataclass

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, SETTINGS = 0, 4
MAX_CONCURRENT_STREAMS = 3
_HEAD_BYTES = 9
_SETTING_BYTES = 6


@dataclass(frozen=True, slots=True)
class Frame:
    """A whole frame, which begins at `start` of its piece."""

    start: int
    kind: int
    payload: bytes

    @property
    def payload_start(self) -> int:
        return self.start + _HEAD_BYTES


def frames_of(piece: bytes) -> Iterator[Frame]:
    """Parse the complete frames of a piece that begins with one."""
    start = len(PREFACE) if piece.startswith(PREFACE) else 0
    while start + _HEAD_BYTES <= len(piece):
        behind = start + _HEAD_BYTES + int.from_bytes(piece[start : start + 3], "big")
        yield Frame(start, piece[start + 3], piece[start + _HEAD_BYTES : behind])
        start = behind


def with_no_streams_allowed(piece: bytes) -> bytes:
    """MAX_CONCURRENT_STREAMS becomes 0, by one bit if it was a power of two."""
    for frame in frames_of(piece):
        for at in range(0, len(frame.payload) if frame.kind == SETTINGS else 0, _SETTING_BYTES):
            if int.from_bytes(frame.payload[at : at + 2], "big") == MAX_CONCURRENT_STREAMS:
                value = frame.payload_start + at + 2
                return piece[:value] + bytes(4) + piece[value + 4 :]
    return piece


def with_lost_message(piece: bytes, holding: bytes = b"") -> bytes:
    """The first message that holds this goes to a stream that is none: one bit of its frame's stream id is another."""
    for frame in frames_of(piece):
        if frame.kind == DATA and frame.payload and holding in frame.payload:
            return flipped(piece, frame.start + 7, 0x40)
    return piece


def with_flip_in(piece: bytes, words: bytes) -> bytes:
    """The last letter of these words is another one."""
    found = piece.find(words)
    return flipped(piece, found + len(words) - 1, 1) if found >= 0 else piece


def flipped(piece: bytes, at: int, bits: int) -> bytes:
    return piece[:at] + bytes([piece[at] ^ bits]) + piece[at + 1 :]
