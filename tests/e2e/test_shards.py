"""A deployment of two shards on real processes: requests are spread and found, leaders die, workers move."""

import asyncio
import json
import signal
import sys
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import ExitStack, asynccontextmanager

import grpc
import httpx2
import pytest

import quire
from quire.params import GenerateParams
from quire.prompt_beginnings import beginnings_of, unpack_hashes
from quire.shards import new_request_id, session_number, shard_of_id
from quire.v1 import cluster_pb2, cluster_pb2_grpc
from tests.e2e.greedy_reference import assert_greedy
from tests.e2e.model_site import all_free
from tests.e2e.scheduler_places import SchedulerPlaces
from tests.e2e.watched import Watched, until_more_has_come
from tests.patience import patient
from tests.services import Service, start_gateway
from tests.valkey import ValkeyProcess
from tests.worker.tiny_models import random_prompts

NUM_SHARDS = 2
NUM_TOKENS = 90
PROMPTS = random_prompts((1, 15, 16, 33, 44, 27, 9, 20), seed=4)
GREEDY: GenerateParams = {"temperature": 0, "max_tokens": NUM_TOKENS, "ignore_eos": True}


def named(request_id: str) -> GenerateParams:
    return {**GREEDY, "request_id": request_id}


def in_turn(number: int) -> GenerateParams:
    """Parameters of one of several requests, of which each shard gets as many."""
    return named(new_request_id(number % NUM_SHARDS))


class Sharded(SchedulerPlaces[ValkeyProcess]):
    """Two shards, places for three schedulers of one store, and workers that know all three places."""

    def __init__(self, factory: pytest.TempPathFactory, stack: ExitStack, num_workers: int = NUM_SHARDS) -> None:
        super().__init__(factory, stack, stack.enter_context(ValkeyProcess()), num_workers)

    def start(self, stack: ExitStack, place: str) -> Service:
        return stack.enter_context(self.start_at(place, "--shards", str(NUM_SHARDS)))

    @asynccontextmanager
    async def led(self, num_schedulers: int = NUM_SHARDS) -> AsyncIterator["Led"]:
        """Schedulers, of which each shard has one that leads and a worker; and a client of them all."""
        with ExitStack() as stack:
            async with quire.AsyncClient(self.address) as client:
                led = Led(self, stack, client)
                for place in self.places[:num_schedulers]:
                    await led.start(place)
                await until(client, led.schedulers.values(), num_workers=[1] * NUM_SHARDS)
                yield led


class Led:
    """Schedulers by their places, and a client of them all."""

    def __init__(self, site: Sharded, stack: ExitStack, client: quire.AsyncClient) -> None:
        self.client = client
        self.schedulers: dict[str, Service] = {}
        self._site = site
        self._stack = stack

    async def start(self, place: str) -> Service:
        """Start a scheduler there; another one that was there has ended."""
        self.schedulers[place] = await asyncio.to_thread(self._site.start, self._stack, place)
        return self.schedulers[place]

    async def leader(self, shard: int) -> tuple[str, Service]:
        """The place of a shard's leader, and its process; waits for one, if there is none at the moment."""
        async with asyncio.timeout(patient(60)):
            while not (place := (await self.client.shards())[shard].leader):  # noqa: ASYNC110 - the client follows them by itself
                await asyncio.sleep(0.05)
        return place, self.schedulers[place]


def epochs(schedulers: Iterable[Service]) -> list[int]:
    """Epochs of the shards' leaders, as these have logged; 0: none leads."""
    leads = [entry for each in schedulers for entry in list(each.lines) if entry["event"] == "leading"]
    return [
        max((entry["epoch"] for entry in leads if entry["shard"] == shard), default=0) for shard in range(NUM_SHARDS)
    ]


