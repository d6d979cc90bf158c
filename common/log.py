"""Logging set-up: structlog on standard error or in a file, with the values bound to the current context.

On a terminal an entry is a line to read, elsewhere a JSON object. Bind `request_id` with structlog.contextvars where
a request's work begins, or pass it by name. No password of a URL is ever written.
"""

import logging
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

import structlog
from structlog.typing import EventDict, Processor

from common.log_file import LogStream, RotatingLog
from common.refusal import refuse_to_start
from common.status import Status
from quire.log_text import readable
from quire.redaction import without_passwords

MAX_BYTES = 16 * 1024 * 1024


class LogSettings(Protocol):
    """The log settings that every service has."""

    @property
    def log_level(self) -> str: ...
    @property
    def log_format(self) -> str: ...
    @property
    def log_file(self) -> Path | None: ...
    @property
    def log_max_bytes(self) -> int: ...


def set_up_service_logging(
    service: str, settings: LogSettings, status: Status, names: Mapping[str, str] = MappingProxyType({})
) -> None:
    """Call `set_up_logging` for a service's `__main__`; a file that cannot be written ends the process.

    `names`: the flag, variable or key by which each setting was set, for the error message.
    """
    try:
        set_up_logging(
            service,
            settings.log_level,
            form=settings.log_format,
            file=settings.log_file,
            max_bytes=settings.log_max_bytes,
            status=status,
        )
    except OSError as error:
        refuse_to_start(service, f"--log-file: {settings.log_file} cannot be written: {error}", names)


def set_up_logging(
    service: str,
    level: str,
    *,
    form: str = "auto",
    file: Path | None = None,
    max_bytes: int = MAX_BYTES,
    status: Status | None = None,
) -> None:
    """Configures structlog and the standard library's logging alike.

    Args:
        service: name on every line.
        level: "debug", "info", "warning" or "error".
        form: "console" (lines to read), "json", or "auto": console where standard error is a terminal.
        file: file to write instead of standard error; it replaces standard output and standard error.
        max_bytes: size at which the file is rotated.
        status: receives warnings and the events of a start, whatever the level.

    Raises:
        OSError: the file cannot be written.
    """
    number = logging.getLevelNamesMapping()[level.upper()]
    stream = LogStream() if file is None else RotatingLog(file, max_bytes)
    to_terminal = file is None and sys.stderr.isatty()
    shared: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.format_exc_info,
        _mask_passwords,
    ]
    render: Processor = structlog.processors.JSONRenderer()
    if form == "console" or (form == "auto" and to_terminal):
        render = partial(_to_line, colours=to_terminal)
    told: list[Processor] = [] if status is None else [_Telling(status, number)]
    structlog.configure(
        processors=[*shared, *told, render],
        wrapper_class=structlog.make_filtering_bound_logger(number if status is None else min(number, logging.INFO)),
        logger_factory=structlog.WriteLoggerFactory(stream),  # type: ignore[arg-type]
        cache_logger_on_first_use=True,
    )
    handler = logging.StreamHandler(stream)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, render],
        )
    )
    logging.basicConfig(handlers=[handler], level=max(number, logging.WARNING), force=True)
    structlog.contextvars.bind_contextvars(service=service)


class _Telling:
    """Passes each entry to the supervisor, then drops those below the log's level."""

    def __init__(self, status: Status, level: int) -> None:
        self._status = status
        self._numbers = {name.lower(): number for name, number in logging.getLevelNamesMapping().items()}
        self._level = level

    def __call__(self, logger: Any, method: str, entry: EventDict) -> EventDict:
        self._status.forward_log_entry(dict(entry))
        if self._numbers.get(str(entry.get("level")), self._level) < self._level:
            raise structlog.DropEvent
        return entry


def _to_line(logger: Any, method: str, entry: EventDict, *, colours: bool) -> str:
    return readable(entry, colours=colours)


def _mask_passwords(logger: Any, method: str, entry: EventDict) -> EventDict:
    for name, value in entry.items():
        if isinstance(value, str) and "://" in value:
            entry[name] = without_passwords(value)
    return entry
