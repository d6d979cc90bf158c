"""Applies the table of bounds to requests at the edge: parses what is within bounds, and drops unknown fields.

A refusal names each field by its path and its bound, and never repeats the value. The check costs a few microseconds
for a usual request, and nothing for messages whose handler checks them (`CHECKED_BY_HANDLER`).
"""

from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import Any

from google.protobuf import descriptor_pool
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message

from common.bounds import BOUNDS, CHECKED_BY_HANDLER, FOREIGN, WRAPPERS, Bound
from common.quick_bounds import BoundedField, QuickBounds
from common.violations import Violations, refusal_of
from common.wire_scan import Excess, ScannedField, TooManyRecordsError, WireScan
from quire.errors import InvalidRequestError

OURS = "quire.v1."
SCANNED_FROM_BYTES = 65_536  # smaller messages are parsed at once: they cannot take much memory

_NO_BOUND = Bound()
_NUMBERS = frozenset(
    {
        FieldDescriptor.CPPTYPE_INT32,
        FieldDescriptor.CPPTYPE_INT64,
        FieldDescriptor.CPPTYPE_UINT32,
        FieldDescriptor.CPPTYPE_UINT64,
    }
)


class OutOfBoundsError(InvalidRequestError):
    """A request with fields beyond their bounds. `numbers`: its top-level integers, by field name."""

    numbers: Mapping[str, int]

    @classmethod
    def of_message(cls, error: InvalidRequestError, numbers: Mapping[str, int]) -> "OutOfBoundsError":
        """Copy of the refusal, with the integers that identify the message."""
        made = cls(error.message, error.violations)
        made.numbers = numbers
        return made


class RequestCheck:
    """The check of one type of request."""

    def __init__(self, descriptor: Descriptor) -> None:
        self._fields = bounded_fields(descriptor)
        self._quick = QuickBounds(self._fields)
        self._scanned = _scanned(self._fields)
        self._is_checked_by_handler = descriptor.full_name in CHECKED_BY_HANDLER
        self._number_names = {
            each.number: each.name for each in descriptor.fields if each.cpp_type in _NUMBERS and not each.is_repeated
        }

    def parse(self, data: bytes, deserialize: Callable[[bytes], Any]) -> Any:
        """Parse a message that is within bounds, and drop its unknown fields.

        Raises OutOfBoundsError, InvalidRequestError, and what `deserialize` raises.
        """
        if self._is_checked_by_handler:
            return deserialize(data)
        self.scan(data)
        message = deserialize(data)
        message.DiscardUnknownFields()
        if not self._quick.allow(message, len(data)):
            self.check(message)
        return message

    def check(self, message: Message) -> None:
        """Raises OutOfBoundsError with all fields that are beyond their bounds."""
        violations = Violations()
        violations.add_each(_beyond(message, self._fields, ""))
        try:
            violations.raise_if_any()
        except InvalidRequestError as error:
            numbers = {name: getattr(message, name) for name in self._number_names.values()}
            raise OutOfBoundsError.of_message(error, numbers) from None

    def scan(self, data: bytes) -> None:
        """Raises OutOfBoundsError for what is too much to be parsed, InvalidRequestError for bytes that are none."""
        if len(data) <= SCANNED_FROM_BYTES:
            return
        scan = WireScan()
        try:
            scan.scan_message(data, self._scanned)
        except TooManyRecordsError:
            raise InvalidRequestError("the message has too many fields; send lists of numbers packed") from None
        except (IndexError, ValueError):
            raise undecodable_request() from None
        if scan.excess is not None:
            numbers = {name: scan.numbers.get(number, 0) for number, name in self._number_names.items()}
            raise OutOfBoundsError.of_message(_too_many(scan.excess), numbers)


@cache
def check_of(descriptor: Descriptor) -> RequestCheck:
    """The check of a type of request, made once."""
    return RequestCheck(descriptor)


