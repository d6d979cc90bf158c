"""Reads the small files of a model folder: whole, within a bound of size, and only files inside the folder.

A model folder is not trusted. A symbolic link in it may point into the folder and, in the hub's cache, where files are
links to blobs, into the cache of the same repository; other links are refused.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from worker_svc.checkpoint.checkpoint_error import CheckpointError

_MIB = 1 << 20
_SNAPSHOTS = "snapshots"  # of the hub's cache: REPOSITORY/snapshots/REVISION/FILE links to REPOSITORY/blobs/HASH


def find_file(folder: Path, name: str) -> Path | None:
    """The file of this name; None if there is none.

    Raises CheckpointError if it is a link to elsewhere, or anything but a regular file.
    """
    path = folder / name
    try:
        if not path.is_file():
            if os.path.lexists(path):
                raise CheckpointError(f"{path} is not a regular file, nor a link to one: download the checkpoint again")
            return None
        is_inside = path.resolve().is_relative_to(_boundary(folder.resolve()))
    except (OSError, ValueError, RuntimeError) as error:  # no permission, no valid file name, a circle of links
        raise CheckpointError(f"{name!r} in {folder} cannot be looked up ({error}): check the folder") from error
    if not is_inside:
        raise CheckpointError(
            f"{path} is a link to {path.resolve()}, outside the model folder: copy the file into the folder, "
            "or give the folder that it lies in"
        )
    return path


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Raise CheckpointError where reading the file raises OSError."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read ({error.strerror}): check its permissions") from error


def read_file(folder: Path, name: str, most_bytes: int) -> bytes | None:
    """The content of a file; None if there is none. Raises CheckpointError if it is larger, or cannot be read."""
    path = find_file(folder, name)
    if path is None:
        return None
    with reading(path), path.open("rb") as stream:
        content = stream.read(most_bytes + 1)
    if len(content) > most_bytes:
        raise CheckpointError(
            f"{path} has more than {most_bytes / _MIB:g} MiB, which no such file needs: download the checkpoint again"
        )
    return content


def read_text(folder: Path, name: str, most_bytes: int) -> str | None:
    """The text of a UTF-8 file; None if there is none. Raises CheckpointError like `read_file`."""
    content = read_file(folder, name, most_bytes)
    if content is None:
        return None
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise CheckpointError(
            f"{folder / name} is not UTF-8 text ({error.reason} at byte {error.start}): download the checkpoint again"
        ) from error


def _boundary(folder: Path) -> Path:
    """The folder that links may point into. folder: a resolved path"""
    return folder.parent.parent if folder.parent.name == _SNAPSHOTS else folder
