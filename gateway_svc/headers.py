"""Headers of requests that several routes take."""

from typing import Annotated

from fastapi import Header

IdempotencyKey = Annotated[str | None, Header(max_length=256)]
LastEventId = Annotated[str | None, Header(max_length=4096)]  # of the last event that a client of a stream has had
