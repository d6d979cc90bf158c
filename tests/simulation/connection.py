"""A client's connection to a scheduler: one Session stream, with delays, a window, and an end that is seen late."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from random import Random

from quire.v1 import inference_pb2 as pb
from tests.simulation.virtual_loop import Process, VirtualLoop

DELAY_S = (0.0001, 0.001)
WINDOW = 4  # responses that are on their way or not yet taken


class ConnectionLostError(Exception):
    """At the client."""


class Connection:
    """Made by the client. The server's side runs in the server's process."""

    def __init__(self, loop: VirtualLoop, random_: Random, server: Process) -> None:
        self._loop = loop
        self._random = random_
        self._server = server
        self._task: asyncio.Task[None] | None = None  # the server's
        self._is_lost = False  # as the client sees it
        self._has_client = True  # as the server sees it
        self._inbox: deque[pb.SessionResponse] = deque()
        self._news = asyncio.Event()
        self._num_unread = 0
        self._room = asyncio.Event()
        self._requests: asyncio.Queue[pb.SessionRequest] = asyncio.Queue()
        self._last_s = {True: 0.0, False: 0.0}  # when the last message to the server, or from it, arrives

    def say(self, request: pb.SessionRequest) -> None:
        """By the client."""
        self._server.call_later(self._delay(to_server=True), self._requests.put_nowait, request)

    async def next_response(self) -> pb.SessionResponse:
        """For the client. Raises ConnectionLostError."""
        while not self._inbox:
            if self._is_lost:
                raise ConnectionLostError
            self._news.clear()
            await self._news.wait()
        self._server.call_later(self._delay(to_server=True), self._taken)
        return self._inbox.popleft()

    def hang_up(self, notice_s: float) -> None:
        """By the client; the server notices after a while. What is under way is lost."""
        self._is_lost = True
        self._inbox.clear()
        self._news.set()
        self._server.call_later(notice_s, self._client_gone)

    def lose(self) -> None:
        """The client finds that the server is silent."""
        self.hang_up(0.0)

    def lose_if_unserved(self) -> None:
        """The server that was dialled has died before it answered."""
        if self._task is None and not self._is_lost:
            self.lose()

    def serve(self, task: "asyncio.Task[None]") -> None:
        """By the server."""
        self._task = task
        if not self._has_client:
            task.cancel()

    async def requests(self) -> AsyncIterator[pb.SessionRequest]:
        """For the server."""
        while True:
            yield await self._requests.get()

    async def send(self, response: pb.SessionResponse) -> None:
        """By the server; waits while the client does not read."""
        self._loop.outside(self._delay(to_server=False), self._arrive, response)
        self._num_unread += 1
        while self._num_unread >= WINDOW:
            self._room.clear()
            await self._room.wait()

    def end_from_server(self) -> None:
        """The server is gone, or has hung up."""
        self._loop.outside(self._delay(to_server=False), self._server_gone)

    def _arrive(self, response: pb.SessionResponse) -> None:
        if not self._is_lost:
            self._inbox.append(response)
            self._news.set()

    def _taken(self) -> None:
        self._num_unread -= 1
        self._room.set()

    def _server_gone(self) -> None:
        self._is_lost = True
        self._news.set()

    def _client_gone(self) -> None:
        self._has_client = False
        if self._task is not None:
            self._task.cancel()

    def _delay(self, *, to_server: bool) -> float:
        now_s = self._loop.time()
        arrives_s = max(now_s + self._random.uniform(*DELAY_S), self._last_s[to_server] + 1e-9)
        self._last_s[to_server] = arrives_s
        return arrives_s - now_s
