"""Log files to standard error as they grow, for `quire serve --verbose`."""

import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path

POLL_S = 0.1


async def echo_logs(paths: Sequence[Path]) -> None:
    """Copies every whole line that is appended from now on; ends when cancelled."""
    places = {path: path.stat().st_size if path.exists() else 0 for path in paths}
    while True:
        for path, place in places.items():
            places[path] = _copy_lines(path, place)
        await asyncio.sleep(POLL_S)


def _copy_lines(path: Path, place: int) -> int:
    if not path.exists():
        return place
    with path.open("rb") as log:
        log.seek(place)
        data = log.read()
    whole = data[: data.rfind(b"\n") + 1]
    sys.stderr.write(whole.decode(errors="replace"))
    sys.stderr.flush()
    return place + len(whole)