async def until(client: quire.AsyncClient, schedulers: Iterable[Service], *, num_workers: list[int]) -> None:
    """Returns once the shards have so many workers, by the word of these leaders: a dead one's counts for a while.

    And once no scheduler leads two shards while another one leads none: it would hand one over soon.
    """
    living = list(schedulers)
    async with asyncio.timeout(patient(60)):
        while True:
            shards = await client.shards()  # one, as long as no scheduler has said in time which there are
            if [shard.num_workers for shard in shards] == num_workers:
                is_theirs = [epoch == shard.epoch for epoch, shard in zip(epochs(living), shards, strict=True)]
                is_spread = len({shard.leader for shard in shards}) == min(len(living), NUM_SHARDS)
                if is_spread and all(each for each, wanted in zip(is_theirs, num_workers, strict=True) if wanted):
                    return
            await asyncio.sleep(0.05)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sharded]:
    with ExitStack() as stack:
        yield Sharded(tmp_path_factory, stack)


@pytest.fixture
def own_site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sharded]:
    """A site for a test that takes its workers away."""
    with ExitStack() as stack:
        yield Sharded(tmp_path_factory, stack)


async def test_requests_are_spread_and_every_client_finds_them(site: Sharded) -> None:
    async with site.led() as led, quire.AsyncClient(site.places[1]) as other:
        client = led.client
        outputs = await asyncio.gather(*(client.generate(prompt, **GREEDY) for prompt in PROMPTS))
        assert_greedy(site.reference, PROMPTS, [each.token_ids for each in outputs], NUM_TOKENS)
        shards = [shard_of_id(each.request_id, NUM_SHARDS) for each in outputs]
        assert sorted(shards) == [0] * 4 + [1] * 4  # as many for each worker
        stats = await other.stats()
        assert stats.num_finished == len(PROMPTS) and len(stats.workers) == NUM_SHARDS

        names = [f"mine-{number}" for number in range(6)]
        assert {shard_of_id(name, NUM_SHARDS) for name in names} == {0, 1}
        for name in names:
            await client.generate(PROMPTS[1], **named(name))
        for request_id in (*names, *(each.request_id for each in outputs)):
            record = await other.get(request_id)
            again = await other.attach(request_id).completion()
            assert again.token_ids == record.samples[0].token_ids and len(again.token_ids) == NUM_TOKENS
        with pytest.raises(quire.NotFoundError):
            await other.get("nobody's")
        with pytest.raises(quire.NotFoundError):
            await other.attach("nobody's").completion()
        assert (await client.generate(PROMPTS[1], **named(names[0]))).request_id == names[0]
        with pytest.raises(quire.AlreadyExistsError):
            await other.generate(PROMPTS[2], **named(names[0]))


async def test_live_requests_are_listed_and_handled_wherever_they_are(site: Sharded) -> None:
    async with site.led() as led, quire.AsyncClient(site.address) as other:
        client = led.client
        for name in ("w0", "w1"):  # so that no request ends while this looks at it
            assert await other.drain_worker(name) == 0
        await until(client, led.schedulers.values(), num_workers=[0] * NUM_SHARDS)
        streams = [client.stream(PROMPTS[0], **GREEDY) for _ in range(6)]
        for stream in streams:
            await stream.accepted()
        assert {shard_of_id(stream.request_id, NUM_SHARDS) for stream in streams} == {0, 1}
        page = await other.list_requests(page_size=4)
        listed = list(page.requests)
        while page.next_page_token is not None:
            page = await other.list_requests(page_size=4, page_token=page.next_page_token)
            listed += page.requests
        assert {each.request_id for each in listed} == {stream.request_id for stream in streams}
        with pytest.raises(quire.InvalidRequestError, match="page_token"):
            await other.list_requests(page_token="7:x")
        for stream in streams:
            assert await other.pause(stream.request_id) is quire.RequestState.PAUSED
            assert await other.resume(stream.request_id) is not quire.RequestState.PAUSED
            await other.cancel(stream.request_id)
        for name in ("w0", "w1"):
            await other.drain_worker(name, undo=True)
        with pytest.raises(quire.NotFoundError):
            await other.drain_worker("w9")
        pinned = await other.pin_prefix("both", list(range(1, 40)))
        assert pinned.created and not (await client.pin_prefix("both", list(range(1, 40)))).created
        assert [each.name for each in await client.list_prefixes()] == ["both"]
        await client.unpin_prefix("both")
        assert await other.list_prefixes() == ()
        await all_free(client)


