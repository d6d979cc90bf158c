"""A log entry as a line to read: time, level, service, event, and the rest as name=value."""

import json
from collections.abc import Mapping
from datetime import datetime
from typing import Any

_COLOURS = {"debug": "2", "warning": "33", "error": "31", "critical": "31"}
_FIRST = ("timestamp", "level", "service", "event", "exception", "stack")


def readable(entry: Mapping[str, Any], *, colours: bool = False) -> str:
    """The entry as text, of several lines where it has a traceback."""
    level = str(entry.get("level", ""))
    head = f"{_time(entry.get('timestamp'))} {level:<7} {entry.get('service', '')}: {entry.get('event', '')}"
    rest = "".join(f"  {name}={_value(value)}" for name, value in entry.items() if name not in _FIRST)
    if colours and level in _COLOURS:
        head = f"\033[{_COLOURS[level]}m{head}\033[0m"
    below = [str(entry[name]) for name in ("exception", "stack") if entry.get(name)]
    return "\n".join([_printable(head, keep="\033") + _printable(rest), *(_printable(each) for each in below)])


def readable_line(line: str, *, colours: bool = False) -> str:
    """A line of a log file as text; a line that is no entry stays as it is."""
    try:
        entry = json.loads(line) if line.startswith("{") else None
    except ValueError:
        entry = None
    return readable(entry, colours=colours) if isinstance(entry, dict) else _printable(line)


def _time(timestamp: object) -> str:
    """Local time of day, to the millisecond."""
    try:
        moment = datetime.fromisoformat(str(timestamp)).astimezone()
    except ValueError:
        return "??:??:??"
    return f"{moment:%H:%M:%S}.{moment.microsecond // 1000:03}"


def _value(value: object) -> str:
    """On one line: a path that was asked for, among others, may have any character."""
    if isinstance(value, str):
        is_plain = value.isprintable() and value and " " not in value and "=" not in value
        return value if is_plain else repr(value)
    return json.dumps(value, ensure_ascii=False, default=str)


def _printable(text: str, keep: str = "") -> str:
    """The text without characters that control a terminal."""
    return "".join(
        each if each.isprintable() or each in f"\n\t{keep}" else "\N{REPLACEMENT CHARACTER}" for each in text
    )
