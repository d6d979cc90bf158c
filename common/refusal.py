"""The end of a process whose configuration cannot be used: one line, and the exit code that says so. Loads nothing."""

import sys
from collections.abc import Mapping
from types import MappingProxyType
from typing import NoReturn

from quire.exit_code import EXIT_CONFIGURATION
from quire.redaction import without_passwords
from quire.typed_names import as_typed


def refuse_to_start(service: str, message: str, names: Mapping[str, str] = MappingProxyType({})) -> NoReturn:
    """Ends the process with one line on standard error, and the exit code of a configuration error.

    Args:
        service: name of the service that does not start.
        message: the reason, with settings by their flags.
        names: the flag, variable or key by which each setting was set, by field.
    """
    line = without_passwords(as_typed(" ".join(message.splitlines()), names))
    print(f"{service}: {line}", file=sys.stderr, flush=True)  # noqa: T201 - for the person who started it
    raise SystemExit(EXIT_CONFIGURATION)
