"""The other ranks of a group as rank 0 sees them: their connections, what they agree on, and their end.

Knows how to tell them what to compute, and nothing of how they are started.
"""

import contextvars
import json
import os
import select
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

import structlog

from common.step import Step
from common.step_codec import step_to_pb
from kernels.native.shared_ranks import RankMemory, RankReduction
from worker_svc.checkpoint.checkpoint_error import CheckpointError
from worker_svc.model.batch import ForwardBatch
from worker_svc.option_check import OptionError
from worker_svc.ranks.pass_codec import encode_pass, encode_rows
from worker_svc.ranks.rank_connection import FrameKind, RankConnection, RankLostError
from worker_svc.steps.step_runner import DeviceLostError

log = structlog.get_logger()

_START_S = 120.0  # without a heartbeat: a rank loads its libraries first
_WATCH_S = 1.0  # between two looks
_LAST_WORDS_S = 3.0  # after a rank has ended during the start, to read why and to refuse with its words

BlockPairs = Sequence[tuple[int, int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSetUp:
    """Choices by which a rank loads its part of the model: JSON on the wire."""

    rank: int
    size: int
    num_on_machine: int  # ranks of the group that share this rank's machine
    settings: dict[str, Any]  # of `WorkerSettings`, as rank 0 has settled them
    fingerprint: str  # of the model folder
    native: bool  # rank 0 has native kernels
    slot_bytes: int | None  # of the shared memory, which is passed next; None: ranks reduce by Gloo or NCCL
    store_port: int | None  # of the store by which their connections are made, on rank 0's host
    timeout_s: float


class RankGroup:
    """Rank 0's connections to ranks 1, 2, ..."""

    def __init__(self, connections: Sequence[RankConnection], timeout_s: float) -> None:
        """`connections`: in the order of the ranks; `timeout_s`: after so much silence a rank counts as lost."""
        self._connections = list(connections)
        self._timeout_s = timeout_s
        self._is_closing = False
        self._is_started = threading.Event()
        self.sent_bytes = 0  # to each of the ranks, for block moves and passes

    @property
    def size(self) -> int:
        """Number of ranks, with rank 0."""
        return len(self._connections) + 1

    def set_up(self, set_ups: Sequence[RankSetUp], memory: RankMemory | None) -> None:
        """Have the ranks load. Raises RankLostError."""
        for connection, each in zip(self._connections, set_ups, strict=True):
            connection.send_json(FrameKind.SET_UP, **asdict(each))
            if memory is not None:
                connection.send_fd(memory.fd)

    def await_loaded(self, device: str) -> list[int]:
        """Wait until all ranks have their weights, and return the bytes of these. `device`: rank 0's, by its kind.

        Raises CheckpointError; OptionError if a rank computes on another kind of device. From now on this process ends
        when a rank does: it may be in an exchange with the lost rank.
        """
        loaded = [self._receive(rank, FrameKind.LOADED) for rank in range(1, self.size)]
        for rank, each in enumerate(loaded, start=1):
            if each["device"] != device:
                raise OptionError(other_device(rank, each["device"], device))
        self._start_thread(self._watch_start)
        for connection in self._connections:
            connection.send_json(FrameKind.PLAN)
        return [int(each["weight_bytes"]) for each in loaded]

    def agree_on_least(self, number: int) -> int:
        """The least of all ranks' numbers, which they give at the same point of their start; `number`: rank 0's.

        Raises CheckpointError with the reason of a rank that cannot go on.
        """
        least = min(number, *(int(self._receive(rank, FrameKind.OFFER)["number"]) for rank in range(1, self.size)))
        for connection in self._connections:
            connection.send_json(FrameKind.LEAST, number=least)
        return least

    def watch(self, reduction: RankReduction, waited_s: Callable[[], float] = lambda: 0.0) -> None:
        """From now on end this process when a rank ends or is silent: a group lives and ends as one.

        Also if no step has ended for so long. `waited_s`: seconds since one has, while steps run.
        """
        self._is_started.set()
        self._start_thread(lambda: self._watch(reduction.fail, waited_s))

    def move_blocks(self, kind: FrameKind, pairs: BlockPairs) -> None:
        """Have the ranks move blocks as rank 0 does. Raises DeviceLostError."""
        self._tell(kind, b"".join(pair[side].to_bytes(4, "little") for pair in pairs for side in (0, 1)))

    def begin_pass(self, batch: ForwardBatch, *, with_logits: bool) -> None:
        """Have the ranks compute a pass, with logits of all wanted tokens or only their hidden states.

        Raises DeviceLostError.
        """
        self._tell(FrameKind.PASS, encode_pass(batch, with_logits=with_logits))

    def begin_step(self, step: Step) -> None:
        """Have the ranks execute a step. Raises DeviceLostError."""
        self._tell(FrameKind.STEP, step_to_pb(step).SerializeToString())

    def begin_logits(self, begin: int, end: int) -> None:
        """Have the ranks compute logits of some rows of the last pass. Raises DeviceLostError."""
        self._tell(FrameKind.LOGITS, encode_rows(begin, end))

    def abandon(self) -> None:
        """Have the ranks end though they are not watched yet."""
        self._is_closing = True
        for connection in self._connections:
            connection.end()
            connection.close()

    def close(self) -> None:
        """Have the ranks end, once they are watched."""
        self._is_closing = True
        for connection in self._connections:
            connection.end()

    def _tell(self, kind: FrameKind, payload: bytes) -> None:
        self.sent_bytes += len(payload)
        try:
            for connection in self._connections:
                connection.send(kind, payload)
        except RankLostError as error:
            raise DeviceLostError(f"a rank of this group is gone: {error}") from error

    def _receive(self, rank: int, kind: FrameKind) -> dict[str, Any]:
        came, payload = self._connections[rank - 1].receive(max(self._timeout_s, _START_S))
        fields: dict[str, Any] = json.loads(payload or b"{}")
        if came is FrameKind.REFUSED:
            raise CheckpointError(f"rank {rank} of the group: {fields['reason']}")
        if came is not kind:
            raise RankLostError(f"rank {rank} sent {came.name} instead of {kind.name}")
        return fields

    def _start_thread(self, work: Callable[[], None]) -> None:
        context = contextvars.copy_context()  # has the fields that are bound to log lines
        threading.Thread(target=context.run, args=(work,), name="ranks", daemon=True).start()

    def _watch_start(self) -> None:
        """End this process when a rank has ended, unless its last words have ended it before. Reads nothing."""
        while not self._is_started.is_set() and not self._is_closing:
            ended = []
            with suppress(ValueError):  # it was closed just now
                ended = [rank for rank, each in enumerate(self._connections, start=1) if each.wait_for_end(0.0)]
            if ended and not self._is_started.wait(_LAST_WORDS_S) and not self._is_closing:
                words = self._connections[ended[0] - 1].last_words()
                _end_process(lambda: None, ended[0], words or "has ended during the start")
            self._is_started.wait(_WATCH_S)

    def _watch(self, fail: Callable[[], None], waited_s: Callable[[], float]) -> None:
        poll = select.poll()
        seen_s = dict.fromkeys((each.fileno() for each in self._connections), time.monotonic())
        for each in self._connections:
            poll.register(each.fileno(), select.POLLIN)
        by_fd = {each.fileno(): rank for rank, each in enumerate(self._connections, start=1)}
        while True:
            for fd, _ in poll.poll(_WATCH_S * 1000):
                if self._connections[by_fd[fd] - 1].drain_heartbeats():
                    seen_s[fd] = time.monotonic()
                elif self._is_closing:
                    for each in self._connections:
                        each.close()
                    return
                else:
                    _end_process(fail, by_fd[fd], "has ended")
            for fd, last_s in seen_s.items():
                if time.monotonic() - last_s > self._timeout_s:
                    _end_process(fail, by_fd[fd], f"has been silent for {self._timeout_s:g} s")
            if waited_s() > self._timeout_s:
                _end_process(fail, None, f"no step has ended for {self._timeout_s:g} s")


def other_device(rank: int, device: str, of_rank_0: str) -> str:
    """Message for a rank that computes on another kind of device."""
    return (
        f"--device: rank {rank} of the group computes on {device}, and rank 0 on {of_rank_0}: give all ranks of a "
        "group the same kind of device"
    )


def _end_process(fail: Callable[[], None], rank: int | None, reason: str) -> None:
    """End rank 0 without waiting: its pass would wait for the lost rank. `rank`: None if it is not known which."""
    try:
        fail()
    finally:
        log.critical("rank lost: its group ends, and is started again as one", rank=rank, reason=reason)
        os._exit(1)
