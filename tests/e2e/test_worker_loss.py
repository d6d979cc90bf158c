"""Workers die, freeze and come back while requests run; what was accepted finishes, with the same output."""

import asyncio
import signal
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import quire
from tests.e2e.greedy_reference import assert_greedy
from tests.e2e.model_site import all_free
from tests.patience import patient
from tests.services import Service, free_address, start_scheduler, start_worker
from tests.worker.tiny_models import random_prompts, write_tiny_model

NUM_TOKENS = 100
WORKER = ("--dtype", "float32", "--threads", "1", "--num-blocks", "80")


class Site:
    """A scheduler, its address, and a model to start workers with."""

    def __init__(self, scheduler: Service, address: str, model: Path, stack: ExitStack) -> None:
        self.scheduler = scheduler
        self.address = address
        self._model = model
        self._stack = stack

    def start_worker(self, name: str) -> Service:
        worker = start_worker(self.address, "--worker-id", name, *WORKER, model=self._model)
        return self._stack.enter_context(worker)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model("llama_gqa", tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    return random_prompts((5, 12, 30, 44, 60, 21), seed=3)


@pytest.fixture(scope="module")
def reference(model: Path) -> Any:
    torch.set_num_threads(1)
    return AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)


@pytest.fixture
def site(model: Path) -> Iterator[Site]:
    with ExitStack() as stack:
        scheduler, address = start_scheduler(listen=free_address())
        stack.enter_context(scheduler)
        yield Site(scheduler, address, model, stack)


async def run_with_fault(address: str, prompts: list[list[int]], reference: Any, fault: Callable[[], None]) -> None:
    """Runs all prompts, calls `fault` once every one of them has streamed some tokens, and compares the outputs."""
    started = [asyncio.Event() for _ in prompts]

    async def one(client: quire.AsyncClient, index: int) -> list[int]:
        tokens: list[int] = []
        stream = client.stream(prompts[index], max_tokens=NUM_TOKENS, temperature=0, ignore_eos=True)
        async for chunk in checked(stream, tokens):
            tokens.extend(chunk.token_ids)
            if len(tokens) > 3:
                started[index].set()
        return tokens

    async with quire.AsyncClient(address) as client:
        await client.wait_ready(60)
        runs = [asyncio.create_task(one(client, index)) for index in range(len(prompts))]
        for event in started:
            await event.wait()
        await asyncio.to_thread(fault)
        assert_greedy(reference, prompts, await asyncio.gather(*runs), NUM_TOKENS)
        await all_free(client)


async def checked(stream: quire.CompletionStream, tokens: list[int]) -> AsyncIterator[quire.Chunk]:
    """Every position once, in order."""
    async for chunk in stream:
        assert chunk.position == len(tokens)
        yield chunk


def test_sequences_move_when_one_of_two_workers_is_killed(site: Site, prompts: list[list[int]], reference: Any) -> None:
    first, _second = site.start_worker("first"), site.start_worker("second")
    site.scheduler.wait_for("worker ready", 2)
    asyncio.run(run_with_fault(site.address, prompts, reference, lambda: first.signal(signal.SIGKILL)))
    site.scheduler.wait_for("worker lost")


def test_sequences_wait_when_the_only_worker_is_killed_and_go_on_when_it_is_back(
    site: Site, prompts: list[list[int]], reference: Any
) -> None:
    worker = site.start_worker("only")
    site.scheduler.wait_for("worker ready")

    def fault() -> None:
        worker.kill()
        site.start_worker("only")

    asyncio.run(run_with_fault(site.address, prompts, reference, fault))
    site.scheduler.wait_for("worker ready", 2)


def test_a_frozen_worker_is_given_up_within_seconds(site: Site, prompts: list[list[int]], reference: Any) -> None:
    frozen, _other = site.start_worker("frozen"), site.start_worker("other")
    site.scheduler.wait_for("worker ready", 2)

    def fault() -> None:
        frozen.signal(signal.SIGSTOP)
        site.scheduler.wait_for("worker lost", timeout_s=5)

    asyncio.run(run_with_fault(site.address, prompts, reference, fault))


def test_a_worker_of_another_model_is_refused(site: Site, tmp_path: Path) -> None:
    site.start_worker("first")
    site.scheduler.wait_for("worker ready")
    other = write_tiny_model("gpt2", tmp_path / "gpt2")
    with start_worker(site.address, "--worker-id", "other", *WORKER, model=other) as worker:
        line = worker.wait_for("not registered")
        assert "another model" in str(line)


def test_what_runs_on_a_worker_that_drains_moves_and_it_gets_nothing_new(
    site: Site, prompts: list[list[int]], reference: Any
) -> None:
    site.start_worker("first")
    site.start_worker("second")
    site.scheduler.wait_for("worker ready", 2)

    def fault() -> None:
        with quire.Client(site.address) as client:
            client.drain_worker("first")
            until_s = time.monotonic() + patient(60)
            while True:  # its step in flight may last
                drained, other = sorted(client.stats().workers, key=lambda worker: worker.worker_id)
                assert (drained.draining, other.draining) == (True, False) and time.monotonic() < until_s
                if not drained.num_running:
                    break
                time.sleep(0.01)

    asyncio.run(run_with_fault(site.address, prompts, reference, fault))
    assert not any(line["event"] == "worker lost" for line in site.scheduler.lines)


def test_a_worker_that_is_told_to_end_hands_its_sequences_over_first(
    site: Site, prompts: list[list[int]], reference: Any
) -> None:
    first, _second = site.start_worker("first"), site.start_worker("second")
    site.scheduler.wait_for("worker ready", 2)

    def fault() -> None:
        assert first.stop() == 0
        assert site.scheduler.wait_for("worker left")["worker_id"] == "first"

    asyncio.run(run_with_fault(site.address, prompts, reference, fault))
    assert not any(line["event"] == "worker lost" for line in site.scheduler.lines)
