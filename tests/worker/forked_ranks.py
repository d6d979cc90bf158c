"""Ranks of a tensor-parallel group, each a process forked from one that has imported torch: it begins quickly."""

import multiprocessing
import socket
import time
from collections.abc import Callable

from common.process import end_after
from tests.forked_process import PRELOADED
from worker_svc.rank import follow
from worker_svc.ranks.rank_connection import RankConnection

_FORKS = multiprocessing.get_context("forkserver")


def fork_rank(theirs: socket.socket) -> None:
    """Start a rank with this end of its connection. A `StartRank`."""
    _start(theirs, 0.0)


def fork_rank_late(by_s: float) -> Callable[[socket.socket], None]:
    """Return a `StartRank` of ranks that do nothing for so long, as if they downloaded their model, or compiled."""
    return lambda theirs: _start(theirs, by_s)


def _start(theirs: socket.socket, late_s: float) -> None:
    _FORKS.set_forkserver_preload(PRELOADED)
    _FORKS.Process(target=_main, args=(theirs, late_s), daemon=True).start()


def _main(theirs: socket.socket, late_s: float) -> None:
    time.sleep(late_s)
    end_after(lambda: follow(RankConnection(theirs), None))
