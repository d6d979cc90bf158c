"""Settings of a service's process: as `quire.settings` settles them, or its end."""

from typing import TypeVar

from common.refusal import refuse_to_start
from quire.settings import Settings, parse

S = TypeVar("S", bound=Settings)


def settings_or_exit(service: str, kind: type[S], arguments: list[str]) -> S:
    """As `parse`, for a service's `__main__`: a bad setting ends the process with its sentence."""
    try:
        return parse(kind, arguments)
    except ValueError as error:
        refuse_to_start(service, str(error))
