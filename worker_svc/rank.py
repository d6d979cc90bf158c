"""Entry point of a rank other than 0 of a tensor-parallel group: loads its part of the model and follows rank 0.

`python -m worker_svc.rank FD PID` is what rank 0, process PID, starts on its machine, with a connection as FD. On other
machines `python -m worker_svc --rank N --group-address HOST:PORT` comes here.
"""

import os
import signal
import socket
import sys
import threading
from collections.abc import Mapping
from typing import NoReturn

import worker_svc.torch_environment  # noqa: F401 - before torch is loaded
from common.log import set_up_logging, set_up_service_logging
from common.process import end_after
from common.status import Status
from quire.worker_settings import WorkerSettings
from worker_svc.ranks.rank_connection import FrameKind, RankConnection, RankLostError
from worker_svc.ranks.rank_starting import end_with_parent, join_group
from worker_svc.start.rank_loading import load_follower

SERVICE = "rank"
_HEARTBEAT_S = 1.0


def main() -> None:
    """Entry point of `python -m worker_svc.rank`."""
    descriptor, parent_pid = map(int, sys.argv[1:])
    end_with_parent(parent_pid)
    # Rank 0 decides when its group ends, also on Ctrl-C, which the terminal sends to all of its processes.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    set_up_logging(SERVICE, "info")
    follow(RankConnection(socket.socket(fileno=descriptor)), None)


def join_and_follow(settings: WorkerSettings, status: Status, names: Mapping[str, str]) -> NoReturn:
    """Follow rank 0 at the group's address, until it ends; `names`: names of the settings in errors."""
    assert settings.rank and settings.group_address, "settings check both"
    set_up_service_logging(SERVICE, settings, status, names)
    connection = join_group(settings.group_address, settings.rank, settings.tensor_parallel)
    for number in (signal.SIGINT, signal.SIGTERM):  # until rank 0 has drained
        signal.signal(number, signal.SIG_IGN)
    follow(connection, settings)


def follow(connection: RankConnection, own: WorkerSettings | None) -> NoReturn:
    """Load and serve until rank 0 is gone. `own`: settings of a rank on another machine, such as the model's folder."""
    threading.Thread(target=_show_life, args=(connection,), name="heartbeat", daemon=True).start()
    try:
        load_follower(connection, own).serve(connection)
    except RankLostError as error:
        if not connection.wait_for_end(0.0):
            raise SystemExit(f"rank: {error}") from error
    raise SystemExit(1)


def _show_life(connection: RankConnection) -> None:
    """Tell rank 0 every second that this process runs, and end it when rank 0 is gone, whatever it is doing."""
    while not connection.wait_for_end(_HEARTBEAT_S):
        try:
            connection.send(FrameKind.HEARTBEAT)
        except RankLostError:
            break
    os._exit(1)


if __name__ == "__main__":
    end_after(main)
