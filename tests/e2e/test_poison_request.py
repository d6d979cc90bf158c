"""A request that kills its workers among thirty others: it fails alone, after three deaths at most."""

import asyncio
from contextlib import AsyncExitStack, ExitStack

import pytest

import quire
from tests.e2e.beam_searches import search
from tests.e2e.mixed_load import MixedLoad
from tests.e2e.model_site import ModelSite, all_free
from tests.e2e.poisoned_worker import POISON
from tests.scheduler.journal_setup import until
from tests.services import Service
from tests.worker.tiny_models import random_prompts, write_tiny_model

MAX_DEATHS = 3
# 4 searches, 11 greedy requests, and of the same prompts 11 with one sample and 4 with four.
PROMPTS = random_prompts((5, 12, 30, 44, 60, 21, 9, 17, 33, 26, 40), seed=3)
SEARCHES = [search(prompt, 4, 20, ends=()) for prompt in random_prompts((6, 19, 35, 50), seed=4)]


class MortalWorkers:
    """Keeps two workers running: one that dies is started again."""

    def __init__(self, site: ModelSite) -> None:
        self._site = site
        self._stack = ExitStack()
        self._keepers: list[asyncio.Task[None]] = []
        self.num_deaths = 0

    async def __aenter__(self) -> "MortalWorkers":
        self._keepers = [asyncio.create_task(self._keep(name, self._start(name))) for name in ("first", "second")]
        return self

    async def __aexit__(self, *_: object) -> None:
        for keeper in self._keepers:
            keeper.cancel()
        await asyncio.to_thread(self._stack.close)

    def _start(self, name: str) -> Service:
        options = ("--worker-id", name, "--dtype", "float32", "--threads", "1", "--num-blocks", "400")
        place = ("--model", str(self._site.folder), "--scheduler", self._site.address)
        return self._stack.enter_context(Service("tests.e2e.poisoned_worker", *place, *options, may_fork=True))

    async def _keep(self, name: str, service: Service) -> None:
        while True:
            await asyncio.to_thread(service.wait, 600.0)
            self.num_deaths += 1
            service = self._start(name)


async def test_a_request_that_kills_workers_fails_alone_after_three_deaths(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    site = ModelSite(write_tiny_model("llama_gqa", tmp_path_factory.mktemp("model"), seed=3))
    load = MixedLoad.of(site, SEARCHES, PROMPTS)
    async with AsyncExitStack() as stack:
        workers = await stack.enter_async_context(MortalWorkers(site))
        service = await stack.enter_async_context(site.scheduler(num_workers=2))
        client = await stack.enter_async_context(quire.AsyncClient(site.address))
        await client.wait_ready(60)
        poison = asyncio.create_task(
            client.generate([*PROMPTS[0], *POISON], request_id="poison", temperature=0, max_tokens=20)
        )
        searched = await load.run(client)
        load.searches.compare(searched).assert_cuts_are_rare()
        with pytest.raises(quire.QuireError, match=r"crashed its worker 3 times, the last .*while running alone"):
            await poison
        record = await client.get("poison")
        assert record.state is quire.RequestState.FAILED
        await until(lambda: workers.num_deaths >= MAX_DEATHS)
        assert workers.num_deaths == MAX_DEATHS
        assert service.wait_for("request isolated")["request_id"] == "poison"
        stats = await all_free(client)
        assert stats.num_finished == len(PROMPTS) * 2 + 4 + len(SEARCHES) + 1
