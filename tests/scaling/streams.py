"""Streams that are read without pause while a deployment is scaled: each checked, and each pause between tokens noted.

Half are read by the SDK, with ids of their own, and half over HTTP. Knows two addresses, not where services run.
"""

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Self

import httpx2

import quire
from quire.params import GenerateParams
from quire.shards import new_request_id
from tests.compose.load import PROMPTS

NUM_READERS = 12
_HTTP_EVERY = 3  # one of so many readers reads over HTTP
_NUM_TOKENS = tuple(range(240, 240 + 32 * len(PROMPTS), 32))  # streams end at other times than their neighbours
_HTTP_TIMEOUT_S = 120.0
_READY_S = 180.0  # for the first worker's start
_PAUSE_S = 0.1  # shorter ones are not kept


class WrongStreamError(Exception):
    """A stream was lost, or its tokens are not the reference's; the message says which."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """One of the requests that are sent again and again: greedy, or sampled with a seed."""

    prompt: str
    max_tokens: int
    temperature: float
    seed: int

    @property
    def params(self) -> GenerateParams:
        return {"max_tokens": self.max_tokens, "temperature": self.temperature, "seed": self.seed, "ignore_eos": True}

    def named(self, request_id: str) -> GenerateParams:
        return {**self.params, "request_id": request_id}


ASKS = tuple(
    Ask(prompt=prompt, max_tokens=number, temperature=index % 2 * 0.8, seed=index)
    for index, (prompt, number) in enumerate(zip(PROMPTS, _NUM_TOKENS, strict=True))
)


@dataclass(frozen=True, slots=True)
class Pause:
    """Time of one stream without a token, and when it ended, on the monotonic clock."""

    ended_s: float
    length_s: float
    stream: str


@dataclass(slots=True)
class Pauses:
    """Pauses of all streams: before the first token, and between two of them."""

    to_first: list[Pause] = field(default_factory=list)
    between: list[Pause] = field(default_factory=list)

    def longest_between(self, since_s: float = 0.0) -> Pause:
        """The longest one between two tokens of a stream among those that ended later."""
        return _longest(self.between, since_s)

    def longest_to_first(self, since_s: float = 0.0) -> Pause:
        """The longest one from submission to the first token, likewise."""
        return _longest(self.to_first, since_s)


class Arrivals:
    """Tokens of one stream as they come. Raises WrongStreamError when a position comes twice, or is skipped."""

    def __init__(self, stream: str, pauses: Pauses) -> None:
        self.tokens: list[int] = []
        self.stream = stream
        self._pauses = pauses
        self._last_s = time.monotonic()

    def add(self, position: int, tokens: list[int]) -> None:
        """Note tokens that begin at this position of the output."""
        if position != len(self.tokens):
            raise WrongStreamError(f"{self.stream}: position {position} came where {len(self.tokens)} was due")
        now_s = time.monotonic()
        pause = Pause(now_s, now_s - self._last_s, self.stream)
        if not self.tokens:
            self._pauses.to_first.append(pause)
        elif pause.length_s >= _PAUSE_S:
            self._pauses.between.append(pause)
        self.tokens += tokens
        self._last_s = now_s


class Streams:
    """Streams of one deployment. `ended` has the ids of those that were read by the SDK, with what they must have."""

    def __init__(self, client: quire.AsyncClient, http: httpx2.AsyncClient) -> None:
        self.pauses = Pauses()
        self.ended: dict[str, Ask] = {}
        self.num_ended = [0] * NUM_READERS  # by reader
        self.num_tokens = 0
        self._client = client
        self._http = http
        self._references: dict[Ask, list[int]] = {}
        self._grown = asyncio.Condition()

    @classmethod
    @asynccontextmanager
    async def of(cls, address: str, http_address: str) -> AsyncIterator[Self]:
        """Connect to a deployment, and let it make the references: each request alone, while nothing else runs."""
        async with AsyncExitStack() as stack:
            client = await stack.enter_async_context(quire.AsyncClient(address))
            http = await stack.enter_async_context(
                httpx2.AsyncClient(base_url=f"http://{http_address}", timeout=_HTTP_TIMEOUT_S)
            )
            streams = cls(client, http)
            await client.wait_ready(_READY_S)
            await streams._until_all_shards_serve()
            for ask in ASKS:
                done = await client.generate(ask.prompt, **ask.params)
                streams._references[ask] = list(done.token_ids)
            yield streams

    @property
    def client(self) -> quire.AsyncClient:
        return self._client

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Keep one stream of each reader open; at the end wait for those that are."""
        ending = asyncio.Event()

        async def repeat(reader: int) -> None:
            while not ending.is_set():
                ask = ASKS[(reader + self.num_ended[reader]) % len(ASKS)]
                self._check(await self._read(reader, ask), ask)
                self.num_ended[reader] += 1
                async with self._grown:
                    self._grown.notify_all()

        async with asyncio.TaskGroup() as tasks:
            for reader in range(NUM_READERS):
                tasks.create_task(repeat(reader))
            yield
            ending.set()

    async def until_each_has_ended(self, times: int, timeout_s: float) -> None:
        """Return when every reader has had so many more streams. Raises TimeoutError."""
        wanted = [number + times for number in self.num_ended]
        async with asyncio.timeout(timeout_s), self._grown:
            await self._grown.wait_for(
                lambda: all(has >= wants for has, wants in zip(self.num_ended, wanted, strict=True))
            )

    async def check_records(self) -> None:
        """Look every request up by its id. Raises WrongStreamError for one that is not finished and whole."""
        for request_id, ask in self.ended.items():
            record = await self._client.get(request_id)
            if record.state is not quire.RequestState.FINISHED:
                raise WrongStreamError(f"{request_id} was read to its end, and its record says {record.state}")
            if list(record.samples[0].token_ids) != self._references[ask]:
                raise WrongStreamError(f"{request_id} has other tokens in its record than were streamed")

    async def _until_all_shards_serve(self) -> None:
        """Return when every shard has answered: one that has had no worker yet refuses, and is lent one."""
        async with asyncio.timeout(_READY_S):
            for shard in await self._client.shards():
                while True:
                    try:
                        await self._client.generate("x", max_tokens=1, request_id=new_request_id(shard.number))
                        break
                    except quire.UnavailableError:
                        continue

    def _check(self, arrivals: Arrivals, ask: Ask) -> None:
        reference = self._references[ask]
        if arrivals.tokens != reference:
            pairs = zip(arrivals.tokens, reference, strict=False)
            differing = next((i for i, (ours, theirs) in enumerate(pairs) if ours != theirs), "none")
            raise WrongStreamError(
                f"{ask}: {len(arrivals.tokens)} tokens of {len(reference)}, first that differs: {differing}"
            )
        self.num_tokens += len(reference)

    async def _read(self, reader: int, ask: Ask) -> Arrivals:
        number = self.num_ended[reader]
        if reader % _HTTP_EVERY == 0:
            arrivals = Arrivals(f"http {reader}-{number}", self.pauses)
            try:
                await self._read_http(ask, arrivals)
            except httpx2.HTTPError as error:
                raise WrongStreamError(f"{arrivals.stream} after {len(arrivals.tokens)} tokens: {error!r}") from error
            return arrivals
        request_id = f"mine-{reader}-{number}"
        arrivals = Arrivals(request_id, self.pauses)
        async for chunk in self._client.stream(ask.prompt, **ask.named(request_id)):
            if chunk.token_ids:
                arrivals.add(chunk.position, list(chunk.token_ids))
        self.ended[request_id] = ask
        return arrivals

    async def _read_http(self, ask: Ask, arrivals: Arrivals) -> None:
        fields: dict[str, Any] = {"prompt": ask.prompt, "stream": True, "return_token_ids": True, **ask.params}
        async with self._http.stream("POST", "/v1/completions", json=fields) as answer:
            if answer.status_code != 200:
                raise WrongStreamError(f"HTTP {answer.status_code}: {(await answer.aread())[:500]!r}")
            async for line in answer.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                event = json.loads(line.removeprefix("data: "))
                if "error" in event:
                    raise WrongStreamError(f"over HTTP: {event['error']}")
                for choice in event["choices"]:
                    if choice.get("token_ids"):
                        arrivals.add(len(arrivals.tokens), choice["token_ids"])


def _longest(pauses: list[Pause], since_s: float) -> Pause:
    later = [pause for pause in pauses if pause.ended_s >= since_s]
    return max(later, key=lambda pause: pause.length_s, default=Pause(since_s, 0.0, "none"))