async def test_requests_are_served_elsewhere_while_the_only_worker_of_a_shard_is_drained(site: Sharded) -> None:
    async with site.led() as led:
        client = led.client
        stream = client.stream(PROMPTS[0], **named(new_request_id(1)))
        await anext(stream)
        drained = (await client.stats()).workers[1].worker_id  # that of shard 1
        await client.drain_worker(drained)
        await until(client, led.schedulers.values(), num_workers=[1, 0])
        outputs = [await stream.completion(), *[await client.generate(prompt, **GREEDY) for prompt in PROMPTS[1:]]]
        assert_greedy(site.reference, PROMPTS, [each.token_ids for each in outputs], NUM_TOKENS)
        assert {shard_of_id(each.request_id, NUM_SHARDS) for each in outputs[1:]} == {0}
        async with asyncio.timeout(patient(30)):  # by the worker of the other shard
            await client.generate(PROMPTS[0], **named(new_request_id(1)))
        assert [worker.draining for worker in (await client.stats()).workers if worker.worker_id == drained] == [True]
        await client.drain_worker(drained, undo=True)
        await until(client, led.schedulers.values(), num_workers=[1, 1])
        await all_free(client)


async def test_a_scheduler_to_spare_leads_whichever_shard_lost_its_leader(site: Sharded) -> None:
    async with site.led(3) as led:
        for shard in range(NUM_SHARDS):
            watched = Watched(led.client)
            runs = [asyncio.create_task(watched.run(prompt, in_turn(i))) for i, prompt in enumerate(PROMPTS)]
            await until_more_has_come(watched, runs)
            place, killed = await led.leader(shard)
            await asyncio.to_thread(killed.kill)
            outputs = await asyncio.gather(*runs)
            assert_greedy(site.reference, PROMPTS, [each.token_ids for each in outputs], NUM_TOKENS)
            assert [shard_of_id(each.request_id, NUM_SHARDS) for each in outputs] == [0, 1] * (len(PROMPTS) // 2)
            await led.start(place)
            await until(led.client, led.schedulers.values(), num_workers=[1] * NUM_SHARDS)
        await all_free(led.client)


async def test_one_scheduler_leads_all_shards_until_another_comes_and_after_it_has_gone(site: Sharded) -> None:
    async with site.led(1) as led:
        (alone,) = led.schedulers.values()
        for change in ("comes", "ends", "comes", "is killed"):
            watched = Watched(led.client)
            runs = [asyncio.create_task(watched.run(prompt, in_turn(i))) for i, prompt in enumerate(PROMPTS)]
            await until_more_has_come(watched, runs)
            if change == "comes":
                other = await led.start(site.places[1])
                await asyncio.to_thread(other.wait_for, "leading")
            elif change == "ends":
                assert await asyncio.to_thread(other.stop) == 0
            else:
                await asyncio.to_thread(other.kill)
            outputs = await asyncio.gather(*runs)
            assert_greedy(site.reference, PROMPTS, [each.token_ids for each in outputs], NUM_TOKENS)
            living = [each for each in (alone, other) if each.process.poll() is None]
            await until(led.client, living, num_workers=[1] * NUM_SHARDS)
            leaders = {shard.leader for shard in await led.client.shards()}
            assert len(leaders) == len(living)
        await all_free(led.client)


async def test_a_leader_told_to_end_hands_over_to_the_spare_one(site: Sharded) -> None:
    async with site.led(3) as led:
        watched = Watched(led.client)
        runs = [asyncio.create_task(watched.run(prompt, in_turn(i))) for i, prompt in enumerate(PROMPTS)]
        await until_more_has_come(watched, runs)
        _, leader = await led.leader(1)
        leader.signal(signal.SIGTERM)
        assert await asyncio.to_thread(leader.wait) == 0
        outputs = await asyncio.gather(*runs)
        assert_greedy(site.reference, PROMPTS, [each.token_ids for each in outputs], NUM_TOKENS)
        await all_free(led.client)


async def test_an_id_for_a_request_names_the_shard_that_knows_its_prompt(site: Sharded) -> None:
    prompt = list(range(1, 200))
    async with site.led() as led:
        client = led.client
        made = [client.new_request_id(prompt, prefix="mine-") for _ in range(3)]
        assert len({shard_of_id(each, NUM_SHARDS) for each in made}) == 1 and len(set(made)) == 3
        for request_id in made:
            output = await client.generate(prompt, max_tokens=2, ignore_eos=True, request_id=request_id)
            assert output.request_id == request_id
        stats = await client.stats()
        assert stats.work.prefix_hit_tokens > 0


CLIENT = """
import asyncio, json, sys, quire

async def main(address, prompt, salt, request_id):
    async with quire.AsyncClient(address) as client:
        await client.shards()
        named = {"request_id": request_id} if request_id else {}
        output = await client.generate(prompt, cache_salt=salt, max_tokens=2, ignore_eos=True, **named)
        print(json.dumps([output.request_id, output.usage.cached_tokens]))

asyncio.run(main(*json.loads(sys.argv[1])))
"""


async def in_a_client_process(address: str, prompt: list[int], salt: str, request_id: str = "") -> tuple[int, int]:
    """Submits a prompt from a process of its own. Returns its shard, and how many tokens it found in the cache."""
    arguments = json.dumps([address, prompt, salt, request_id])
    client = await asyncio.create_subprocess_exec(
        sys.executable, "-c", CLIENT, arguments, stdout=asyncio.subprocess.PIPE
    )
    output, _ = await asyncio.wait_for(client.communicate(), patient(60))
    served_as, num_cached = json.loads(output)
    return shard_of_id(served_as, NUM_SHARDS), num_cached


async def test_a_client_finds_what_another_process_has_computed(site: Sharded) -> None:
    """By the word of a scheduler that does not lead that shard, and from its first request on."""
    prompt = [number % 90 + 1 for number in range(200)]
    async with site.led() as led:
        place, _ = await led.leader(0)
        assert await in_a_client_process(site.address, prompt, "ours", new_request_id(1)) == (1, 0)
        hashes = {each.short_hash for each in beginnings_of(prompt, "ours", None)}
        async with grpc.aio.insecure_channel(place) as channel, asyncio.timeout(patient(30)):
            async for message in cluster_pb2_grpc.ClusterStub(channel).Topology(cluster_pb2.TopologyRequest()):
                if any(each.shard == 1 and hashes <= unpack_hashes(each.hashes) for each in message.cached):
                    break
        assert await in_a_client_process(place, [*prompt, 5, 6], "ours") == (1, 192)
        _, num_cached = await in_a_client_process(place, [*prompt, 5, 6], "another's")  # on either shard, by load
        assert num_cached == 0


async def test_requests_of_a_session_go_to_one_shard_whichever_client_or_gateway_sends_them(site: Sharded) -> None:
    """Also the first request of a client that does not know the shards yet; each finds what the one before computed."""
    keys = [f"user-{number}" for number in range(6)]
    home = {key: shard_of_id(new_request_id(None, session=session_number(key, None)), NUM_SHARDS) for key in keys}
    assert set(home.values()) == {0, 1}
    async with site.led() as led:
        async with quire.AsyncClient(site.places[1]) as second:  # a scheduler that has seen both workers, too
            await until(second, led.schedulers.values(), num_workers=[1] * NUM_SHARDS)
        gateway, url = await asyncio.to_thread(start_gateway, site.places[1])
        with gateway:
            async with httpx2.AsyncClient(base_url=url, timeout=patient(60)) as http:
                for key in keys:
                    given: GenerateParams = {**GREEDY, "max_tokens": 2, "session_key": key, "cache_salt": key}
                    async with quire.AsyncClient(site.places[1]) as new:
                        outputs = [await new.generate(PROMPTS[3], **given) for _ in range(2)]
                    outputs.append(await led.client.generate(PROMPTS[3], **given))
                    assert [shard_of_id(each.request_id, NUM_SHARDS) for each in outputs] == [home[key]] * 3
                    assert [each.usage.cached_tokens for each in outputs] == [0, 32, 32]
                    fields = {"prompt": PROMPTS[3], "max_tokens": 2, "prompt_cache_key": key, "cache_salt": key}
                    answer = (await http.post("/v1/completions", json=fields)).json()
                    assert shard_of_id(answer["id"], NUM_SHARDS) == home[key]
                    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 32


async def test_a_shard_that_never_had_a_worker_borrows_one(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Until then it refuses requests, for it does not know the model: none waits there that could call a worker."""
    names = [f"round-{number}" for number in range(6)]
    assert {shard_of_id(name, NUM_SHARDS) for name in names} == {0, 1}
    with ExitStack() as stack:
        site = Sharded(tmp_path_factory, stack, num_workers=1)
        await asyncio.to_thread(site.start, stack, site.places[0])
        async with quire.AsyncClient(site.address, retries=round(patient(60))) as client:
            await client.wait_ready(patient(60))
            outputs = await asyncio.gather(*(client.generate(PROMPTS[1], **named(name)) for name in names))
            assert_greedy(site.reference, [PROMPTS[1]] * len(names), [each.token_ids for each in outputs], NUM_TOKENS)
            await all_free(client)


async def test_shards_are_described_again_after_the_store_has_lost_everything(own_site: Sharded) -> None:
    """Regression: a leader that had written its journal again described its shard at its epoch of before, unheard."""
    async with own_site.led() as led:
        before = [shard.epoch for shard in await led.client.shards()]
        await asyncio.to_thread(own_site.store.command, "FLUSHALL")
        async with asyncio.timeout(patient(60)):
            while True:
                shards = await led.client.shards()
                is_later = all(shard.epoch > epoch for shard, epoch in zip(shards, before, strict=True))
                if is_later and [shard.num_workers for shard in shards] == [1] * NUM_SHARDS:
                    break
                await asyncio.sleep(0.05)
        outputs = await asyncio.gather(*(led.client.generate(PROMPTS[1], **GREEDY) for _ in range(8)))
        assert_greedy(own_site.reference, [PROMPTS[1]] * 8, [each.token_ids for each in outputs], NUM_TOKENS)
        assert all(shard.num_workers for shard in await led.client.shards())


async def test_workers_go_round_where_there_are_fewer_than_shards_and_spread_where_there_are_more(
    own_site: Sharded,
) -> None:
    async with own_site.led() as led:
        gone = own_site.workers.pop()
        await asyncio.to_thread(gone.kill)
        names = [f"round-{number}" for number in range(8)]
        assert {shard_of_id(name, NUM_SHARDS) for name in names} == {0, 1}
        outputs = await asyncio.gather(*(led.client.generate(PROMPTS[1], **named(name)) for name in names))
        assert_greedy(own_site.reference, [PROMPTS[1]] * 8, [each.token_ids for each in outputs], NUM_TOKENS)
        with ExitStack() as stack:
            more = [stack.enter_context(own_site.start_worker(f"more{i}", "--num-blocks", "600")) for i in range(3)]
            await until(led.client, led.schedulers.values(), num_workers=[2, 2])
            stats = await led.client.stats()
            first = {worker.worker_id for worker in stats.workers[:2]}  # those of shard 0
            watched = Watched(led.client)
            runs = [asyncio.create_task(watched.run(prompt, in_turn(i))) for i, prompt in enumerate(PROMPTS)]
            await until_more_has_come(watched, runs)
            for service in (*more, *own_site.workers):
                (started,) = [line for line in service.lines if line["event"] == "listening"]
                if started["worker_id"] not in first:
                    await asyncio.to_thread(service.kill)
            await until(led.client, led.schedulers.values(), num_workers=[1, 1])
            outputs = await asyncio.gather(*runs)
            assert_greedy(own_site.reference, PROMPTS, [each.token_ids for each in outputs], NUM_TOKENS)
            await all_free(led.client)
