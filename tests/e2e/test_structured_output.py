"""Structured outputs of real services: each meets its constraint, and is the same whatever happens meanwhile."""

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import ExitStack

import pytest

import quire
from tests.e2e.model_site import ModelSite
from tests.e2e.structured_asks import structured_asks
from tests.e2e.watched import Watched, until_more_has_come
from tests.services import DEMO_MODEL, Service, free_address, start_scheduler
from tests.valkey import ValkeyProcess

ASKS = structured_asks()
EOS = 1  # of the model
POOL = ("--num-blocks", "110", "--num-host-blocks", "110")
Texts = list[list[str]]


async def run_asks(client: quire.AsyncClient) -> tuple[Texts, Sequence[quire.Completion]]:
    completions = await asyncio.gather(*(client.generate(each.prompt, **each.params) for each in ASKS))
    return [[sample.text for sample in each.samples] for each in completions], completions


@pytest.fixture(scope="module")
def site() -> Iterator[ModelSite]:
    site = ModelSite(DEMO_MODEL)
    with site.start_worker("first", *POOL):
        yield site


@pytest.fixture(scope="module")
def texts(site: ModelSite) -> Texts:
    """Outputs of all requests, at depth 1."""

    async def run() -> Texts:
        async with site.client("--pipeline-depth", "1") as client:
            texts, completions = await run_asks(client)
            for ask, completion in zip(ASKS, completions, strict=True):
                ask.check(completion)
            return texts

    return asyncio.run(run())


@pytest.mark.parametrize(
    "flags",
    [
        ("--preempt-every", "5", "--preemption", "swap"),
        ("--preempt-every", "5", "--preemption", "recompute"),
        ("--step-form", "whole"),
    ],
    ids=["swap", "recompute", "whole steps"],
)
async def test_outputs_are_the_same_all_at_once(site: ModelSite, texts: Texts, flags: tuple[str, ...]) -> None:
    async with site.client(*flags) as client:
        found, completions = await run_asks(client)
    assert found == texts
    if "--preempt-every" in flags:
        assert sum(each.usage.num_preemptions for each in completions) > len(ASKS) / 3


@pytest.mark.parametrize("runner", ["cpu", pytest.param("device", marks=pytest.mark.long)])
async def test_a_tensor_parallel_group_gives_the_same(texts: Texts, runner: str) -> None:
    """On CPUs rank 0 follows the grammars, and forces tokens, for all; on accelerators each rank follows them."""
    site = ModelSite(DEMO_MODEL)
    with site.start_worker("group", "--tensor-parallel", "2", "--runner", runner, *POOL):
        async with site.client("--preempt-every", "9") as client:
            assert (await run_asks(client))[0] == texts


@pytest.mark.long
async def test_the_runner_of_accelerators_gives_the_same(texts: Texts) -> None:
    site = ModelSite(DEMO_MODEL)
    with site.start_worker("accelerated", "--runner", "device", *POOL):
        async with site.client("--preempt-every", "9") as client:
            assert (await run_asks(client))[0] == texts


async def test_outputs_are_the_same_after_scheduler_and_worker_were_killed(texts: Texts) -> None:
    site = ModelSite(DEMO_MODEL)
    site.address = free_address()
    with ExitStack() as stack:
        store = stack.enter_context(ValkeyProcess())

        def start() -> Service:
            service, _ = start_scheduler("--store", store.url, listen=site.address)
            return stack.enter_context(service)

        scheduler = await asyncio.to_thread(start)
        first = stack.enter_context(site.start_worker("first", *POOL))
        async with quire.AsyncClient(site.address) as client:
            await client.wait_ready(60)
            watched = Watched(client)
            runs = [asyncio.create_task(watched.run(each.prompt, each.params)) for each in ASKS]
            await until_more_has_come(watched, runs)
            await asyncio.to_thread(scheduler.kill)
            await asyncio.to_thread(start)
            await until_more_has_come(watched, runs)
            await asyncio.to_thread(first.kill)
            stack.enter_context(site.start_worker("second", *POOL))
            completions = await asyncio.gather(*runs)
    assert [[sample.text for sample in each.samples] for each in completions] == texts


async def test_what_cannot_be_compiled_is_refused_and_disturbs_no_other(site: ModelSite) -> None:
    chain = "start: r0\n" + "\n".join(f"r{i}: r{i + 1}" for i in range(4000)) + '\nr4000: "a"\n'
    async with site.client() as client:
        good = asyncio.create_task(client.generate("Once", json_object=True, max_tokens=60, temperature=0))
        for constraint, reason in (
            ({"lark": chain}, "nests too deep"),
            ({"regex": "(a{1000}){1000}"}, "takes more than"),
            ({"json_schema": {"not": {}}}, "Unimplemented"),
        ):
            with pytest.raises(quire.InvalidRequestError, match=rf"structured_output: cannot be used: .*{reason}"):
                await client.generate("Once", **constraint)
        assert (await good).text.startswith("{")


async def test_a_grammar_that_costs_more_and_more_fails_alone_and_says_which_limit_it_met(site: ModelSite) -> None:
    lark = "start: e\ne: e e | W\nW: /[a-z ]/"
    async with site.client() as client:
        alone = await client.generate("Once upon a time", max_tokens=100, temperature=0)
        beside = asyncio.create_task(client.generate("Once upon a time", max_tokens=100, temperature=0))
        with pytest.raises(quire.RequestFailedError, match="can be read in too many ways"):
            await client.generate("Once", lark=lark, max_tokens=300, temperature=1, seed=1, logit_bias={EOS: -100.0})
        assert (await beside).text == alone.text
