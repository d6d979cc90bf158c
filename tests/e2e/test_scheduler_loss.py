"""The scheduler is killed again and again under requests of every kind; all finish, with the same outputs."""

import asyncio
import signal
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

import quire
from common.sampling_params import SequenceSampling
from quire.params import GenerateParams
from tests.e2e.beam_searches import Searches, search
from tests.e2e.greedy_reference import assert_greedy
from tests.e2e.model_site import ModelSite, all_free
from tests.e2e.sampled_reference import Drawing, assert_drawn
from tests.e2e.watched import Watched, until_more_has_come
from tests.patience import MOST_ATTEMPTS
from tests.services import Service, start_scheduler
from tests.valkey import ValkeyProcess
from tests.worker.tiny_models import random_prompts, write_tiny_model

NUM_TOKENS = 130  # long enough that nothing ends before the first death
NUM_DEATHS = 3
PROMPTS = random_prompts((1, 15, 16, 33, 5, 12, 30, 44, 60, 21, 8, 27), seed=9)
DRAWINGS = [
    *(Drawing(prompt, SequenceSampling(seed=70 + i, top_p=0.9), NUM_TOKENS) for i, prompt in enumerate(PROMPTS[:8])),
    *(Drawing(prompt, SequenceSampling(seed=80 + i), NUM_TOKENS, n=4) for i, prompt in enumerate(PROMPTS[:4])),
    Drawing(PROMPTS[4], SequenceSampling(seed=50, sample_index=2, repetition_penalty=1.2), NUM_TOKENS, n=2),
    Drawing(PROMPTS[5], SequenceSampling(seed=51, presence_penalty=0.5, frequency_penalty=0.1), NUM_TOKENS, n=2),
]
SEARCHES = [search(prompt, 4, NUM_TOKENS, ends=()) for prompt in PROMPTS[:4]]


class Site(ModelSite):
    """One worker, and schedulers on one store that can be killed."""

    def __init__(self, factory: pytest.TempPathFactory, stack: ExitStack) -> None:
        super().__init__(write_tiny_model("llama_gqa", factory.mktemp("model"), seed=3))
        self._stack = stack
        self._store = stack.enter_context(ValkeyProcess())
        self.worker = stack.enter_context(self.start_worker("only", "--num-blocks", "600"))
        self.lives: list[Service] = []

    def begin(self) -> None:
        """A scheduler that listens."""
        service, _ = start_scheduler("--store", self._store.url, listen=self.address)
        self.lives.append(self._stack.enter_context(service))

    def kill(self) -> None:
        """Kill the scheduler without a farewell."""
        self.lives[-1].signal(signal.SIGKILL)
        self.lives[-1].wait()


@pytest.fixture
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with ExitStack() as stack:
        yield Site(tmp_path_factory, stack)


async def test_thirty_mixed_requests_survive_a_scheduler_that_is_killed_three_times(site: Site) -> None:
    searches = Searches(site, SEARCHES)
    site.begin()
    async with quire.AsyncClient(site.address) as client:
        await client.wait_ready(60)
        for _ in range(MOST_ATTEMPTS):
            if await survive_in_time(site, client, searches):
                return
    raise AssertionError("deaths that came too late mean nothing")


async def survive_in_time(site: Site, client: quire.AsyncClient, searches: Searches) -> bool:
    """Kill the scheduler again and again under requests, and compare all outputs. False: all had ended before."""
    watched = Watched(client)
    plain: GenerateParams = {"temperature": 0, "max_tokens": NUM_TOKENS, "ignore_eos": True}
    greedy_runs = [asyncio.create_task(watched.run(prompt, plain)) for prompt in PROMPTS]
    drawn = [asyncio.create_task(watched.run(each.prompt, each.request())) for each in DRAWINGS]
    searched = [asyncio.create_task(watched.run(each.prompt, searches.request(i))) for i, each in enumerate(SEARCHES)]
    for _ in range(NUM_DEATHS):
        await until_more_has_come(watched, [*greedy_runs, *drawn, *searched])
        await asyncio.to_thread(site.kill)
        await asyncio.to_thread(site.begin)
    outputs = [completion.token_ids for completion in await asyncio.gather(*greedy_runs)]
    assert_greedy(site.reference, PROMPTS, outputs, NUM_TOKENS)
    assert_drawn(site.reference, DRAWINGS, await asyncio.gather(*drawn))
    searches.compare(await asyncio.gather(*searched)).assert_cuts_are_rare()
    await all_free(client)
    return all(life.wait_for("journal read")["num_live"] for life in site.lives[-NUM_DEATHS:])
