"""Collects all that is wrong with a request, so that its sender learns everything at once.

Bounded: however long a bad request is, few violations are listed and nothing of it is repeated. It knows no field.
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

    def add(self, field: str, description: str) -> None:
        """Notes one; `description` says what the field is and what to change."""
        self._num_found += 1
        if len(self._listed) < MOST_LISTED:
            self._listed.append(FieldViolation(field, description))

    def add_each(self, found: Iterable[tuple[str, str]]) -> None:
        """Notes pairs of field and description, and stops to look for more once there are too many to list."""
        for field, description in islice(found, MOST_LISTED + 1):
            self.add(field, description)

    def raise_if_any(self) -> None:
        """Raises InvalidRequestError if anything was noted."""
        if not self._listed:
            return
        error = InvalidRequestError.of(self._listed)
        num_more = self._num_found - len(self._listed)
        if num_more:
            raise InvalidRequestError(f"{error.message}; and at least {num_more} more", self._listed)
        raise error
