"""Ranks of a tensor-parallel group, each a process forked from one that has imported torch: it begins quickly."""

import multiprocessing
import socket

from common.process import end_after
from tests.forked_process import PRELOADED
from worker_svc.rank import follow
from worker_svc.ranks.rank_connection import RankConnection

_FORKS = multiprocessing.get_context("forkserver")


def fork_rank(theirs: socket.socket) -> None:
    """Start a rank with this end of its connection. A `StartRank`."""
    _FORKS.set_forkserver_preload(PRELOADED)
    _FORKS.Process(target=_main, args=(theirs,), daemon=True).start()


def _main(theirs: socket.socket) -> None:
    end_after(lambda: follow(RankConnection(theirs), None))
