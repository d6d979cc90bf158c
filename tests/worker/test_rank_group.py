"""Rank 0's view of its group: agreements at the start, and the end of its process when a rank is lost."""

import json
import multiprocessing
import socket
import threading
from collections.abc import Callable, Iterator

import pytest

from tests.forked_process import PRELOADED
from tests.patience import patient
from worker_svc.checkpoint.checkpoint_error import CheckpointError
from worker_svc.gpu.lone_rank import LoneRank
from worker_svc.option_check import OptionError
from worker_svc.ranks.lead_runner import UnendedSteps
from worker_svc.ranks.rank_connection import FrameKind, RankConnection
from worker_svc.ranks.rank_group import RankGroup

_FORKS = multiprocessing.get_context("forkserver")
_END_S = 20.0
_TIMEOUT_S = 600.0  # of silence


class Ends:
    """Both ends of the connections of a group of three."""

    def __init__(self) -> None:
        pairs = [socket.socketpair() for _ in range(2)]
        self.spare = socket.socketpair()
        self.ranks = [RankConnection(theirs) for _, theirs in pairs]
        self.group = RankGroup([RankConnection(ours) for ours, _ in pairs], 60.0)

    def close(self) -> None:
        self.group.abandon()
        for rank in self.ranks:
            rank.close()
        for end in self.spare:
            end.close()


@pytest.fixture
def ends() -> Iterator[Ends]:
    ends = Ends()
    yield ends
    ends.close()


def test_ranks_agree_on_the_least_number_of_all(ends: Ends) -> None:
    for number, rank in zip((70, 30), ends.ranks, strict=True):
        rank.send_json(FrameKind.OFFER, number=number)
    assert ends.group.agree_on_least(50) == 30
    assert [rank.receive_json(FrameKind.LEAST)["number"] for rank in ends.ranks] == [30, 30]


def test_a_rank_that_cannot_go_on_says_why_instead(ends: Ends) -> None:
    ends.ranks[0].send_json(FrameKind.OFFER, number=1)
    ends.ranks[1].send_json(FrameKind.REFUSED, reason="its memory is full")
    with pytest.raises(CheckpointError, match=r"^rank 2 of the group: its memory is full$"):
        ends.group.agree_on_least(1)


def test_the_words_of_a_rank_that_has_ended_can_be_read_by_several(ends: Ends) -> None:
    connection, rank = RankConnection(ends.spare[0]), RankConnection(ends.spare[1])
    assert connection.last_words() is None
    rank.send(FrameKind.HEARTBEAT)
    rank.send_json(FrameKind.OFFER, number=1)
    assert connection.last_words() is None
    rank.send_json(FrameKind.REFUSED, reason="its memory is full")
    rank.end()
    assert connection.last_words() == connection.last_words() == "its memory is full"
    assert connection.receive_json(FrameKind.OFFER) == {"number": 1}
    connection.close()
    rank.close()


def test_ranks_on_another_kind_of_device_are_refused(ends: Ends) -> None:
    for device, rank in zip(("A 100", "A 90"), ends.ranks, strict=True):
        rank.send_json(FrameKind.LOADED, weight_bytes=1, device=device)
    with pytest.raises(OptionError, match="rank 2 of the group computes on A 90, and rank 0 on A 100: give"):
        ends.group.await_loaded("A 100")


def test_steps_wait_from_the_last_end_or_from_the_first_that_runs() -> None:
    steps = UnendedSteps()
    assert steps.waited_s() == 0
    steps.begin()
    first_s = steps.waited_s()
    steps.begin()
    assert steps.waited_s() >= first_s >= 0, "one that is launched behind it is no progress"
    steps.end()
    assert steps.waited_s() >= 0
    steps.end()
    assert steps.waited_s() == 0


class KeepingFailures(LoneRank):
    """Keeps whether its waits were ended."""

    def __init__(self, told: "multiprocessing.synchronize.Event") -> None:
        super().__init__(0, 2)
        self._told = told

    def fail(self) -> None:
        self._told.set()


def begin_start(theirs: socket.socket, told: "multiprocessing.synchronize.Event") -> None:
    """Rank 0 that has seen its rank load, and waits for it in an exchange for ever."""
    group = _group_with(theirs)
    group.await_loaded("the CPU")
    threading.Event().wait()


def lose_a_rank(theirs: socket.socket, told: "multiprocessing.synchronize.Event") -> None:
    group = _group_with(theirs)
    group.await_loaded("the CPU")
    group.watch(KeepingFailures(told))
    threading.Event().wait()


def make_no_progress(theirs: socket.socket, told: "multiprocessing.synchronize.Event") -> None:
    """Rank 0 whose device has not come to the end of a step for long, though its rank lives."""
    group = _group_with(theirs)
    group.await_loaded("the CPU")
    group.watch(KeepingFailures(told), lambda: 2 * _TIMEOUT_S)
    threading.Event().wait()


def _group_with(theirs: socket.socket) -> RankGroup:
    return RankGroup([RankConnection(theirs)], _TIMEOUT_S)


@pytest.mark.parametrize(
    ("work", "rank_ends", "is_failed"),
    [(begin_start, True, False), (lose_a_rank, True, True), (make_no_progress, False, True)],
    ids=["ended in the start", "ended later", "no progress"],
)
def test_rank_0_ends_rather_than_wait_for_a_lost_rank(
    work: "Callable[[socket.socket, multiprocessing.synchronize.Event], None]", rank_ends: bool, is_failed: bool
) -> None:
    _FORKS.set_forkserver_preload(PRELOADED)
    ours, theirs = socket.socketpair()
    told = _FORKS.Event()
    process = _FORKS.Process(target=work, args=(theirs, told), daemon=True)
    process.start()
    theirs.close()
    rank = RankConnection(ours)
    rank.send(FrameKind.LOADED, json.dumps({"weight_bytes": 1, "device": "the CPU"}).encode())
    rank.receive_json(FrameKind.PLAN, patient(_END_S))
    if rank_ends:
        rank.end()
    process.join(patient(_END_S))
    rank.close()
    assert process.exitcode == 1
    assert told.is_set() == is_failed
