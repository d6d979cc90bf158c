"""Workers are killed under groups and beams; all go on elsewhere, rebuilt as they were, with the same outputs."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

import quire
from common.sampling_params import SequenceSampling
from tests.e2e.beam_searches import Searches, search
from tests.e2e.model_site import ModelSite
from tests.e2e.sampled_reference import Drawing, assert_drawn
from tests.worker.tiny_models import random_prompts, write_tiny_model

NUM_TOKENS = 200  # long enough that nothing ends before its worker is killed
# Each has a full block, so that what begins with one prompt is placed where that block is: a worker that has a search
# has samples too, whichever is killed.
PROMPTS = random_prompts((17, 31, 32, 33), seed=7)
DRAWINGS = [
    Drawing(PROMPTS[0], SequenceSampling(seed=1), NUM_TOKENS, n=4),
    Drawing(PROMPTS[1], SequenceSampling(seed=2, temperature=0.8, top_p=0.9), NUM_TOKENS, n=4),
    Drawing(PROMPTS[2], SequenceSampling(seed=3, presence_penalty=0.5, frequency_penalty=0.1), NUM_TOKENS, n=4),
    Drawing(PROMPTS[3], SequenceSampling(seed=4, sample_index=2, repetition_penalty=1.2), NUM_TOKENS, n=4),
]
SEARCHES = [search(prompt, 4, NUM_TOKENS, ends=()) for prompt in PROMPTS]
BUDGET = ("--max-batched-tokens", "32")


class Site(ModelSite):
    """Site with its searches' answers, and workers that can be killed."""

    def __init__(self, factory: pytest.TempPathFactory) -> None:
        super().__init__(write_tiny_model("llama_gqa", factory.mktemp("model"), seed=3))
        self.searches = Searches(self, SEARCHES)
        self._stack = ExitStack()

    def start(self, name: str) -> Callable[[], None]:
        """Returns what kills it."""
        return self._stack.enter_context(self.start_worker(name, "--num-blocks", "400")).kill

    def end_workers(self) -> None:
        self._stack.pop_all().close()


@pytest.fixture(scope="module")
def module_site(tmp_path_factory: pytest.TempPathFactory) -> Site:
    return Site(tmp_path_factory)


@pytest.fixture
def site(module_site: Site) -> Iterator[Site]:
    yield module_site
    module_site.end_workers()


async def run_with_fault(site: Site, client: quire.AsyncClient, fault: Callable[[], None]) -> None:
    """Calls `fault` once all samples have some tokens, and compares everything at the end."""
    searches = [
        asyncio.create_task(client.generate(each.prompt, **site.searches.request(index)))
        for index, each in enumerate(SEARCHES)
    ]
    started = [asyncio.Event() for _ in DRAWINGS]
    drawn = [asyncio.create_task(draw(client, *each)) for each in zip(DRAWINGS, started, strict=True)]
    for event in started:
        await event.wait()
    await asyncio.to_thread(fault)
    samples, beams = await asyncio.gather(*drawn), await asyncio.gather(*searches)
    assert_drawn(site.reference, DRAWINGS, samples)
    site.searches.compare(beams).assert_cuts_are_rare()
    for kind in (samples, beams):  # some of each had been computed where they cannot be any more
        assert sum(each.memory.recomputed_tokens for each in kind) > 0


async def draw(client: quire.AsyncClient, drawing: Drawing, started: asyncio.Event) -> quire.Completion:
    stream, num_tokens = client.stream(drawing.prompt, **drawing.request()), [0] * drawing.n
    while min(num_tokens) <= 3:
        chunk = await anext(stream)
        assert chunk.position == num_tokens[chunk.index]
        num_tokens[chunk.index] += chunk.num_tokens
    started.set()
    return await stream.completion()


async def test_groups_and_beams_move_as_a_whole_when_one_of_two_workers_is_killed(site: Site) -> None:
    kill_first, _ = site.start("first"), site.start("second")
    async with site.client(*BUDGET, num_workers=2) as client:
        await run_with_fault(site, client, kill_first)
        (left,) = (await client.stats()).workers
        assert left.worker_id == "second"


async def test_groups_and_beams_wait_for_the_only_worker_to_come_back(site: Site) -> None:
    kill = site.start("only")

    def fault() -> None:
        kill()
        site.start("only")

    async with site.client(*BUDGET) as client:
        await run_with_fault(site, client, fault)
