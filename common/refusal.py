"""The end of a process whose configuration cannot be used: one line, and the exit code that says so. Loads nothing."""

import sys
from typing import NoReturn

from quire.redaction import without_passwords

EXIT_CONFIGURATION = 2


def refuse_to_start(service: str, message: str) -> NoReturn:
    """Ends the process with one line on standard error, and the exit code of a configuration error."""
    line = without_passwords(" ".join(message.splitlines()))
    print(f"{service}: {line}", file=sys.stderr, flush=True)  # noqa: T201 - for the person who started it
    raise SystemExit(EXIT_CONFIGURATION)
