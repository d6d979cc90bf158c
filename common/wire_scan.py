"""Counts the items of lists in a serialised message, and its records in all, before it is parsed.

An empty message of 2 bytes takes 50 once it is parsed: 16 MB of them would take half a gigabyte. Lists that are too
long are found here as bytes. Knows the wire format and a plan of fields, and no message of ours.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

MOST_RECORDS = 262_144  # scanned in 0.1 s; a packed list is one record

_VARINT, _FIXED64, _LENGTH, _FIXED32 = 0, 1, 2, 5


@dataclass(slots=True)
class ScannedField:
    """A length-delimited field. `max_items`: of a list, None for a single message; `fields`: of a message."""

    name: str
    max_items: int | None = None
    fields: "Mapping[int, ScannedField]" = field(default_factory=dict)  # by number


@dataclass(frozen=True, slots=True)
class Excess:
    """A list with more items than it may have, or, `of_records`, the list or part where the message has too many."""

    path: str
    max_items: int
    of_records: bool = False

    @property
    def words(self) -> str:
        """Words for what is too much."""
        return f"has more than {self.max_items:,} {'fields in all' if self.of_records else 'items'}"


class TooManyRecordsError(ValueError):
    """The message has more records at its top level than any of ours in all."""


@dataclass(slots=True)
class WireScan:
    """The scan of one message: item counts, and the top level's numbers as unsigned integers, by field."""

    numbers: dict[int, int] = field(default_factory=dict)
    excess: Excess | None = None
    _counts: dict[str, int] = field(default_factory=dict)
    _num_records: int = 0

    def scan_message(self, data: bytes, fields: Mapping[int, ScannedField]) -> None:
        """Count until a list has too many items, or the message too many records; then read only the top level.

        Its integers say which message it is, wherever they stand among its fields.

        Raises TooManyRecordsError, and IndexError or ValueError for bytes that are no message.
        """
        self._walk(data, 0, len(data), fields, "", is_top=True)

    def _walk(
        self, data: bytes, at: int, end: int, fields: Mapping[int, ScannedField], prefix: str, *, is_top: bool = False
    ) -> None:
        while at < end:
            self._num_records += 1
            if self._num_records > MOST_RECORDS:
                if is_top and self.excess is not None:
                    raise TooManyRecordsError
                self.excess = Excess(prefix.partition("[")[0], MOST_RECORDS, of_records=True)
                if not is_top:
                    return
                self._num_records = 0  # as below
            tag, at = _varint(data, at)
            wire_type = tag & 7
            if wire_type == _LENGTH:
                length, at = _varint(data, at)
                stop = at + length
                if stop > end:
                    raise ValueError("cut short")
                found = fields.get(tag >> 3) if self.excess is None else None
                if found is not None:
                    self._enter(data, at, stop, found, prefix)
                    if self.excess is not None:
                        if not is_top:
                            return
                        self._num_records = 0  # of the top level alone, which is all that is read from here on
                at = stop
            elif wire_type == _VARINT:
                value, at = _varint(data, at)
                if is_top:
                    self.numbers[tag >> 3] = value
            elif wire_type in (_FIXED64, _FIXED32):
                start, at = at, at + (8 if wire_type == _FIXED64 else 4)
                if is_top:
                    self.numbers[tag >> 3] = int.from_bytes(data[start:at], "little")
            else:
                raise ValueError("a group, which no message of ours has")

    def _enter(self, data: bytes, at: int, stop: int, found: ScannedField, prefix: str) -> None:
        path = f"{prefix}.{found.name}" if prefix and found.name else prefix or found.name
        if found.max_items is not None:
            count = self._counts[path] = self._counts.get(path, 0) + 1
            if count > found.max_items:
                self.excess = Excess(path, found.max_items)
                return
            path = f"{path}[{count - 1}]"
        if found.fields:
            self._walk(data, at, stop, found.fields, path)


def _varint(data: bytes, at: int) -> tuple[int, int]:
    byte = data[at]
    if byte < 128:
        return byte, at + 1
    value, shift = byte & 127, 7
    while True:
        at += 1
        byte = data[at]
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at + 1
        shift += 7
        if shift > 63:
            raise ValueError("no varint")
