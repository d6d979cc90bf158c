"""Registration of a simulated worker with any leader, and its farewell: see the worker's own.

Messages of it can get lost, and a scheduler that is gone answers nothing. Knows no steps.
"""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from random import Random
from typing import Protocol, TypeVar

from quire.errors import QuireError
from quire.v1 import cluster_pb2
from tests.simulation.virtual_loop import Process, VirtualLoop

ANSWER_S = 2.0
AGAIN_S = 2.0
RETRY_S = 0.5
LOOK_EVERY_S = 0.05  # at what is left here, while it leaves
DELAY_S = (0.0001, 0.001)

Answer = TypeVar("Answer")


class Registry(Protocol):
    """Registry of a scheduler."""

    epoch: int

    def register(self, request: cluster_pb2.RegisterRequest) -> object: ...

    def drain(self, worker_id: str, *, undo: bool) -> int: ...


class Leader(Protocol):
    """A scheduler as workers reach it."""

    process: Process

    @property
    def registry(self) -> Registry: ...


class ToyRegistration:
    """Registration of one incarnation."""

    def __init__(
        self,
        loop: VirtualLoop,
        random_: Random,
        identity: cluster_pb2.RegisterRequest,
        *,
        find_leader: Callable[[], Leader | None],
        epoch: Callable[[], int],
        follow: Callable[[int], None],
    ) -> None:
        """`epoch` is the one that is followed, `follow` is told of each that a scheduler answers with."""
        self._loop = loop
        self._random = random_
        self._identity = identity
        self._find_leader = find_leader
        self._epoch = epoch
        self._follow = follow
        self.is_leaving = False

    async def keep(self) -> None:
        """Keep the registration until the end of the process."""
        while True:
            is_known = await self._register()
            await asyncio.sleep(AGAIN_S if is_known else RETRY_S)

    async def leave(self, patience_s: float) -> bool:
        """Waits until nothing is left here, or for so long. Returns whether nothing was, by a scheduler's word."""
        self.is_leaving = True
        with suppress(TimeoutError):
            async with asyncio.timeout(patience_s):
                if not await self._register():
                    return False
                while num_left := await self._ask(self._rest):  # noqa: ASYNC110 - the other side is asked
                    await asyncio.sleep(LOOK_EVERY_S)
                return num_left == 0
        return False

    async def _register(self) -> bool:
        epoch = await self._ask(self._introduce)
        if epoch is not None:
            self._follow(epoch)
        return epoch is not None

    def _introduce(self, registry: Registry) -> int:
        request = cluster_pb2.RegisterRequest()
        request.CopyFrom(self._identity)
        request.epoch, request.draining = self._epoch(), self.is_leaving
        registry.register(request)
        return registry.epoch

    def _rest(self, registry: Registry) -> int:
        return registry.drain(self._identity.worker_id, undo=False)

    async def _ask(self, ask: Callable[[Registry], Answer]) -> Answer | None:
        """Ask the leader; None: none leads, none answered, or it refused."""
        leader = self._find_leader()
        if leader is None:
            return None
        answer: asyncio.Future[Answer | None] = self._loop.create_future()
        leader.process.call_later(self._random.uniform(*DELAY_S), _answer, leader, ask, answer)
        try:
            async with asyncio.timeout(ANSWER_S):
                return await answer
        except TimeoutError:
            return None


def _answer(leader: Leader, ask: Callable[[Registry], Answer], answer: "asyncio.Future[Answer | None]") -> None:
    """Answer in the leader's process."""
    result = None
    with suppress(QuireError):
        result = ask(leader.registry)
    if not answer.done():
        answer.set_result(result)
