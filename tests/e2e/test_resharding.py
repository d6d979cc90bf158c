"""Shards that are added and removed while requests run, on real processes: nothing lost, no id accepted twice."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, suppress
from typing import Any

import grpc
import pytest
from google.protobuf.message import Message
from google.rpc import status_pb2

import quire
from quire.errors import ShardsChangedError, from_status
from quire.params import GenerateParams
from quire.rpc import SHARD_KEY, error_of
from quire.shards import new_request_id, shard_of_id
from quire.v1 import inference_pb2 as pb
from quire.v1 import inference_pb2_grpc
from tests.e2e.greedy_reference import assert_greedy
from tests.e2e.model_site import all_free
from tests.e2e.repeated_load import GREEDY, NUM_TOKENS, PROMPTS, RepeatedLoad, assert_equal_to_reference
from tests.e2e.scheduler_places import SchedulerPlaces
from tests.e2e.watched import Watched
from tests.patience import MOST_ATTEMPTS, patient
from tests.services import Service, start_scheduler
from tests.valkey import ValkeyProcess

NUM_WORKERS = 3


class Resharded(SchedulerPlaces[ValkeyProcess]):
    """Places for three schedulers of one store, of which two stand by at first; and workers that know all places."""

    def __init__(self, factory: pytest.TempPathFactory, stack: ExitStack) -> None:
        super().__init__(factory, stack, stack.enter_context(ValkeyProcess()), NUM_WORKERS)

    def start(self, stack: ExitStack, name: str, *flags: str) -> list[Service]:
        """Start the schedulers of a deployment of this name, which has one shard."""
        started: list[Service] = []
        for place in self.places:
            standby = ("--standby",) if started else ()
            service = self.start_at(place, "--deployment", name, *standby, *flags)
            started.append(stack.enter_context(service))
        return started

    @asynccontextmanager
    async def served(self, name: str, *flags: str) -> AsyncIterator[quire.AsyncClient]:
        """A client of such a deployment, which must end in order."""
        with ExitStack() as stack:
            services = await asyncio.to_thread(self.start, stack, name, *flags)
            async with quire.AsyncClient(self.address) as client:
                await until_workers(client, [NUM_WORKERS])
                yield client
                await all_free(client)
            for service in reversed(services):
                assert await asyncio.to_thread(service.stop) == 0
                assert "Traceback" not in "".join(service.raw)


def named(request_id: str) -> GenerateParams:
    return {**GREEDY, "request_id": request_id}


async def until_workers(client: quire.AsyncClient, num_workers: list[int]) -> None:
    """Returns once these shards take requests and have so many workers, by the word of their leaders."""
    async with asyncio.timeout(patient(60)):
        while True:
            taking = [shard for shard in await client.shards() if shard.takes_requests]
            if len(num_workers) > 1:
                if [shard.num_workers for shard in taking] == num_workers and all(each.leader for each in taking):
                    return
            elif len(taking) == 1 and len((await client.stats()).workers) == num_workers[0]:
                return
            await asyncio.sleep(0.05)


async def until_taking(client: quire.AsyncClient, number: int) -> None:
    """Returns once this client knows that so many shards take requests."""
    async with asyncio.timeout(patient(60)):
        while sum(shard.takes_requests for shard in await client.shards()) != number:  # noqa: ASYNC110 - the client follows them by itself
            await asyncio.sleep(0.05)


async def until_led_by(client: quire.AsyncClient, number: int) -> None:
    """Returns once the shards have so many leaders: one that has taken two leases hands one over."""
    async with asyncio.timeout(patient(60)):
        while len({shard.leader for shard in await client.shards()}) != number:  # noqa: ASYNC110 - the client follows them by itself
            await asyncio.sleep(0.05)


async def until_kept(client: quire.AsyncClient, number: int, ttl_s: float = 0.0) -> None:
    """Returns once this client knows of so many shards; they are kept until their records, of `ttl_s`, expire."""
    async with asyncio.timeout(patient(60) + ttl_s):
        while len(await client.shards()) != number:  # noqa: ASYNC110 - the client follows them by itself
            await asyncio.sleep(0.05)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Resharded]:
    with ExitStack() as stack:
        yield Resharded(tmp_path_factory, stack)


async def test_from_one_shard_to_three_and_back_under_load_nothing_is_lost_or_accepted_twice(site: Resharded) -> None:
    async with site.served("load") as client, AsyncExitStack() as stack:
        clients = [client, await stack.enter_async_context(quire.AsyncClient(",".join(reversed(site.places))))]
        load = RepeatedLoad(clients)
        load.begin()
        try:
            await load.until_more(20)
            assert await client.set_shards(3) == 1  # the new ones have no workers yet
            await until_workers(client, [1, 1, 1])
            await until_led_by(client, 3)
            await load.until_more(30)
            assert await client.set_shards(1) == 1
            await until_workers(client, [NUM_WORKERS])
            await load.until_more(20)
        finally:
            await load.end()
        by_shard = Counter(shard_of_id(request_id, 3) for request_id in load.outputs)
        assert set(by_shard) == {0, 1, 2}
        assert set(load.num_accepted.values()) == {1}, load.num_accepted.most_common(3)
        assert_equal_to_reference(site, load)
        stats = await client.stats()
        assert stats.num_finished == len(load.outputs)
        async with quire.AsyncClient(site.places[2]) as other:  # it comes when one shard takes requests
            for request_id, (_, output) in load.outputs.items():
                assert (await other.get(request_id)).samples[0].token_ids == output.samples[0].token_ids


class TooLateError(Exception):
    """Records may have expired before all that the test wanted of them was seen."""


@asynccontextmanager
async def in_time(ttl_s: float) -> AsyncIterator[None]:
    """Raise TooLateError in place of what failed when records of the time before may have expired."""
    loop = asyncio.get_running_loop()
    began_s = loop.time()
    try:
        yield
    except (quire.QuireError, AssertionError, pytest.fail.Exception) as error:
        if loop.time() - began_s <= ttl_s:
            raise
        raise TooLateError(f"after {loop.time() - began_s:.1f} s of {ttl_s} s") from error


@pytest.mark.long
async def test_requests_of_removed_shards_are_found_until_their_records_expire_and_shards_come_again(
    site: Resharded,
) -> None:
    ttl_s = round(patient(5))
    for attempt in range(MOST_ATTEMPTS):
        try:
            await find_until_they_expire(site, f"again-{attempt}", ttl_s)
            return
        except TooLateError:
            ttl_s *= 2
    pytest.fail("records had always expired before they were all looked up")


async def find_until_they_expire(site: Resharded, deployment: str, ttl_s: int) -> None:
    """Raises TooLateError if what fails may do so because the records have expired."""
    names = [f"mine-{number}" for number in range(12)]
    assert {shard_of_id(name, 2) for name in names} == {0, 1}
    async with (
        site.served(deployment, "--record-ttl-s", str(ttl_s)) as client,
        quire.AsyncClient(site.address) as other,
    ):
        await client.set_shards(2)
        await until_taking(client, 2)
        async with in_time(ttl_s):
            outputs = await asyncio.gather(*(client.generate(PROMPTS[1], **named(name)) for name in names))
            made = await asyncio.gather(
                *(client.generate(PROMPTS[1], **named(new_request_id(number % 2))) for number in range(4))
            )
            paused = next(name for name in (f"paused-{number}" for number in range(99)) if shard_of_id(name, 2) == 1)
            stream = client.stream(PROMPTS[2], **named(paused))
            await stream.accepted()
            assert await client.pause(paused) is quire.RequestState.PAUSED

            await client.set_shards(1)
            await until_taking(client, 1)
            await until_taking(other, 1)
            for name, output in zip(names, outputs, strict=True):
                assert (await other.get(name)).samples[0].token_ids == output.token_ids
                assert (await other.attach(name).completion()).token_ids == output.token_ids
                watched = Watched(other)
                again = await watched.run(PROMPTS[1], named(name))
                assert again.token_ids == output.token_ids and not watched.num_new
                with pytest.raises(quire.AlreadyExistsError):
                    await other.generate(PROMPTS[2], **named(name))
            for each in made:
                assert (await other.attach(each.request_id).completion()).token_ids == each.token_ids
        await until_workers(client, [NUM_WORKERS])
        await other.resume(paused)  # its shard has no worker, and borrows one
        assert_greedy(site.reference, [PROMPTS[2]], [(await stream.completion()).token_ids], NUM_TOKENS)

        await until_kept(client, 1, ttl_s)
        with pytest.raises(quire.NotFoundError):
            await other.get(paused)
        await client.set_shards(2)
        await until_taking(client, 2)
        new = next(name for name in (f"new-{number}" for number in range(99)) if shard_of_id(name, 2) == 1)
        for name in (new, *names):
            assert (await other.generate(PROMPTS[1], **named(name))).token_ids == outputs[0].token_ids


@pytest.mark.long
async def test_pins_are_on_new_shards_and_not_on_a_shard_that_comes_back_after_they_were_removed(
    site: Resharded,
) -> None:
    """By the word of the new shard: clients list the pins of all shards together."""
    prefix, name = [*range(2, 50)], "system"
    async with site.served("pins", "--record-ttl-s", "1") as client:
        await client.pin_prefix(name, prefix)
        await client.set_shards(2)
        await until_taking(client, 2)
        await until_pinned(client, 1, {name: 1})
        output = await client.generate([*prefix, 5], **named(new_request_id(1)))
        assert output.usage.cached_tokens == len(prefix)
        await client.set_shards(1)
        await until_kept(client, 1)
        await client.unpin_prefix(name)
        await client.pin_prefix("another", prefix[:16])
        await client.set_shards(2)
        await until_taking(client, 2)
        await until_pinned(client, 1, {"another": 1})
        await client.unpin_prefix("another")
        await until_pinned(client, 1, {})


async def until_pinned(client: quire.AsyncClient, shard: int, wanted: dict[str, int]) -> None:
    """Returns once the leader of a shard keeps these prefixes, each on so many workers of its own."""
    async with asyncio.timeout(patient(60)):
        while True:
            leader = (await client.shards())[shard].leader
            async with grpc.aio.insecure_channel(leader) as channel:
                with suppress(quire.UnavailableError):
                    answer = await call(channel, shard, "ListPrefixes", pb.ListPrefixesRequest())
                    if {each.name: len(each.worker_ids) for each in answer.prefixes} == wanted:
                        return
            await asyncio.sleep(0.05)


async def test_a_shard_takes_no_id_that_was_placed_by_an_earlier_number_and_answers_for_no_later_one(
    site: Resharded,
) -> None:
    async with site.served("wire") as client:
        assert await client.set_shards(2) == 1
        await until_taking(client, 2)
        leaders = [shard.leader for shard in await client.shards()]
        stale, late = (next(f"{what}-{n}" for n in range(99) if shard_of_id(f"{what}-{n}", 2) == 1) for what in "ab")
        async with grpc.aio.insecure_channel(leaders[0]) as first, grpc.aio.insecure_channel(leaders[1]) as second:
            await until_known(first, 0, 3)
            await until_known(second, 1, 3)
            for at, shard, request_id, version in ((first, 0, stale, 1), (first, 0, stale, 3), (second, 1, late, 2)):
                with pytest.raises(ShardsChangedError) as refused:
                    await submit(at, shard, request_id, version)
                assert refused.value.version == 3
            await submit(second, 1, late, 3)
            look = pb.GetRequestRequest(request_id=stale, shards_version=3)
            with pytest.raises(quire.NotFoundError):
                await call(first, 0, "GetRequest", look)
            look.shards_version = 4
            with pytest.raises(ShardsChangedError):
                await call(first, 0, "GetRequest", look)
            assert (await client.attach(late).completion()).usage.completion_tokens == NUM_TOKENS
            await client.delete_record(late)
            look = pb.GetRequestRequest(request_id=late, shards_version=3)
            assert (await call(second, 1, "GetRequest", look)).request_id == late  # its id stays taken
        for wrong in (0, 1000):
            with pytest.raises(quire.InvalidRequestError, match="num_shards"):
                await client.set_shards(wrong)


async def test_a_scheduler_whose_store_is_its_memory_has_one_shard() -> None:
    with ExitStack() as stack:
        service, address = start_scheduler()
        stack.enter_context(service)
        async with quire.AsyncClient(address) as client:
            with pytest.raises(quire.FailedPreconditionError, match="--store"):
                await client.set_shards(2)
            (shard,) = await client.shards()
            assert shard.takes_requests


async def until_known(channel: grpc.aio.Channel, shard: int, version: int) -> None:
    """Returns once the leader of a shard answers for this version of the number of shards."""
    async with asyncio.timeout(patient(20)):
        while True:
            with suppress(ShardsChangedError):
                with pytest.raises(quire.NotFoundError):
                    await call(
                        channel, shard, "GetRequest", pb.GetRequestRequest(request_id="x", shards_version=version)
                    )
                return
            await asyncio.sleep(0.05)


async def submit(channel: grpc.aio.Channel, shard: int, request_id: str, version: int) -> None:
    """Submit a request over a session, as chosen by this version; return when it is accepted. Raises its refusal."""
    request = pb.GenerateRequest(request_id=request_id, token_ids=pb.TokenIds(ids=PROMPTS[0]))
    request.stopping.max_tokens, request.stopping.ignore_eos = NUM_TOKENS, True
    request.on_disconnect = pb.ON_DISCONNECT_CONTINUE
    stub: inference_pb2_grpc.InferenceAsyncStub = inference_pb2_grpc.InferenceStub(channel)
    session = stub.Session(metadata=((SHARD_KEY, str(shard)),))
    await session.write(pb.SessionRequest(handle=1, submit=request, shards_version=version))
    response = await session.read()
    session.cancel()
    assert isinstance(response, pb.SessionResponse)
    event = response.events[0]
    if event.HasField("error"):
        raise from_status(status_pb2.Status.FromString(event.error.status))
    assert event.HasField("accepted")


async def call(channel: grpc.aio.Channel, shard: int, method: str, request: Message) -> Any:
    stub: inference_pb2_grpc.InferenceAsyncStub = inference_pb2_grpc.InferenceStub(channel)
    try:
        return await getattr(stub, method)(request, metadata=((SHARD_KEY, str(shard)),))
    except grpc.aio.AioRpcError as error:
        raise error_of(error) from None