def check_of_method(method: str) -> RequestCheck | None:
    """The check of an RPC's request, by its path "/package.Service/Method"; None if its service has no descriptor."""
    try:
        found = descriptor_pool.Default().FindMethodByName(method.strip("/").replace("/", "."))
    except KeyError:
        return None
    return check_of(found.input_type)


def undecodable_request() -> InvalidRequestError:
    """The refusal of bytes that cannot be parsed."""
    return InvalidRequestError(
        "the request's bytes are not the message that this method takes; regenerate the client's stubs"
    )


def bounded_fields(descriptor: Descriptor) -> dict[int, BoundedField]:
    """Fields to check, by number. A recursive message (we have none) is checked at its first level only."""
    return _fields_below(descriptor, frozenset())


def _fields_below(descriptor: Descriptor, above: frozenset[str]) -> dict[int, BoundedField]:
    if descriptor.full_name in above:
        return {}
    made = {}
    for each in descriptor.fields:
        is_map = _is_map(each)
        bound = BOUNDS.get(each.full_name) or (_NO_BOUND if each.full_name.startswith(OURS) else FOREIGN)
        is_text = each.type in (FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_BYTES)
        below: dict[int, BoundedField] = {}
        if each.message_type is not None and not is_map and descriptor.full_name not in CHECKED_BY_HANDLER:
            below = _fields_below(each.message_type, above | {descriptor.full_name})
        if below or is_text or each.is_repeated:
            shown = "" if each.full_name in WRAPPERS else each.name
            made[each.number] = BoundedField(each.name, shown, bound, each.is_repeated, is_text, below)
    return made


def _scanned(fields: Mapping[int, BoundedField]) -> dict[int, ScannedField]:
    """The fields that are lists of length-delimited items, or messages that contain such lists."""
    made = {}
    for number, each in fields.items():
        below = _scanned(each.fields)
        counts = each.is_list and each.bound.max_items is not None
        if counts or below:
            made[number] = ScannedField(each.shown, each.bound.max_items if counts else None, below)
    return made


def _beyond(message: Message, fields: Mapping[int, BoundedField], prefix: str) -> Iterator[tuple[str, str]]:
    for descriptor, value in message.ListFields():
        found = fields.get(descriptor.number)
        if found is None:
            continue
        path = f"{prefix}.{found.shown}" if prefix and found.shown else prefix or found.shown
        if not found.is_list:
            yield from _item_beyond(value, found, path)
            continue
        bound = found.bound
        if bound.max_items is not None and len(value) > bound.max_items:
            yield path, f"has {len(value):,} items: give at most {bound.max_items:,}"
        elif found.is_text or found.fields:
            for i, each in enumerate(value):
                yield from _item_beyond(each, found, f"{path}[{i}]")


def _item_beyond(value: Any, found: BoundedField, path: str) -> Iterator[tuple[str, str]]:
    if found.fields:
        yield from _beyond(value, found.fields, path)
    elif found.is_text:
        bound = found.bound
        if bound.max_chars is not None and len(value) > bound.max_chars:
            yield path, f"has {len(value):,} characters: give at most {bound.max_chars:,}"
        elif bound.max_bytes is not None and len(value) > bound.max_bytes // 4:
            unit, data = ("bytes", value) if isinstance(value, bytes) else ("bytes of UTF-8", value.encode())
            if len(data) > bound.max_bytes:
                yield path, f"has {len(data):,} {unit}: give at most {bound.max_bytes:,}"


def _too_many(excess: Excess) -> InvalidRequestError:
    if not excess.of_records:
        return refusal_of(excess.path, f"{excess.words}: give at most {excess.max_items:,}")
    refused = f"{excess.words}: give fewer, and send lists of numbers packed"
    return refusal_of(excess.path, refused) if excess.path else InvalidRequestError(f"the message {refused}")


def _is_map(descriptor: FieldDescriptor) -> bool:
    return descriptor.message_type is not None and descriptor.message_type.GetOptions().map_entry
