"""Real services: requests paused to the host or to tokens, and through the end of the scheduler's process."""

import asyncio
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from typing import Any

import pytest

import quire
from quire.params import PauseKeep
from tests.e2e.model_site import ModelSite, all_free
from tests.patience import MOST_ATTEMPTS
from tests.services import DEMO_MODEL, Service, start_scheduler
from tests.valkey import ValkeyProcess

NUM_TOKENS = 192  # many more than are out when the last pause comes, on a busy machine too
PROMPT = "Once upon a time"
ASKS: list[dict[str, Any]] = [
    {"seed": 5},
    {"seed": 6, "n": 3},
    {"beam_width": 3, "n": 3},
    {"temperature": 0},
]
LASTING: dict[str, Any] = {
    "max_tokens": NUM_TOKENS,
    "ignore_eos": True,
    "on_disconnect": quire.OnDisconnect.CONTINUE,
}


class PausingSite(ModelSite):
    """One worker with a host pool, and a scheduler at a time on one store."""

    def __init__(self, stack: ExitStack) -> None:
        super().__init__(DEMO_MODEL)
        self._stack = stack
        self._store = stack.enter_context(ValkeyProcess())
        stack.enter_context(self.start_worker("only", "--num-blocks", "400", "--num-host-blocks", "200"))

    def begin(self) -> Service:
        service, _ = start_scheduler("--store", self._store.url, listen=self.address)
        return self._stack.enter_context(service)


@pytest.fixture(scope="module")
def site() -> Iterator[PausingSite]:
    with ExitStack() as stack:
        yield PausingSite(stack)


Reading = dict[str, "asyncio.Task[quire.Completion]"]


def submitted(client: quire.AsyncClient) -> Reading:
    """One request of each kind, by their ids."""
    streams = [client.stream(PROMPT, **LASTING, **ask) for ask in ASKS]
    return {stream.request_id: asyncio.create_task(stream.completion()) for stream in streams}


async def outputs(reading: Reading) -> list[list[tuple[int, ...]]]:
    return [[sample.token_ids for sample in (await each).samples] for each in reading.values()]


async def grown(client: quire.AsyncClient, reading: Reading, num_tokens: int) -> None:
    """Wait until the first of them has this many tokens."""
    while len((await client.get(next(iter(reading)))).token_ids) < num_tokens:  # noqa: ASYNC110 - of another process
        await asyncio.sleep(0.005)


async def paused_in_time(client: quire.AsyncClient, pauses: list[tuple[int, PauseKeep]]) -> Reading:
    """Submit one request of each kind; pause and resume them all, but resume not from the last pause.

    Again if one has ended before its pause, as on a busy machine.
    """
    for _ in range(MOST_ATTEMPTS):
        reading = submitted(client)
        try:
            for number, (num_tokens, keep) in enumerate(pauses):
                if number:
                    await resume_all(client, reading)
                await grown(client, reading, num_tokens)
                stats = await pause_all(client, reading, keep)
                assert (stats.workers[0].used_host_blocks > 0) == (keep == "auto")
        except quire.FailedPreconditionError:
            for request_id in reading:
                with suppress(quire.FailedPreconditionError):
                    await client.resume(request_id)
            await outputs(reading)
        else:
            return reading
    raise AssertionError("pauses that come too late mean nothing")


async def pause_all(client: quire.AsyncClient, reading: Reading, keep: PauseKeep) -> quire.Stats:
    """Returns once their last steps are done. Raises FailedPreconditionError if one has ended."""
    states = await asyncio.gather(*(client.pause(request_id, keep) for request_id in reading), return_exceptions=True)
    for state in states:
        if isinstance(state, BaseException):
            raise state
    assert set(states) == {quire.RequestState.PAUSED}
    while (stats := await client.stats()).blocks.used:  # noqa: ASYNC110 - of another process
        await asyncio.sleep(0.005)
    assert (stats.num_paused, stats.num_running, stats.num_waiting) == (len(ASKS), 0, 0)
    return stats


async def resume_all(client: quire.AsyncClient, reading: Reading) -> None:
    await asyncio.gather(*(client.resume(request_id) for request_id in reading))


async def test_paused_requests_go_on_exactly_from_host_or_tokens_and_in_the_next_scheduler(site: PausingSite) -> None:
    service = await asyncio.to_thread(site.begin)
    async with quire.AsyncClient(site.address) as client:
        await client.wait_ready(60)
        undisturbed = await outputs(submitted(client))
        reading = await paused_in_time(client, [(3, "auto"), (12, "tokens"), (20, "auto")])
        await resume_all(client, reading)
        assert await outputs(reading) == undisturbed
        await all_free(client)

        reading = await paused_in_time(client, [(10, "auto")])
        assert await asyncio.to_thread(service.stop) == 0, "it waits for nobody who is paused"
        service = await asyncio.to_thread(site.begin)
        await client.wait_ready(60)
        for request_id in reading:
            assert (await client.get(request_id)).state is quire.RequestState.PAUSED
        await resume_all(client, reading)
        assert await outputs(reading) == undisturbed
        await all_free(client)
    assert await asyncio.to_thread(service.stop) == 0
