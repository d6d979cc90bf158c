"""Workers of a model that is not served: refused with the difference, and not dialled at each sign of life."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
import structlog

from quire.v1 import inference_pb2 as pb
from scheduler_svc.workers.refusals import ASK_AGAIN_S, SAY_AGAIN_S, Refusals
from scheduler_svc.workers.worker_link import WorkerLink
from tests.scheduler.journal_setup import until
from tests.scheduler.mortal_sites import speaking_worker
from tests.scheduler.refusals import refusal_of
from tests.scheduler.scripted_worker import ScriptedWorker
from tests.scheduler.serving_site import Site, counting, running_site, tokens_in


class Dialled:
    """A site, and the addresses that its scheduler has dialled."""

    def __init__(self) -> None:
        self.addresses: list[str] = []
        self.site: Site

    def make_link(self, address: str) -> WorkerLink:
        self.addresses.append(address)
        return WorkerLink(address)

    async def refused(self, worker: ScriptedWorker) -> str:
        """Registers it until that is refused, and returns the reason."""
        while True:
            try:
                await self.site.cluster.Register(worker.registration())
            except grpc.aio.AioRpcError as error:
                assert error.code() is grpc.StatusCode.FAILED_PRECONDITION
                return error.details() or ""
            await until(lambda: worker.description.worker_id not in self.site.workers.members)


@asynccontextmanager
async def dialled_site(**options: Any) -> AsyncIterator[Dialled]:
    dialled = Dialled()
    async with running_site(make_link=dialled.make_link, **options) as dialled.site:
        yield dialled


@pytest.fixture
def logs() -> Iterator[list[Any]]:
    with structlog.testing.capture_logs() as captured:
        yield captured


async def a_worker(site: Site, worker_id: str = "other", fingerprint: str = "counting-2") -> ScriptedWorker:
    worker = speaking_worker(worker_id)
    worker.description.model.fingerprint = fingerprint
    await worker.start()
    site.on_close(worker.stop)
    return worker


def said_of_refusals(logs: list[Any]) -> list[str]:
    return [str(line["reason"]) for line in logs if line["event"] in ("worker refused", "worker not usable")]


async def gone(site: Site, worker: ScriptedWorker) -> None:
    await worker.stop()
    await until(lambda: not site.workers.members)


@pytest.mark.parametrize("only", ["another name", "counting-9", "count"])
async def test_another_model_than_the_one_that_is_set_is_refused_though_no_worker_is_here(
    only: str, logs: list[Any]
) -> None:
    async with dialled_site(only_model=only) as dialled:
        other = await a_worker(dialled.site)
        name = other.description.model.name
        reasons = [await dialled.refused(other) for _ in range(5)]
        for each in (repr(name), "'counting-2'", repr(only), "only_model"):
            assert each in reasons[0]
        assert len(set(reasons)) == 1
        assert dialled.addresses == [other.address]
        assert said_of_refusals(logs) == reasons[:1]
        assert dialled.site.admission.model is None


@pytest.mark.parametrize("only", ["name", "counting", "counting-1"])
async def test_the_model_that_is_set_is_served_by_its_name_or_the_beginning_of_its_fingerprint(only: str) -> None:
    async with dialled_site(only_model=only) as dialled:
        worker = await a_worker(dialled.site, "right", "counting-1")
        worker.description.model.name = "name"
        await dialled.site.register(worker)
        assert tokens_in(await dialled.site.run(counting(10))) == [11, 12, 13, 14]


async def test_another_model_than_the_one_that_is_set_is_refused_also_when_its_workers_have_gone() -> None:
    async with dialled_site(only_model="counting-1") as dialled:
        worker = await a_worker(dialled.site, "right", "counting-1")
        await dialled.site.register(worker)
        await gone(dialled.site, worker)
        assert "only_model" in await dialled.refused(await a_worker(dialled.site))


async def test_an_idle_model_outlives_a_link_that_breaks_for_a_moment() -> None:
    async with dialled_site(model_kept_s=600.0) as dialled:
        site = dialled.site
        first = await a_worker(site, "first", "counting-1")
        await site.register(first)
        await gone(site, first)
        other = await a_worker(site)
        assert "it is kept for 600 s more" in await dialled.refused(other)
        await first.start()
        await site.register(first)
        assert (await site.inference.GetModel(pb.GetModelRequest())).fingerprint == "counting-1"
        assert other.address not in dialled.addresses


async def test_text_is_accepted_for_the_old_model_while_no_worker_is_here_and_keeps_it() -> None:
    async with dialled_site() as dialled:  # that keeps a model no longer than its last worker
        site = dialled.site
        first = await a_worker(site, "first", "counting-1")
        await site.register(first)
        await gone(site, first)
        token_ids = (await site.inference.Tokenize(pb.TokenizeRequest(text="hello"))).token_ids
        request = pb.GenerateRequest(request_id="text", text="hello", stopping=pb.StoppingParams(max_tokens=3))
        running = asyncio.create_task(site.run(request))
        await until(lambda: site.engine.scheduler.waiting.size() == (1, len(token_ids)))
        assert "requests wait for one of them" in await dialled.refused(await a_worker(site))
        await first.start()
        await site.register(first)
        assert [each.finished.state for each in await running if each.HasField("finished")] == [
            pb.REQUEST_STATE_FINISHED
        ]
        await gone(site, first)
        other = await a_worker(site, "third")
        await site.register(other)
        assert (await site.inference.GetModel(pb.GetModelRequest())).fingerprint == "counting-2"


async def test_a_worker_of_another_model_is_logged_once_for_each_of_its_processes(logs: list[Any]) -> None:
    async with dialled_site() as dialled:
        await dialled.site.register(await a_worker(dialled.site, "first", "counting-1"))
        other = await a_worker(dialled.site)
        for incarnation in ("one", "two"):
            other.description.incarnation = incarnation
            for _ in range(5):
                assert "'counting-2'" in await dialled.refused(other)
        assert len(said_of_refusals(logs)) == 2
        assert other.address not in dialled.addresses


def liar(worker: ScriptedWorker) -> dict[str, str]:
    """Registers with the model that is served, and has another one."""
    return {"model_fingerprint": "counting-1"}


def misfit(worker: ScriptedWorker) -> dict[str, str]:
    """Does not fit beside the others."""
    worker.description.model.fingerprint = "counting-1"
    worker.description.pool.block_size = 32
    return {}


@pytest.mark.parametrize("kind", [liar, misfit])
async def test_what_only_its_description_shows_is_asked_for_once_until_others_come_or_go(
    kind: Any, logs: list[Any]
) -> None:
    async with dialled_site() as dialled:
        site = dialled.site
        first = await a_worker(site, "first", "counting-1")
        await site.register(first)
        other = await a_worker(site)
        said = kind(other)
        await site.cluster.Register(other.registration(**said))
        await until(lambda: "other" not in site.workers.members)
        for _ in range(5):
            error = await refusal_of(site.cluster.Register(other.registration(**said)))
            assert error.details() == said_of_refusals(logs)[0]
        assert dialled.addresses.count(other.address) == 1
        await gone(site, first)
        await site.register(other)
        assert dialled.addresses.count(other.address) > 1
        assert len(said_of_refusals(logs)) == 1


async def test_a_worker_that_nobody_reaches_is_tried_again_and_logged_once(logs: list[Any]) -> None:
    async with dialled_site() as dialled:
        lost = ScriptedWorker("lost")
        for _ in range(3):
            await dialled.site.cluster.Register(lost.registration(address="127.0.0.1:1"))
            await until(lambda: not dialled.site.workers.members)
        assert len(dialled.addresses) == 3
        assert len(said_of_refusals(logs)) == 1


def test_a_refusal_holds_for_a_while_and_is_said_again_after_long() -> None:
    refusals = Refusals()
    assert refusals.record_refusal("w", "one", "kept for 30 s more", 0.0, holds=True)
    assert refusals.reason("w", "one", ASK_AGAIN_S - 1) == "kept for 30 s more"
    assert refusals.reason("w", "two", 1.0) == ""
    assert refusals.reason("w", "one", ASK_AGAIN_S) == ""
    assert not refusals.record_refusal("w", "one", "kept for 29 s more", ASK_AGAIN_S, holds=True)
    assert refusals.record_refusal("w", "one", "another reason", ASK_AGAIN_S, holds=False)
    assert refusals.reason("w", "one", ASK_AGAIN_S) == ""
    assert refusals.record_refusal("w", "one", "another reason", ASK_AGAIN_S + SAY_AGAIN_S, holds=False)
