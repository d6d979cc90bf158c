"""File of measured attention kernels, by device, versions and shapes, so that only the first start measures.

A file that cannot be read, or does not have the expected form, counts as empty; where it cannot be written, the log
warns.
"""

import json
import math
import os
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

import structlog

from kernels.native.build import cache_directory
from kernels.native.compiling import NativeUnavailableError

log = structlog.get_logger()

FILE_NAME = "attention.json"


@dataclass(frozen=True, slots=True)
class AttentionTimes:
    """Microseconds of attention in a pass, by the name of who attends."""

    decode_us: Mapping[str, float]
    mixed_us: Mapping[str, float]

    @classmethod
    def read(cls, found: object) -> Self | None:
        """Times from a file; None if that is not what was found."""
        if not isinstance(found, dict) or set(found) != {"decode_us", "mixed_us"}:
            return None
        for times in found.values():
            if not isinstance(times, dict) or not all(map(_is_time, times.values())):
                return None
        return cls(**found)

    def are_of(self, decode_names: Iterable[str], mixed_names: Iterable[str]) -> bool:
        """True if they are of exactly these names."""
        return set(self.decode_us) == set(decode_names) and set(self.mixed_us) == set(mixed_names)


class AttentionCache:
    """Times that were measured before, in a file of a folder that processes may share."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / FILE_NAME

    @classmethod
    def of_user(cls, environment: Mapping[str, str]) -> Self:
        """The user's cache, beside that of compiled kernels; one that keeps nothing if the user has no folder."""
        try:
            return cls(cache_directory(environment))
        except NativeUnavailableError as error:
            log.warning("measured attention is not kept", reason=str(error))
            return cls(Path(os.devnull))

    def find(self, key: str, decode_names: Iterable[str], mixed_names: Iterable[str]) -> AttentionTimes | None:
        """Times of these names under a key; None if they are to be measured."""
        times = AttentionTimes.read(self._entries().get(key))
        return times if times is not None and times.are_of(decode_names, mixed_names) else None

    def keep(self, key: str, times: AttentionTimes) -> None:
        """Add times to the file, which is replaced as a whole: a reader sees the old one or the new one."""
        entries = {**self._entries(), key: asdict(times)}
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            handle, name = tempfile.mkstemp(dir=self._path.parent, prefix=FILE_NAME)
            with os.fdopen(handle, "w") as file:
                json.dump(entries, file, indent=1)
            Path(name).replace(self._path)
        except OSError as error:
            log.warning("measured attention is not kept, so that the next start measures again", reason=str(error))

    def _entries(self) -> dict[str, Any]:
        try:
            entries = json.loads(self._path.read_text())
        except (OSError, ValueError):  # absent or corrupt: measured anew
            return {}
        return entries if isinstance(entries, dict) else {}


def _is_time(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value > 0
