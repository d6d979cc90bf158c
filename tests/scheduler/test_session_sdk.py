"""The SDK against the real serving path, on a store and workers that misbehave."""

import asyncio
from collections.abc import AsyncIterator

import pytest

import quire
from tests.scheduler.gated_store import GatedStore
from tests.scheduler.journal_setup import until
from tests.scheduler.serving_site import Site, running_site


@pytest.fixture
async def store() -> GatedStore:
    return GatedStore()


@pytest.fixture
async def site(store: GatedStore) -> AsyncIterator[Site]:
    async with running_site(store, admission_timeout_s=0.2) as made:
        yield made
        store.may_append.set()


@pytest.fixture
async def client(site: Site) -> AsyncIterator[quire.AsyncClient]:
    async with quire.AsyncClient(site.address) as made:
        yield made


async def test_a_submission_that_met_a_silent_store_succeeds_when_it_is_made_again(
    site: Site, store: GatedStore, client: quire.AsyncClient
) -> None:
    """The first admission becomes durable after its refusal, under the id with which the client comes back."""
    await site.add_worker()
    store.may_append.clear()
    running = asyncio.create_task(client.generate([10], max_tokens=4, request_id="patient"))
    await until(lambda: site.admission.num_refused == 1)
    store.may_append.set()
    assert (await running).token_ids == (11, 12, 13, 14)
    assert site.engine.num_admitted == 1
    await site.idle()


async def test_hundreds_of_requests_share_one_session(site: Site, client: quire.AsyncClient) -> None:
    worker = await site.add_worker(num_blocks=256)
    completions = await asyncio.gather(*(client.generate([10 * i], max_tokens=3) for i in range(500)))
    for i, completion in enumerate(completions):
        assert completion.token_ids == (10 * i + 1, 10 * i + 2, 10 * i + 3)
    assert worker.num_streams == 1
    await site.idle()


async def test_a_stream_that_is_left_early_cancels_its_request(site: Site, client: quire.AsyncClient) -> None:
    worker = await site.add_worker()
    async with client.stream([10], max_tokens=500, request_id="left") as stream:
        assert (await anext(stream)).token_ids[0] == 11
        worker.may_answer.clear()
    await until(lambda: site.engine.num_finished == 1)
    assert (await client.get("left")).state is quire.RequestState.CANCELLED
    worker.may_answer.set()
    await site.idle()


async def test_a_chat_of_too_many_fields_is_refused_alone(site: Site, client: quire.AsyncClient) -> None:
    """Regression: it ended the client's session, was sent again, and after three times all requests failed with it."""
    worker = await site.add_worker()
    worker.may_answer.clear()
    stream = client.stream([10], max_tokens=6, request_id="bystander")
    await stream.accepted()
    messages = [{"role": "user", "content": "x", "name": "a"}] * 65_536
    with pytest.raises(quire.InvalidRequestError, match="fields in all") as caught:
        await client.chat(messages, max_tokens=4)
    assert [each.field for each in caught.value.violations] == ["messages"]
    worker.may_answer.set()
    completion = await stream.completion()
    assert completion.token_ids == (11, 12, 13, 14, 15, 16) and not (await stream.accepted()).attached
    await site.idle()


async def test_a_deadline_comes_as_the_servers_own_word(site: Site, client: quire.AsyncClient) -> None:
    worker = await site.add_worker()
    worker.may_answer.clear()
    with pytest.raises(quire.RequestExpiredError, match="after 0 tokens"):
        await client.generate([10], max_tokens=4, timeout_s=0.1)
    worker.may_answer.set()
    await site.idle()


async def test_an_output_survives_the_loss_of_every_worker_on_the_way(site: Site, client: quire.AsyncClient) -> None:
    running = None
    for life in range(3):
        worker = await site.add_worker(f"life-{life}")
        running = running or asyncio.create_task(client.generate([10], max_tokens=150))
        await until(lambda worker=worker: len(worker.steps) > 20)  # type: ignore[misc]
        await worker.stop()
        await site.until_nobody_is_left()
    await site.add_worker("last")
    assert running is not None
    assert (await running).token_ids == tuple(range(11, 161))
    await site.idle()
