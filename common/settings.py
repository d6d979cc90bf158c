"""Settings of a service's process, settled by `quire.settings`; a bad one ends the process."""

from typing import TypeVar

from common.refusal import refuse_to_start
from quire.settings import Settings, parse

S = TypeVar("S", bound=Settings)


def settings_or_exit(service: str, kind: type[S], arguments: list[str]) -> S:
    """Call `parse` for a service's `__main__`; a bad setting ends the process with one sentence."""
    try:
        return parse(kind, arguments)
    except ValueError as error:
        refuse_to_start(service, str(error))
