"""Processes of a tensor-parallel worker's other ranks, as the system lists them (Linux), and their end."""

import time
from collections.abc import Iterable
from pathlib import Path

from tests.patience import patient
from tests.services import Service

_GONE_S = 20.0


def ranks_of(worker: Service) -> list[int]:
    """Process ids of ranks 1, 2, ... in this order."""
    folder = Path(f"/proc/{worker.process.pid}/task")
    children = [int(pid) for task in folder.iterdir() for pid in (task / "children").read_text().split()]
    return sorted(pid for pid in children if b"worker_svc.rank" in Path(f"/proc/{pid}/cmdline").read_bytes())


def assert_gone(pids: Iterable[int]) -> None:
    """Wait until the processes have ended. Raises AssertionError if one does not."""
    give_up_s = time.monotonic() + patient(_GONE_S)
    while alive := [pid for pid in pids if _is_alive(pid)]:
        assert time.monotonic() < give_up_s, f"ranks {alive} have outlived their group"
        time.sleep(0.01)


def _is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
