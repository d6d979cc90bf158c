"""Shows in about a microsecond that a message is within its bounds, as nearly all are. It is never wrong in that.

A message of N bytes cannot hold a longer string or list, so most fields need no look. Messages that it cannot decide
go to `bounds_check`, which also writes the refusal.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

from common.bounds import Bound


@dataclass(slots=True)
class BoundedField:
    """A field that has a bound, or a message with such fields."""

    name: str
    shown: str  # in paths; empty for a wrapper
    bound: Bound
    is_list: bool
    is_text: bool
    fields: "dict[int, BoundedField]" = field(default_factory=dict)  # of a message, by number

    @property
    def most_chars(self) -> int | None:
        """Number of characters that is within the bound whichever characters they are."""
        if not self.is_text:
            return None
        if self.bound.max_chars is not None:
            return self.bound.max_chars
        return None if self.bound.max_bytes is None else self.bound.max_bytes // 4

    @property
    def least_bytes(self) -> int | None:
        """Fewest bytes on the wire that may exceed the bound; None: the field is unbounded."""
        found = [least for each in self.fields.values() if (least := each.least_bytes) is not None]
        if self.most_chars is not None:
            found.append(self.most_chars + 1)
        if self.is_list and self.bound.max_items is not None:
            found.append((self.bound.max_items + 1) * (2 if self.is_text or self.fields else 1))
        return min(found, default=None)


class QuickBounds:
    """The quick check of one type of message."""

    def __init__(self, fields: Mapping[int, BoundedField]) -> None:
        self._texts: list[tuple[int, str, int]] = []
        self._lists: list[tuple[int, BoundedField, QuickBounds]] = []
        self._messages: list[tuple[int, str, QuickBounds]] = []
        for each in fields.values():
            least = each.least_bytes
            if least is None:
                continue
            if each.is_list:
                self._lists.append((least, each, QuickBounds(each.fields)))
            elif each.fields:
                self._messages.append((least, each.name, QuickBounds(each.fields)))
            elif each.most_chars is not None:
                self._texts.append((least, each.name, each.most_chars))

    def allow(self, message: Any, num_bytes: int) -> bool:
        """True if a message of `num_bytes` on the wire is surely within its bounds."""
        for least, name, most_chars in self._texts:
            if num_bytes >= least and len(getattr(message, name)) > most_chars:
                return False
        for least, name, inner in self._messages:
            if num_bytes >= least and message.HasField(name) and not inner.allow(getattr(message, name), num_bytes):
                return False
        return all(
            num_bytes < least or _allows_list(each, inner, getattr(message, each.name), num_bytes)
            for least, each, inner in self._lists
        )

    def allow_each(self, messages: Any, num_bytes: int) -> bool:
        """True if each message of a list is surely within its bounds, as `allow` decides."""
        if self._messages or self._lists:
            return all(self.allow(each, num_bytes) for each in messages)
        return all(
            num_bytes < least or max(map(len, map(attrgetter(name), messages)), default=0) <= most_chars
            for least, name, most_chars in self._texts
        )


def _allows_list(each: BoundedField, inner: QuickBounds, value: Any, num_bytes: int) -> bool:
    if each.bound.max_items is not None and len(value) > each.bound.max_items:
        return False
    if each.most_chars is not None:
        return max(map(len, value), default=0) <= each.most_chars
    return not each.fields or inner.allow_each(value, num_bytes)
