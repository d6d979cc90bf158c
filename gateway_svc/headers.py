"""Headers of requests that several routes take. One without a value counts as one that is missing."""

from typing import Annotated

from fastapi import Header
from pydantic import AfterValidator


def _given(value: str | None) -> str | None:
    return value or None  # a variable without a value, or a reader that has had no event yet


IdempotencyKey = Annotated[str | None, Header(max_length=256), AfterValidator(_given)]
LastEventId = Annotated[str | None, Header(max_length=4096), AfterValidator(_given)]  # of the last that a client had
