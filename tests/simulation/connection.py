"""A client's connection to a scheduler: one Session stream, with delays, a window, an end that is seen late or not."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from random import Random

from quire.v1 import inference_pb2 as pb
from tests.simulation.virtual_loop import Process, VirtualLoop

DELAY_S = (0.0001, 0.001)
SERVER_PATIENCE_S = 40.0  # until it misses the answer to a ping: the scheduler's defaults
WINDOW = 4  # responses that are on their way or not yet taken


class ConnectionLostError(Exception):
    """Loss of a connection, raised at the client."""


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
        self.half_open_s: float | None = None  # since when what one side says gets lost
        self._is_unheard = False  # the client
        self._is_deaf = False  # the client
        self._last_s = {True: 0.0, False: 0.0}  # when the last message to the server, or from it, arrives

    def say(self, request: pb.SessionRequest) -> None:
        """Send a request from the client."""
        self._tell_server(self._delay(to_server=True), self._requests.put_nowait, request)

    async def next_response(self) -> pb.SessionResponse:
        """Wait for the client's next response. Raises ConnectionLostError."""
        while not self._inbox:
            if self._is_lost:
                raise ConnectionLostError
            self._news.clear()
            await self._news.wait()
        self._tell_server(self._delay(to_server=True), self._taken)
        return self._inbox.popleft()

    def hang_up(self, notice_s: float) -> None:
        """Close the connection at the client; the server notices later. Messages under way are lost."""
        self._is_lost = True
        self._inbox.clear()
        self._news.set()
        self._tell_server(notice_s, self._client_gone)

    def lose_way(self, *, to_server: bool) -> None:
        """Lose all later messages in this direction, the end too. Only the server pings, and rarely."""
        if self.half_open_s is None:
            self.half_open_s = self._loop.now_s
            self._server.call_later(SERVER_PATIENCE_S, self._miss_pings)
        self._is_unheard |= to_server
        self._is_deaf |= not to_server

    def lose(self) -> None:
        """The client finds that the server is silent."""
        self.hang_up(0.0)

    def lose_if_unserved(self) -> None:
        """The server that was dialled has died before it answered."""
        if self._task is None and not self._is_lost:
            self.lose()

    def serve(self, task: "asyncio.Task[None]") -> None:
        """Serve the connection at the server."""
        self._task = task
        if not self._has_client:
            task.cancel()

    async def requests(self) -> AsyncIterator[pb.SessionRequest]:
        """Yield requests to the server."""
        while True:
            yield await self._requests.get()

    async def send(self, response: pb.SessionResponse) -> None:
        """Send a response from the server; waits while the client does not read."""
        self._tell_client(self._arrive, response)
        self._num_unread += 1
        while self._num_unread >= WINDOW:
            self._room.clear()
            await self._room.wait()

    def end_from_server(self) -> None:
        """The server is gone, or has hung up."""
        self._tell_client(self._server_gone)

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

    def _miss_pings(self) -> None:
        """Break the connection at the server after missed pings."""
        self._client_gone()
        self.end_from_server()

    def _tell_server(self, delay_s: float, callback: Callable[..., None], *args: object) -> None:
        if not self._is_unheard:
            self._server.call_later(delay_s, callback, *args)

    def _tell_client(self, callback: Callable[..., None], *args: object) -> None:
        if not self._is_deaf:
            self._loop.outside(self._delay(to_server=False), callback, *args)

    def _delay(self, *, to_server: bool) -> float:
        now_s = self._loop.now_s
        arrives_s = max(now_s + self._random.uniform(*DELAY_S), self._last_s[to_server] + 1e-9)
        self._last_s[to_server] = arrives_s
        return arrives_s - now_s
