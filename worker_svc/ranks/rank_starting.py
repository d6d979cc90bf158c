"""Starts the other ranks of a group as children of rank 0, or waits for those that are started elsewhere.

A child ends with rank 0, however that ends: by a signal of the system (Linux), and when its connection closes.
"""

import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable

import structlog

from worker_svc.option_check import OptionError
from worker_svc.ranks.rank_connection import FrameKind, RankConnection, RankLostError

_PR_SET_PDEATHSIG = 1
_JOIN_S = 5.0  # for the first frame of a connection, which may be a stranger's
_RETRY_S = 0.2

# Starts a rank with its end of the connection; that end is closed here afterwards.
StartRank = Callable[[socket.socket], None]

log = structlog.get_logger()


def spawn_rank(theirs: socket.socket) -> None:
    """Start a rank as a child; it writes its log where this process writes its errors."""
    subprocess.Popen(
        [sys.executable, "-P", "-m", "worker_svc.rank", str(theirs.fileno()), str(os.getpid())],
        pass_fds=(theirs.fileno(),),
        stdin=subprocess.DEVNULL,
    )


def start_ranks(size: int, start_rank: StartRank) -> list[RankConnection]:
    """Start ranks 1 to size - 1 on this machine."""
    connections = []
    for _ in range(1, size):
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        with theirs:
            start_rank(theirs)
        connections.append(RankConnection(ours))
    return connections


def accept_ranks(address: str, size: int) -> list[RankConnection]:
    """Wait for ranks 1 to size - 1, which connect to `address`. Raises OptionError if it cannot be listened on."""
    found: dict[int, RankConnection] = {}
    with _listener(address, size) as listener:
        log.info("waiting for ranks", address=address, tensor_parallel=size)
        while len(found) < size - 1:
            stream, peer = listener.accept()
            connection = RankConnection(stream)
            try:
                rank = _rank_of(connection, size)
            except RankLostError as error:
                log.warning("connection of a rank refused", peer=str(peer), reason=str(error))
                connection.close()
                continue
            if rank in found:  # it was started again
                found[rank].close()
            found[rank] = connection
            log.info("rank joined", rank=rank, peer=str(peer))
    return [found[rank] for rank in range(1, size)]


def _listener(address: str, backlog: int) -> socket.socket:
    host, _, port = address.rpartition(":")
    try:
        return socket.create_server((host.strip("[]"), int(port)), backlog=backlog)
    except OSError as error:
        raise OptionError(
            f"--group-address {address} cannot be listened on ({error}): give rank 0 an address of its own machine, "
            "or 0.0.0.0 and the port"
        ) from error


def join_group(address: str, rank: int, size: int) -> RankConnection:
    """Connect to rank 0, as often as it takes."""
    host, _, port = address.rpartition(":")
    log.info("joining group", address=address, rank=rank, tensor_parallel=size)
    while True:
        try:
            stream = socket.create_connection((host.strip("[]"), int(port)), timeout=_JOIN_S)
        except OSError:
            time.sleep(_RETRY_S)
            continue
        connection = RankConnection(stream)
        connection.send_json(FrameKind.JOIN, rank=rank, size=size)
        return connection


def end_with_parent(parent_pid: int) -> None:
    """Have the system kill this process when the thread that has started it is gone, or its process (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        os._exit(1)


def _rank_of(connection: RankConnection, size: int) -> int:
    """The number of the rank that has connected. Raises RankLostError unless it belongs to this group."""
    try:
        said = connection.receive_json(FrameKind.JOIN, _JOIN_S)
        rank, its_size = int(said["rank"]), int(said["size"])
    except (KeyError, TypeError, ValueError, json.JSONDecodeError) as error:
        raise RankLostError(f"it did not say which rank it is: {error}") from error
    if its_size != size or not 0 < rank < size:
        raise RankLostError(
            f"it is rank {rank} of {its_size}, and this group has ranks 1 to {size - 1}: give all ranks the same "
            "--tensor-parallel, and each another --rank"
        )
    return rank
