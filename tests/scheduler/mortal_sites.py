"""Schedulers that die without a word on a store that outlives them, and clients who come back to the next one."""

import asyncio
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any

from quire.errors import UnavailableError
from quire.v1 import inference_pb2 as pb
from scheduler_svc.journal.memory_store import MemoryStore
from scheduler_svc.journal.store import EntryId
from scheduler_svc.requests.live.output_stream import Subscription
from tests.scheduler.journal_setup import until
from tests.scheduler.sample_outputs import RequestSeen, assert_recorded, record_of
from tests.scheduler.scripted_worker import ScriptedWorker
from tests.scheduler.serving_site import Site
from tests.scheduler.text_tokenizers import SPECIAL_TOKENS, byte_level_json


class SlowStore(MemoryStore):
    """Takes its time, so that entries are of every size, and may be the last to see a scheduler alive."""

    def __init__(self, random_: random.Random) -> None:
        super().__init__()
        self.is_fatal = asyncio.Event()
        self._num_left: int | None = None
        self._random = random_

    def stop_after(self, num_entries: int | None) -> None:
        """The write of this one, from now on, is never acknowledged, whether it is made or not; then `is_fatal`."""
        self._num_left = num_entries
        self.is_fatal.clear()

    async def append(self, entry_id: EntryId, payload: bytes, *, create: bool = False) -> None:
        for _ in range(self._random.choice([0, 1, 5, 40])):
            await asyncio.sleep(0)
        if self._num_left is not None:
            self._num_left -= 1
        is_last = self._num_left == 0
        if not is_last or self._random.random() < 0.5:
            await super().append(entry_id, payload, create=create)
        if is_last:
            self.is_fatal.set()
            await asyncio.Event().wait()


def speaking_worker(worker_id: str = "w1", **options: Any) -> ScriptedWorker:
    """Make a worker with a tokenizer of some 480 tokens and log-probabilities of prompts."""
    worker = ScriptedWorker(worker_id, **options)
    files = worker.description.tokenizer
    files.fingerprint, files.tokenizer_json = "bytes-1", byte_level_json()
    files.special_tokens.update(SPECIAL_TOKENS)
    worker.tells_prompt_logprobs = True
    return worker


class Lives:
    """One scheduler after another on one store. Workers outlive them, and register with each."""

    def __init__(self, store: MemoryStore, **options: Any) -> None:
        self.store = store
        self.workers: list[ScriptedWorker] = []
        self.num_lives = 0
        self.num_recovered = 0  # of the dead, in all
        self.num_restated = 0  # by the dead, in all
        self._options = options
        self._site: Site | None = None

    @property
    def site(self) -> Site:
        assert self._site is not None, "nobody lives"
        return self._site

    async def begin(self) -> Site:
        """The next one reads the journal and serves; no worker is there yet."""
        assert self._site is None
        self.num_lives += 1
        self._site = Site(self.store, epoch=self.num_lives, **self._options)
        await self._site.start()
        return self._site

    async def add_workers(self) -> None:
        for worker in self.workers:
            if not worker.address:
                await worker.start()
            await self.site.register(worker)

    async def die(self) -> None:
        """Die: write nothing more and tell nobody."""
        site, self._site = self.site, None
        self.num_recovered += site.recovery.num_recovered
        self.num_restated += site.journal.stats.num_restated
        site.readers.closed = True
        for task in site.writing:
            task.cancel()
        await asyncio.gather(*site.writing, return_exceptions=True)
        site.writing.clear()
        for request in site.engine.live.values():
            if request.deadline is not None:
                request.deadline.cancel()
        await site.close()

    async def close(self) -> None:
        if self._site is not None:
            await self._site.close()
        for worker in self.workers:
            await worker.stop()


@asynccontextmanager
async def lives_on(store: MemoryStore, num_blocks: int = 64, **options: Any) -> AsyncIterator[Lives]:
    """Lives of schedulers with one worker; `options`: of each site."""
    lives = Lives(store, **options)
    lives.workers.append(speaking_worker(num_blocks=num_blocks))
    try:
        yield lives
    finally:
        await lives.close()


class Client:
    """Submits one request and reads it through all lives, each position of each sample once."""

    def __init__(self, request: pb.GenerateRequest) -> None:
        self.request = request
        self.seen = RequestSeen()
        self.is_accepted = False
        self._place: Subscription | None = None

    @property
    def is_done(self) -> bool:
        return self.seen.finished is not None

    async def come(self, site: Site) -> None:
        """Submits the request, or attaches from where the client is."""
        self._place = None
        if self.is_done:
            return
        if self.is_accepted:
            stream = await site.control.find(self.request.request_id)
        else:
            with suppress(UnavailableError):
                stream, _ = await site.admission.submit(self.request, None)
                self.is_accepted = True
            if not self.is_accepted:
                return
        positions = [len(sample.token_ids) for sample in self.seen.samples]
        self._place = site.readers.subscribe(stream, positions, self._take)
        self._take(self._place)

    def _take(self, place: Subscription) -> None:
        if place is not self._place and self._place is not None:
            return  # of an earlier life
        response = pb.SessionResponse()
        place.take_chunks(lambda: response.events.add().chunk, 1_000_000)
        for event in response.events:
            chunk = event.chunk
            if chunk.index < len(self.seen.samples) and self.seen.samples[chunk.index].finish is not None:
                assert not chunk.num_tokens and chunk.finish == self.seen.samples[chunk.index].finish, "changed"
                continue
            self.seen.add_chunk(chunk)
        if place.done and not self.is_done:
            assert place.stream.finished is not None
            self.seen.finish(place.stream.finished)


async def assert_as_undisturbed(site: Site, clients: Sequence[Client], undisturbed: Sequence[Client]) -> None:
    """Each client has seen what that of an undisturbed run saw, the records say so, and nothing is left behind."""
    for client, reference in zip(clients, undisturbed, strict=True):
        assert client.seen.end.state == pb.REQUEST_STATE_FINISHED
        for seen, wanted in zip(client.seen.samples, reference.seen.samples, strict=True):
            assert (seen.token_ids, seen.text, seen.finish) == (wanted.token_ids, wanted.text, wanted.finish)
            assert (seen.logprobs, seen.prompt_logprobs) == (wanted.logprobs, wanted.prompt_logprobs)
        assert_recorded(await record_of(site, client.request.request_id), client.seen)
    await site.idle()
    assert not site.recovery.num_waiting


async def run_through_deaths(lives: Lives, clients: Sequence[Client], deaths: Sequence[int]) -> None:
    """Run lives that end after a number of journal entries, except the last. All clients are served at the end."""
    store = lives.store
    assert isinstance(store, SlowStore)
    for num_entries in [*deaths, None]:
        store.stop_after(None)  # the life before may have ended with its work, short of its entries
        site = await lives.begin()
        store.stop_after(num_entries)
        coming = [asyncio.create_task(client.come(site)) for client in clients if client.is_accepted]
        await lives.add_workers()
        coming += [asyncio.create_task(client.come(site)) for client in clients if not client.is_accepted]
        if num_entries is None:
            await asyncio.gather(*coming)
            await until(lambda: all(client.is_done for client in clients))
            return
        await until(lambda: store.is_fatal.is_set() or all(client.is_done for client in clients))
        await lives.die()
        for task in coming:
            task.cancel()
        await asyncio.gather(*coming, return_exceptions=True)
