"""Violations of a request: all of them collected, so that its sender learns of them at once, or a single one.

Lists a bounded number of violations however long the request is, and repeats none of its values. Knows no field.
"""

from collections.abc import Iterable
from itertools import islice

from quire.errors import FieldViolation, InvalidRequestError

MOST_LISTED = 10


class Violations:
    """Violations found so far, the first of them listed."""

    def __init__(self) -> None:
        self._listed: list[FieldViolation] = []
        self._num_found = 0

    def add(self, field: str, description: str, reason: str = "") -> None:
        """Add a violation; `description` says what the field is and what to change, `reason` as in FieldViolation."""
        self._num_found += 1
        if len(self._listed) < MOST_LISTED:
            self._listed.append(FieldViolation(field, description, reason))

    def add_each(self, found: Iterable[tuple[str, str]]) -> None:
        """Add pairs of field and description; stops once there are too many to list."""
        for field, description in islice(found, MOST_LISTED + 1):
            self.add(field, description)

    def raise_if_any(self) -> None:
        """Raises InvalidRequestError if there are violations."""
        if not self._listed:
            return
        error = InvalidRequestError.of(self._listed)
        num_more = self._num_found - len(self._listed)
        if num_more:
            raise InvalidRequestError(f"{error.message}; and at least {num_more} more", self._listed)
        raise error


def refusal_of(field: str, description: str, reason: str = "") -> InvalidRequestError:
    """Refusal of a request for one field; see `Violations.add`."""
    return InvalidRequestError.of([FieldViolation(field, description, reason)])
