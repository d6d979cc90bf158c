"""Running requests move between workers with their blocks: whatever dies meanwhile, outputs are the same."""

import asyncio
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import quire
from tests.e2e.greedy_reference import assert_greedy
from tests.patience import MOST_ATTEMPTS
from tests.services import Service, free_address, start_scheduler, start_worker
from tests.worker.tiny_models import random_prompts, write_tiny_model

NUM_TOKENS = 120
WORKER = ("--dtype", "float32", "--threads", "1", "--num-blocks", "400", "--block-size", "16")


class Site:
    """A scheduler that always fetches, and two workers."""

    def __init__(self, scheduler: Service, address: str, model: Path, stack: ExitStack) -> None:
        self.scheduler = scheduler
        self.address = address
        self._model = model
        self._stack = stack
        self.workers: dict[str, Service] = {}

    def start_worker(self, name: str) -> None:
        worker = start_worker(self.address, "--worker-id", name, *WORKER, model=self._model)
        self.workers[name] = self._stack.enter_context(worker)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model("llama_gqa", tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    return random_prompts((35, 12, 30, 44, 60, 21), seed=5)


@pytest.fixture(scope="module")
def reference(model: Path) -> Any:
    torch.set_num_threads(1)
    return AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)


@pytest.fixture
def site(model: Path) -> Iterator[Site]:
    with ExitStack() as stack:
        scheduler, address = start_scheduler("--block-fetch", "always", listen=free_address())
        stack.enter_context(scheduler)
        site = Site(scheduler, address, model, stack)
        for name in ("first", "second"):
            site.start_worker(name)
        scheduler.wait_for("worker ready", 2)
        yield site


async def run_on_first(
    site: Site,
    prompts: list[list[int]],
    reference: Any,
    act: Callable[[quire.AsyncClient], Any],
    num_tokens: int = NUM_TOKENS,
) -> quire.Stats:
    """Run all prompts on the first of two workers, open the second and act once each has streamed some tokens.

    Compares the outputs, and returns the last statistics.
    """
    started = [asyncio.Event() for _ in prompts]

    async def one(client: quire.AsyncClient, index: int) -> list[int]:
        tokens: list[int] = []
        async for chunk in client.stream(prompts[index], max_tokens=num_tokens, temperature=0, ignore_eos=True):
            assert chunk.position == len(tokens)
            tokens.extend(chunk.token_ids)
            if len(tokens) > 3:
                started[index].set()
        return tokens

    async with quire.AsyncClient(site.address) as client:
        await client.wait_ready(60)
        await client.drain_worker("second")
        runs = [asyncio.create_task(one(client, index)) for index in range(len(prompts))]
        for event in started:
            await event.wait()
        await client.drain_worker("second", undo=True)
        await act(client)
        assert_greedy(reference, prompts, await asyncio.gather(*runs), num_tokens)
        return await client.stats()


def test_prompts_are_computed_by_one_worker_and_outputs_by_the_other(
    model: Path, prompts: list[list[int]], reference: Any
) -> None:
    async def run(address: str) -> quire.Stats:
        async with quire.AsyncClient(address) as client:
            await client.wait_ready(60)
            asks = [client.generate(each, max_tokens=NUM_TOKENS, temperature=0, ignore_eos=True) for each in prompts]
            completions = await asyncio.gather(*asks)
            assert_greedy(reference, prompts, [each.token_ids for each in completions], NUM_TOKENS)
            assert all(each.usage.num_preemptions == 0 for each in completions)
            return await client.stats()

    with ExitStack() as stack:
        scheduler, address = start_scheduler(listen=free_address())
        stack.enter_context(scheduler)
        for role in ("prefill", "decode"):
            options = ("--worker-id", role, "--role", role, *WORKER)
            stack.enter_context(start_worker(address, *options, model=model))
        scheduler.wait_for("worker ready", 2)
        stats = asyncio.run(run(address))
    (decode,) = [worker for worker in stats.workers if worker.worker_id == "decode"]
    assert decode.fetched_blocks == sum(-(-len(prompt) // 16) for prompt in prompts)
    assert stats.work.recomputed_tokens == 0
    assert decode.num_steps > NUM_TOKENS - 2
    assert "fetch broke off" not in "".join(scheduler.raw)


def test_the_requests_of_a_worker_that_drains_move_with_their_blocks(
    site: Site, prompts: list[list[int]], reference: Any
) -> None:
    async def drain_first(client: quire.AsyncClient) -> None:
        await client.drain_worker("first")

    stats = asyncio.run(run_on_first(site, prompts, reference, drain_first))
    assert stats.work.fetched_blocks >= 6
    assert stats.work.recomputed_tokens <= 6 * 2  # those in flight
    (second,) = [worker for worker in stats.workers if worker.worker_id == "second"]
    assert second.fetched_blocks == stats.work.fetched_blocks
    assert "fetch broke off" not in "".join(site.scheduler.raw)


def test_a_worker_that_is_told_to_end_stays_until_its_blocks_have_gone(
    site: Site, prompts: list[list[int]], reference: Any
) -> None:
    async def end_first(client: quire.AsyncClient) -> None:
        assert await asyncio.to_thread(site.workers["first"].stop) == 0

    stats = asyncio.run(run_on_first(site, prompts, reference, end_first))
    assert stats.work.fetched_blocks >= 6
    assert "fetch broke off" not in "".join(site.scheduler.raw)


@pytest.mark.parametrize("killed", ["first", "second"])
def test_either_worker_may_be_killed_while_requests_move(
    site: Site, prompts: list[list[int]], reference: Any, killed: str
) -> None:
    async def drain_and_kill(client: quire.AsyncClient) -> None:
        await client.drain_worker("first")
        site.workers[killed].signal(signal.SIGKILL)
        if killed == "second":
            await asyncio.to_thread(site.start_worker, "third")

    asyncio.run(run_on_first(site, prompts, reference, drain_and_kill))


def test_a_worker_with_nothing_to_do_gets_a_share_of_what_runs(
    site: Site, prompts: list[list[int]], reference: Any
) -> None:
    num_tokens, is_in_time = 190, False

    async def look(client: quire.AsyncClient) -> None:
        nonlocal is_in_time
        running = (await client.list_requests()).requests
        is_in_time = len(running) == 2 * len(prompts) and max(each.output_tokens for each in running) < num_tokens / 2

    for _ in range(MOST_ATTEMPTS):
        stats = asyncio.run(run_on_first(site, [*prompts, *prompts], reference, look, num_tokens))
        assert stats.work.num_preemptions == 0
        if stats.work.fetched_blocks >= 2:
            return
        assert not is_in_time, "nothing was shared, though all had much to do when the second came"
    raise AssertionError("a worker that comes when all is over is given nothing")
